"""Weights travel from the trainer to real engine processes, and arrive whole or not at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from miles.backends.megatron_utils.engine_client import WeightUpdateError
from tests.fast.backends.megatron_utils.conftest import free_port
from tests.fast.backends.megatron_utils.tiny_models import make_args, make_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[4]
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron"), pytest.mark.timeout(180)]


@contextmanager
def process(*command: str) -> Iterator[str]:
    """Run `python -m <command> --port`-style server processes; yields the URL once it answers /health."""
    with process_with_pid(*command) as (url, _):
        yield url


@contextmanager
def process_with_pid(*command: str) -> Iterator[tuple[str, int]]:
    port = free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    full = [sys.executable, "-m", *(part.replace("PORT", str(port)) for part in command)]
    server = subprocess.Popen(full, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 55
        while not _healthy(url):
            assert server.poll() is None and time.monotonic() < deadline, f"{full} did not start"
            time.sleep(0.1)
        yield url, server.pid
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait()


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def call(url: str, endpoint: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
    data = json.dumps(payload).encode() if payload is not None else None
    request = urllib.request.Request(url + endpoint, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as response:
        answer: dict[str, Any] = json.loads(response.read() or b"{}")
        return answer


@pytest.fixture(scope="module")
def engine(checkpoints: dict[str, Path]) -> Iterator[str]:
    module = "miles.backends.embedded_engine"
    with process(
        module, "--model-path", str(checkpoints["qwen3-tied"]), "--host", "127.0.0.1", "--port", "PORT"
    ) as url:
        yield url


@pytest.fixture
def victim(checkpoints: dict[str, Path]) -> Iterator[tuple[str, int]]:
    """URL and process of a second engine, to be killed or stopped."""
    module = "miles.backends.embedded_engine"
    with process_with_pid(module, "--model-path", str(checkpoints["qwen3-tied"]), "--port", "PORT") as found:
        yield found


@pytest.fixture(scope="module", params=["leaves", "deaf"])
def refusing_engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """`deaf`: it does not leave the group when it is told to, so the broadcast to it never ends."""
    with process("tests.fast.backends.megatron_utils.refusing_engine_main", "PORT", request.param) as url:
        yield url


@pytest.fixture
def trainer(checkpoints: dict[str, Path], trainer_of: Callable[..., Any]) -> Any:
    return trainer_of(make_args(checkpoints["qwen3-tied"], check_weight_update_equal=True, rollout_engine="embedded"))


@pytest.mark.parametrize("flattened", [True, False])
@pytest.mark.parametrize("buffer_bytes", [2**29, 5000])
def test_after_an_update_engine_and_trainer_hold_the_same_weights(
    engine: str, trainer: Any, buffer_bytes: int, flattened: bool
) -> None:
    from dataclasses import replace

    trainer._update_config = replace(trainer._update_config, buffer_bytes=buffer_bytes, flattened=flattened)
    trainer.connect_engines([engine])
    for step in range(2):
        trainer.train(step, make_shard(seed=step))
        times = trainer.update_weights()
        assert trainer.weight_version == step + 1
        assert call(engine, "/model_info")["weight_version"] == str(step + 1)
        found = call(engine, "/weights_checker", {"action": "checksum"})["ranks"][0]["checksums"]
        assert found == trainer.weight_checksums()
        assert 0 < times["perf/weight_update_pause_seconds"] <= times["perf/update_weights_time"] < 20


def test_engine_and_trainer_agree_on_log_probs(engine: str, trainer: Any) -> None:
    """The metric of every step, `train/train_rollout_logprob_abs_diff`, is at the level of float32 rounding."""
    trainer.connect_engines([engine])
    trainer.train(0, make_shard(seed=0))
    trainer.update_weights()
    shard = make_shard(seed=4)
    for i, tokens in enumerate(shard["tokens"]):
        prompt = tokens[: len(tokens) - shard["response_lengths"][i]]
        sampling = {"max_new_tokens": 8, "temperature": 1.0, "ignore_eos": True}
        answer = call(engine, "/generate", {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True})
        chosen = answer["meta_info"]["output_token_logprobs"]
        assert answer["meta_info"]["weight_version"] == "1"
        shard["tokens"][i] = prompt + [entry[1] for entry in chosen]
        shard["rollout_log_probs"][i] = [entry[0] for entry in chosen]
        shard["response_lengths"][i] = len(chosen)
        shard["loss_masks"][i] = [1] * len(chosen)
    assert trainer.train(1, shard)["train/train_rollout_logprob_abs_diff"] < 1e-4


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_request_lives_through_an_update_as_the_mode_says(engine: str, trainer: Any, mode: str) -> None:
    from concurrent.futures import ThreadPoolExecutor
    from dataclasses import replace

    trainer._update_config = replace(trainer._update_config, pause_mode=mode)
    trainer.connect_engines([engine])
    sampling = {"max_new_tokens": 100, "temperature": 1.0, "ignore_eos": True}
    payload = {"input_ids": [1, 2, 3], "sampling_params": {**sampling, "n": 16}, "return_logprob": True}
    before = call(engine, "/model_info")["weight_version"]
    trainer.weight_version = int(before) + 5 if before.isdigit() else 5
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(call, engine, "/generate", payload)
        time.sleep(0.05)
        trainer.update_weights()
        results = answers.result()
    assert call(engine, "/model_info")["weight_version"] == str(trainer.weight_version)
    reasons = {answer["meta_info"]["finish_reason"]["type"] for answer in results}
    assert reasons <= ({"abort", "length"} if mode == "abort" else {"length"})


def test_a_refusal_fails_the_update_at_once_and_the_next_one_works(
    engine: str, refusing_engine: str, trainer: Any
) -> None:
    trainer.connect_engines([engine, refusing_engine])
    before = call(engine, "/weights_checker", {"action": "checksum"})
    start = time.monotonic()
    with pytest.raises(WeightUpdateError, match="no thanks") as error:
        trainer.update_weights()
    assert time.monotonic() - start < 15, "the broadcast must not be waited for"
    assert error.value.engine_url == refusing_engine
    assert (error.value.endpoint, error.value.status) == ("/update_weights_from_distributed", 400)
    assert trainer.weight_version == 0
    assert call(engine, "/weights_checker", {"action": "checksum"}) == before, "nothing half-updated"
    trainer.train(0, make_shard(seed=0))
    trainer.connect_engines([engine])
    trainer.update_weights()
    answer = call(engine, "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}})
    assert answer["meta_info"]["weight_version"] == "1"


@pytest.mark.parametrize("first", ["victim", "survivor"])
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_lost_within_a_bucket_is_named_and_the_rest_is_updated_under_the_same_version(
    engine: str,
    victim: tuple[str, int],
    trainer: Any,
    monkeypatch: pytest.MonkeyPatch,
    sent: signal.Signals,
    first: str,
) -> None:
    """`first`: who comes first in the group, and may pass the broadcast on to the other."""
    from dataclasses import replace

    from miles.backends.megatron_utils.update_group import UpdateGroup

    url, pid = victim
    trainer._update_config = replace(trainer._update_config, buffer_bytes=20_000, timeout_secs=4.0)
    trainer.weight_version = 6
    trainer.connect_engines([url, engine] if first == "victim" else [engine, url])
    broadcast, started = UpdateGroup.broadcast, []

    def lose_it_in_the_second_bucket(self: UpdateGroup, tensors: Any) -> None:
        started.append(tensors)
        if len(started) == 2:
            os.kill(pid, sent)
        broadcast(self, tensors)

    monkeypatch.setattr(UpdateGroup, "broadcast", lose_it_in_the_second_bucket)
    before = call(engine, "/weights_checker", {"action": "checksum"})
    trainer.train(0, make_shard(seed=0))
    start = time.monotonic()
    with pytest.raises(WeightUpdateError) as error:
        trainer.update_weights()
    assert time.monotonic() - start < 20
    assert error.value.engine_urls == (url,) and error.value.engine_url == url
    assert trainer.weight_version == 6
    assert call(engine, "/weights_checker", {"action": "checksum"}) == before, "what had arrived is dropped"
    assert call(engine, "/server_info")["internal_states"][0]["paused"] is not None

    with pytest.raises(WeightUpdateError) as error:
        trainer.connect_engines([engine, url])
    assert error.value.engine_urls == (url,)
    trainer.connect_engines([engine])
    trainer.connect_engines([engine])
    trainer.update_weights()
    answer = call(engine, "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}})
    assert answer["meta_info"]["weight_version"] == "7" == str(trainer.weight_version)


@pytest.mark.parametrize("fate", ["dies", "hangs"])
def test_what_becomes_of_an_engine_within_a_bucket_does_not_reach_the_others(fate: str) -> None:
    """Engines built like SGLang, which waits in a broadcast and hears nothing. The tensors are too large for the
    victim's connection to take them up: in one group the other engine would wait for those that come behind."""
    from miles.backends.megatron_utils.weight_update import WeightUpdateConfig, WeightUpdater

    config = WeightUpdateConfig(
        pause_mode="retract",
        buffer_bytes=1024**3,
        flattened=True,
        ranks_per_engine=1,
        backend="gloo",
        timeout_secs=4.0,
        flush_timeout_secs=4.0,
        loose_from_bytes=1024**2,
    )
    weights = [[(f"weight.{index}", torch.zeros(4 * 1024**2))] for index in range(8)]
    module = "tests.fast.backends.megatron_utils.blocking_engine_main"
    with process(module, "PORT") as survivor, process(module, "PORT", fate) as victim:
        updater = WeightUpdater(config)
        updater.connect([survivor, victim])
        with pytest.raises(WeightUpdateError) as error:
            updater.update([list(piece) for piece in weights], version=1)
        assert error.value.engine_urls == (victim,)
        updater.connect([survivor])
        updater.update([list(piece) for piece in weights], version=1)
        updater.close()


def test_an_engine_that_dies_in_a_group_that_all_share_is_named_alone_and_the_others_come_back() -> None:
    """Over gloo, where a connection that closes ends the broadcast for everybody; NCCL has not been had for it."""
    from miles.backends.megatron_utils.weight_update import WeightUpdateConfig, WeightUpdater

    config = WeightUpdateConfig(
        pause_mode="retract",
        buffer_bytes=1024**2,
        flattened=True,
        ranks_per_engine=1,
        backend="gloo",
        timeout_secs=20.0,
        flush_timeout_secs=4.0,
        shares_group=True,
    )
    module = "tests.fast.backends.megatron_utils.blocking_engine_main"
    with process(module, "PORT") as first, process(module, "PORT", "dies") as victim, process(module, "PORT") as last:
        updater = WeightUpdater(config)
        updater.connect([first, victim, last])
        with pytest.raises(WeightUpdateError) as error:
            updater.update([[("weight", torch.zeros(16))]], version=1)
        assert error.value.engine_urls == (victim,)
        updater.connect([first, last])
        updater.update([[("weight", torch.zeros(16))]], version=1)
        updater.close()


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_ranks_that_share_the_model_update_and_fail_together(
    engine: str, checkpoints: dict[str, Path], tmp_path: Path, layout: str
) -> None:
    """A refusal on rank 0 must not leave the other rank in a gather."""
    port = free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    module = "tests.fast.backends.megatron_utils.update_ranks_main"
    arguments = [str(port), str(checkpoints["qwen3-tied"]), engine]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), *arguments, str(tmp_path / str(rank)), layout],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(outputs)
    first, second = (json.loads((tmp_path / str(rank)).read_text(encoding="utf-8")) for rank in range(2))
    assert first.pop("bytes") > 40_000 and second.pop("bytes") is None
    assert first == second == {"culprit": "http://culprit", "version then": 1, "version": 2}
    answer = call(engine, "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}})
    assert answer["meta_info"]["weight_version"] == "2"


def test_an_engine_that_comes_back_joins_the_next_group(engine: str, victim: tuple[str, int], trainer: Any) -> None:
    trainer.connect_engines([engine])
    trainer.update_weights()
    trainer.connect_engines([engine, victim[0]])
    trainer.update_weights()
    assert {call(url, "/model_info")["weight_version"] for url in (engine, victim[0])} == {"2"}


def test_a_group_that_does_not_come_about_is_given_up_on_all_sides(
    engine: str, trainer: Any, checkpoints: dict[str, Path]
) -> None:
    """The engine that has joined must not wait for the other one until its own timeout, a minute."""
    from miles.backends.megatron_utils.engine_client import EngineClient
    from miles.backends.megatron_utils.update_group import UpdateGroup

    module = "tests.fast.backends.megatron_utils.refusing_engine_main"
    with process(module, "PORT", "unwilling") as unwilling:
        clients = [EngineClient(engine, 20.0), EngineClient(unwilling, 20.0)]
        start = time.monotonic()
        with pytest.raises(WeightUpdateError, match="will not join") as error:
            UpdateGroup.form(clients, backend="gloo", ranks_per_engine=1, timeout_secs=20.0)
        assert error.value.engine_url == unwilling
        trainer.connect_engines([engine])
        assert time.monotonic() - start < 15
    trainer.update_weights()


def test_an_engine_that_refuses_a_tensor_is_named(engine: str, trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer.connect_engines([engine])
    monkeypatch.setattr(trainer, "_gathered_weights", lambda: iter([[("model.unknown.weight", torch.zeros(2))]]))
    start = time.monotonic()
    with pytest.raises(WeightUpdateError, match=r"model\.unknown\.weight"):
        trainer.update_weights()
    assert time.monotonic() - start < 15


def test_connecting_to_an_engine_that_is_not_there_fails_at_once(trainer: Any) -> None:
    start = time.monotonic()
    with pytest.raises(WeightUpdateError, match="gave no answer to /model_info: no sign of life"):
        trainer.connect_engines([f"http://127.0.0.1:{free_port()}"])
    assert time.monotonic() - start < 10


def test_a_difference_after_the_update_is_an_error(engine: str, trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer.connect_engines([engine])
    monkeypatch.setattr(trainer, "weight_checksums", lambda: {"model.norm.weight": "0123456789abcdef"})
    with pytest.raises(ValueError, match=r"--check-weight-update-equal.*model\.norm\.weight"):
        trainer.update_weights()
