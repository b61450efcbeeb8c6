"""The HTTP contract that every rollout engine keeps, checked over a real server process.

Parametrised over engines: the embedded one, and real SGLang where MILES_CONTRACT_ENGINES names it, a list with commas
(tests/run_sglang.sh does). What only the embedded engine promises takes the fixture `embedded`; each such test says
what SGLang does instead. This process plays the trainer: it is rank 0 of the weight group.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from miles.ray.rollout.router import HEALTH_CHECK_ENDPOINT, RouterClient, router_command
from miles.utils.checksum import tensor_checksum
from miles.utils.process_group import destroy_process_group, init_process_group
from tests.fast.backends.embedded_engine.tiny import (
    char_ids,
    full_forward_logprobs,
    hugging_face,
    random_weights,
    write_model,
)
from tests.sglang.server import SELECTED as SGLANG_SELECTED

if TYPE_CHECKING:
    from collections.abc import Iterator

# The first test with SGLang waits for its start.
pytestmark = pytest.mark.timeout(400 if SGLANG_SELECTED else 120)

ROOT = Path(__file__).resolve().parents[2]
PROMPT = char_ids("52914>")
START_SECS = 90


def embedded_command(model: Path, port: int) -> list[str]:
    return [
        *(sys.executable, "-m", "miles.backends.embedded_engine", "--model-path", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--weight-update-timeout", "3"),
    ]


SELECTED = os.environ.get("MILES_CONTRACT_ENGINES", "embedded").split(",")


@dataclass
class Engine:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]
    model: Path
    kind: str = "embedded"
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(16))

    def call(self, path: str, body: Any = None, *, method: str | None = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, method=method)
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, _content(response.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _content(error.read())

    def ok(self, path: str, body: Any) -> Any:
        status, content = self.call(path, body)
        assert status == 200, content
        return content

    def generate(self, max_new_tokens: int, **body: Any) -> Any:
        params = {"max_new_tokens": max_new_tokens, "ignore_eos": True} | body.pop("params", {})
        return self.ok("/generate", {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True, **body})

    def version(self) -> str:
        return str(self.call("/model_info")[1]["weight_version"])

    def checksums(self) -> dict[str, str]:
        return dict(self.ok("/weights_checker", {"action": "checksum"})["ranks"][0]["checksums"])


def _content(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode()


def logprobs(answer: Any) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def running(command: list[str], model: Path, log: Path) -> Iterator[Engine]:
    port = int(command[command.index("--port") + 1])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
    engine = Engine(f"http://127.0.0.1:{port}", process, model)
    try:
        deadline = time.monotonic() + START_SECS
        while not _is_healthy(engine):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield engine
    finally:
        process.kill()
        process.wait()
        engine.pool.shutdown(wait=False, cancel_futures=True)


def _is_healthy(engine: Engine) -> bool:
    try:
        return engine.call("/health")[0] == 200
    except OSError:
        return False


def _answers(engine: Engine) -> bool:
    try:
        return engine.call("/health")[0] in (200, 503)
    except OSError:
        return False


@pytest.fixture(scope="session")
def model(contract_model: Path) -> Path:
    return contract_model


@pytest.fixture(scope="session", params=SELECTED)
def shared_engine(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if request.param == "sglang":
        server = request.getfixturevalue("sglang_server")
        yield Engine(server.url, server.process, model, "sglang")
        return
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    with running(embedded_command(model, free_port()), model, log) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """The shared server, not paused and idle before and after."""
    yield shared_engine
    shared_engine.ok("/abort_request", {"abort_all": True})
    shared_engine.ok("/continue_generation", {})


@pytest.fixture
def embedded(engine: Engine) -> Engine:
    """The engine, where it is the embedded one: for what SGLang does otherwise."""
    if engine.kind != "embedded":
        pytest.skip("only the embedded engine promises this")
    return engine


@pytest.fixture(scope="session")
def module(model: Path) -> Any:
    return hugging_face(model)


def test_generate_has_the_documented_shape(engine: Engine) -> None:
    answer = engine.generate(4, rid="my-rid-1")
    meta = answer["meta_info"]
    assert answer.keys() >= {"text", "output_ids", "meta_info"}
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("my-rid-1", 6, 4)
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert meta["output_token_logprobs_length"] == 4
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(entry[2] is None for entry in meta["output_token_logprobs"])
    assert meta["weight_versions"] == [{"version": meta["weight_version"], "start": 0, "end": 4}]
    assert isinstance(engine.generate(2, params={"n": 2}), list)


def test_logprobs_equal_a_full_forward_side_by_side(engine: Engine, model: Path) -> None:
    engine.ok("/update_weights_from_disk", {"model_path": str(model)})
    prompts = [char_ids(text) for text in ("1", "52914>", "a longer prompt than the others", "52914>")]
    temperatures = [1.0, 0.5, 1.5, 1.0]
    answers = list(
        engine.pool.map(
            lambda pair: engine.generate(20, input_ids=pair[0], params={"temperature": pair[1]}),
            zip(prompts, temperatures, strict=True),
        )
    )
    reference = hugging_face(model)
    for prompt, temperature, answer in zip(prompts, temperatures, answers, strict=True):
        expected = full_forward_logprobs(reference, prompt, answer["output_ids"], temperature)
        assert logprobs(answer) == pytest.approx(expected, abs=1e-5)


def test_a_stream_ends_with_done(engine: Engine) -> None:
    body = {"input_ids": PROMPT, "stream": True, "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
    _, text = engine.call("/generate", body)
    events = [line.removeprefix("data: ") for line in text.strip().split("\n\n")]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["meta_info"]["finish_reason"] == {"type": "length", "length": 3}


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": [2] * 3000},
        {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 100000}},
        {"input_ids": PROMPT, "sampling_params": {"bar": 1}},
        {"input_ids": PROMPT, "sampling_params": {"temperature": -1}},
        {"input_ids": "nonsense"},
        {},
    ],
)
def test_what_cannot_be_served_is_400_and_the_server_lives_on(engine: Engine, body: dict[str, Any]) -> None:
    status, _ = engine.call("/generate", body)
    assert status == 400
    assert len(engine.generate(1)["output_ids"]) == 1


def test_a_token_id_outside_the_vocabulary_is_400(embedded: Engine) -> None:
    """It ends a whole SGLang server: miles checks ids before it sends them."""
    assert embedded.call("/generate", {"input_ids": [100000]})[0] == 400
    assert embedded.call("/health")[0] == 200


def long_request(engine: Engine, rid: str) -> Any:
    """A request that runs for long, once it has some tokens."""
    started = threading.Event()

    def run() -> Any:
        started.set()
        return engine.generate(500, rid=rid, params={"sampling_seed": 1})

    future = engine.pool.submit(run)
    started.wait()
    while num_running(engine) == 0:
        time.sleep(0.005)
    return future


def num_running(engine: Engine) -> int:
    """Requests that the engine computes, as it last said."""
    return sum(load["num_running_reqs"] for load in engine.call("/v1/loads")[1]["loads"])


def test_abort_answers_200_with_partial_tokens(engine: Engine) -> None:
    future = long_request(engine, "to-abort")
    assert engine.call("/abort_request", {"rid": "to-abort"}) == (200, "")
    answer = future.result()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(answer["output_ids"]) < 500


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_pause_and_continue(engine: Engine, mode: str) -> None:
    future = long_request(engine, f"paused-{mode}")
    content = engine.ok("/pause_generation", {"mode": mode})
    assert content == {"message": "Generation paused successfully.", "status": "ok"}
    assert engine.call("/ready")[0] == 503
    assert engine.call("/flush_cache", {})[0] == (400 if mode == "in_place" else 200)
    blocked = engine.pool.submit(engine.generate, 1)
    assert not blocked.done()
    engine.ok("/continue_generation", {})
    assert len(blocked.result()["output_ids"]) == 1
    answer = future.result()
    assert answer["meta_info"]["finish_reason"]["type"] == ("abort" if mode == "abort" else "length")
    assert answer["meta_info"]["num_retractions"] == (1 if mode == "retract" else 0)


def test_health_answers_while_paused(embedded: Engine) -> None:
    """SGLang says 503 after 20 s."""
    embedded.ok("/pause_generation", {})
    assert embedded.call("/health")[0] == 200


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_what_the_router_asks_is_answered_at_once_while_paused(engine: Engine, mode: str) -> None:
    engine.ok("/pause_generation", {"mode": mode})
    assert engine.call(HEALTH_CHECK_ENDPOINT)[0] == 200


def join_weight_group(engine: Engine, name: str) -> Any:
    """The group of this process (rank 0) and the engine."""
    port = free_port()
    body = {
        "master_address": "127.0.0.1",
        "master_port": port,
        "rank_offset": 1,
        "world_size": 2,
        "group_name": name,
        "backend": "gloo",
    }
    joining = engine.pool.submit(engine.call, "/init_weights_update_group", body)
    group = init_process_group(
        backend="gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        world_size=2,
        rank=0,
        group_name=name,
        timeout_secs=30,
    )
    assert joining.result()[0] == 200
    return group


@contextmanager
def weight_group(engine: Engine, name: str) -> Iterator[Any]:
    """`join_weight_group`, and leaving it on both sides."""
    group = join_weight_group(engine, name)
    try:
        yield group
    finally:
        destroying = engine.pool.submit(engine.call, "/destroy_weights_update_group", {"group_name": name})
        destroy_process_group(group)
        destroying.result()


def send_bucket(
    engine: Engine, group: Any, name: str, bucket: dict[str, torch.Tensor], version: str, load_format: str | None
) -> tuple[int, Any]:
    body = {
        "names": list(bucket),
        "dtypes": [str(t.dtype).removeprefix("torch.") for t in bucket.values()],
        "shapes": [list(t.shape) for t in bucket.values()],
        "group_name": name,
        "weight_version": version,
        "load_format": load_format,
    }
    answer = engine.pool.submit(engine.call, "/update_weights_from_distributed", body)
    if load_format is None:
        for tensor in bucket.values():
            dist.broadcast(tensor.contiguous(), group_src=0, group=group)
    else:
        flat = torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in bucket.values()])
        dist.broadcast(flat, group_src=0, group=group)
    return answer.result()


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_weights_from_distributed(engine: Engine, model: Path, module: Any, load_format: str | None) -> None:
    """The embedded engine stages the buckets, so that weights and version change with the last one; SGLang loads each
    bucket when it comes, which nobody sees where generation is paused."""
    name = f"wg-{load_format}"
    weights = random_weights(module, seed=11 if load_format is None else 14)
    names = list(weights)
    before_version, before = engine.version(), engine.checksums()
    with weight_group(engine, name) as group:
        future = long_request(engine, name)
        engine.ok("/begin_weight_update", {})
        for half in (names[: len(names) // 2], names[len(names) // 2 :]):
            if engine.kind == "embedded":
                assert (engine.version(), engine.checksums()) == (before_version, before)
            status, content = send_bucket(
                engine, group, name, {n: weights[n] for n in half}, f"dist-{load_format}", load_format
            )
            assert (status, content["success"]) == (200, True), content
        engine.ok("/end_weight_update", {})
    assert engine.version() == f"dist-{load_format}"
    assert engine.checksums() != before
    if engine.kind == "embedded":
        assert engine.checksums() == {n: tensor_checksum(t) for n, t in weights.items()}
    answer = engine.generate(10)
    expected = full_forward_logprobs(hugging_face(model, weights), PROMPT, answer["output_ids"])
    assert logprobs(answer) == pytest.approx(expected, abs=1e-5)
    versions = [span["version"] for span in future.result()["meta_info"]["weight_versions"]]
    assert versions in ([before_version], [before_version, f"dist-{load_format}"])


def test_a_bucket_that_breaks_off_is_400_and_the_server_lives_on(engine: Engine, module: Any) -> None:
    """The embedded engine goes on with the old weights; SGLang has what came before, and needs another update."""
    weights = random_weights(module, seed=12)
    first, second = list(weights)[:2]
    before = (engine.version(), engine.checksums())
    group = join_weight_group(engine, "breaks")
    engine.ok("/begin_weight_update", {})
    assert send_bucket(engine, group, "breaks", {first: weights[first]}, "broken", None)[0] == 200
    body = {
        "names": [second],
        "dtypes": ["float32"],
        "shapes": [list(weights[second].shape)],
        "group_name": "breaks",
        "weight_version": "broken",
    }
    answer = engine.pool.submit(engine.call, "/update_weights_from_distributed", body)
    destroy_process_group(group)
    del group  # the connections end with the object, or with the trainer's process
    gc.collect()
    status, content = answer.result()
    assert (status, content["success"]) == (400, False)
    assert engine.call("/end_weight_update", {})[0] == (400 if engine.kind == "embedded" else 200)
    assert engine.call("/destroy_weights_update_group", {"group_name": "breaks"})[0] in (200, 400)
    if engine.kind == "embedded":
        assert (engine.version(), engine.checksums()) == before
    assert len(engine.generate(3)["output_ids"]) == 3
    engine.ok("/begin_weight_update", {})
    engine.ok("/end_weight_update", {})


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
@pytest.mark.parametrize(
    ("announced", "sent"),
    [("bfloat16", torch.float32), ("float16", torch.float64), ("float32", torch.float64), ("float32", torch.bfloat16)],
)
def test_a_bucket_of_another_size_than_announced_is_400_and_the_server_lives_on(
    embedded: Engine, module: Any, load_format: str | None, announced: str, sent: torch.dtype
) -> None:
    name, weight = next(iter(random_weights(module, seed=13).items()))
    before = (embedded.version(), embedded.checksums())
    with weight_group(embedded, "sizes") as group:
        embedded.ok("/begin_weight_update", {})
        body = {
            "names": [name],
            "dtypes": [announced],
            "shapes": [list(weight.shape)],
            "group_name": "sizes",
            "load_format": load_format,
        }
        answer = embedded.pool.submit(embedded.call, "/update_weights_from_distributed", body)
        dist.broadcast(weight.to(sent).contiguous(), group_src=0, group=group)
        status, content = answer.result()
        assert status == 400
        assert "bytes were sent" in content["message"]
        assert embedded.call("/end_weight_update", {})[0] == 400
    assert (embedded.version(), embedded.checksums()) == before


def test_what_no_weight_can_be_is_refused_before_it_is_received(embedded: Engine, module: Any) -> None:
    name, weight = next(iter(random_weights(module, seed=13).items()))
    body = {"names": [name], "dtypes": ["float32"], "shapes": [list(weight.shape)], "group_name": "refused"}
    with weight_group(embedded, "refused"):
        embedded.ok("/begin_weight_update", {})
        for dtype in ("bool", "int64", "complex64", "float64"):
            status, content = embedded.call("/update_weights_from_distributed", body | {"dtypes": [dtype]})
            assert status == 400
            assert f"dtypes must be float16, bfloat16, float32, got '{dtype}'" in content["message"]
        twice = {key: body[key] * 2 for key in ("names", "dtypes", "shapes")}
        for load_format in (None, "flattened_bucket"):
            status, content = embedded.call(
                "/update_weights_from_distributed", body | twice | {"load_format": load_format}
            )
            assert status == 400
            assert f"these occur more than once: {name}" in content["message"]
        embedded.ok("/end_weight_update", {})


def test_weights_from_disk_are_refused_within_an_update(embedded: Engine, model: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", seed=4)
    before = (embedded.version(), embedded.checksums())
    embedded.ok("/begin_weight_update", {})
    status, content = embedded.call("/update_weights_from_disk", {"model_path": str(other), "weight_version": "8"})
    embedded.ok("/end_weight_update", {})
    assert (status, content["success"]) == (400, False)
    assert "must not run between begin_weight_update() and end_weight_update()" in content["message"]
    assert (embedded.version(), embedded.checksums()) == before


def test_weight_calls_out_of_order_are_400(engine: Engine) -> None:
    update = {"names": [], "dtypes": [], "shapes": [], "group_name": "wrong"}
    status, content = engine.call("/update_weights_from_distributed", update)
    assert status == 400
    assert "must run between begin_weight_update() and end_weight_update()" in content["message"]
    assert engine.call("/end_weight_update", {})[0] == 400
    engine.ok("/begin_weight_update", {})
    assert engine.call("/begin_weight_update", {})[0] == 400
    status, content = engine.call("/update_weights_from_distributed", update)
    assert status == 400
    assert "Please call `init_weights_update_group` first." in content["message"]
    engine.ok("/end_weight_update", {})
    assert engine.call("/destroy_weights_update_group", {"group_name": "wrong"}) == (
        400,
        {"success": False, "message": "The group to be destroyed does not exist."},
    )


def test_weights_from_disk(engine: Engine, model: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", seed=3)
    before = (engine.version(), engine.checksums())
    status, content = engine.call("/update_weights_from_disk", {"model_path": str(tmp_path / "nowhere")})
    assert (status, content["success"]) == (400, False)
    assert content["message"].startswith("Failed to get weights iterator")
    assert (engine.version(), engine.checksums()) == before
    content = engine.ok("/update_weights_from_disk", {"model_path": str(other), "weight_version": "7"})
    assert content["message"] == "Succeeded to update model weights. Weight version updated to 7."
    assert content["num_paused_requests"] == 0
    info = engine.call("/model_info")[1]
    assert (info["model_path"], info["served_model_name"], info["weight_version"]) == (str(other), str(other), "7")
    answer = engine.generate(8)
    expected = full_forward_logprobs(hugging_face(other), PROMPT, answer["output_ids"])
    assert logprobs(answer) == pytest.approx(expected, abs=1e-5)
    engine.ok("/update_weights_from_disk", {"model_path": str(model), "weight_version": "default"})


def test_sglang_sums_up_its_own_parameters_and_compares_them_with_earlier_ones_alone(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    """Why --check-weight-update-equal is refused with it, and what can be done by hand instead (docs: engines)."""
    if engine.kind != "sglang":
        pytest.skip("the embedded engine has the checkpoint's parameters, and the trainer's sums of them")
    before = engine.checksums()
    assert "model.layers.0.self_attn.qkv_proj.weight" in before, "q, k and v are one parameter"
    assert not set(before) & {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight"}
    assert engine.call("/weights_checker", {"action": "compare"})[0] == 400, "there is no snapshot"
    engine.ok("/weights_checker", {"action": "snapshot"})
    status, content = engine.call("/weights_checker", {"action": "compare"})
    assert (status, content["success"]) == (400, False), "equal, and yet it cannot say so without a GPU"
    other = write_model(tmp_path / "other", seed=5)
    engine.ok("/update_weights_from_disk", {"model_path": str(other), "weight_version": "9"})
    assert engine.checksums() != before
    engine.ok("/update_weights_from_disk", {"model_path": str(model), "weight_version": "default"})
    assert engine.checksums() == before


def test_generate_through_the_router(engine: Engine, tmp_path: Path) -> None:
    pytest.importorskip("sglang_router")
    port, metrics_port = free_port(), free_port()
    command = [
        *(sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-port", str(metrics_port), "--shutdown-grace-period-secs", "2"),
    ]
    params = {
        "max_new_tokens": 6,
        # SGLang heeds a seed only with --enable-deterministic-inference.
        "temperature": 0.9 if engine.kind == "embedded" else 0.0,
        "top_p": 0.95,
        "top_k": -1,
        "stop": ["never"],
        "stop_token_ids": [1],
        "skip_special_tokens": True,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        "sampling_seed": 5,
    }
    with running(command, engine.model, tmp_path / "router.log") as router:
        router.call("/workers", {"url": engine.url})
        while router.call("/get_model_info")[0] != 200:
            time.sleep(0.05)
        routed, direct = router.generate(6, params=params, rid="routed"), engine.generate(6, params=params)
        assert routed["output_ids"] == direct["output_ids"]
        assert logprobs(routed) == pytest.approx(logprobs(direct), abs=1e-5)
        assert routed["meta_info"]["id"] == "routed"
        if engine.kind == "embedded":
            assert router.call("/generate", {"input_ids": [100000]})[0] == 400
        assert router.call("/get_model_info") == engine.call("/model_info")


def test_the_router_does_not_take_out_a_paused_engine(engine: Engine, tmp_path: Path) -> None:
    """The run's own router, which looks every second here and gives up at the first failure."""
    flags = {"check_interval_secs": 1, "check_timeout_secs": 1, "failure_threshold": 1, "success_threshold": 1}
    args = Namespace(
        router_prometheus_port=None,
        sglang_router_request_timeout_secs=60,
        sglang_router_policy=None,
        **{f"router_health_{name}": value for name, value in flags.items()},
    )
    command = router_command(args, "127.0.0.1", free_port())
    with running(command, engine.model, tmp_path / "router.log") as router:
        asyncio.run(RouterClient(router.url).add_engines([engine.url]))
        engine.ok("/pause_generation", {"mode": "retract"})
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            (worker,) = router.call("/workers")[1]["workers"]
            assert worker["is_healthy"]
            time.sleep(0.2)
        waiting = engine.pool.submit(router.generate, 2)
        engine.ok("/continue_generation", {})
        assert len(waiting.result()["output_ids"]) == 2
        asyncio.run(RouterClient(router.url).remove_engines([engine.url]))
        assert router.call("/generate", {"input_ids": PROMPT})[0] == 503


def test_information(engine: Engine) -> None:
    assert engine.call("/model_info") == engine.call("/get_model_info")
    assert engine.call("/server_info")[1]["internal_states"]
    assert engine.call("/nowhere") == (404, {"detail": "Not Found"})
    assert engine.call("/pause_generation", method="POST")[0] == 400


def test_sigterm_ends_a_busy_process_that_waits_for_a_minute(model: Path, tmp_path: Path) -> None:
    with running(embedded_command(model, free_port()), model, tmp_path / "log") as engine:
        engine.pool.submit(engine.generate, 500, params={"n": 50})
        # A weight call that waits for a trainer that never comes.
        engine.pool.submit(
            engine.call,
            "/init_weights_update_group",
            {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2},
        )
        while num_running(engine) == 0:
            time.sleep(0.01)
        engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(10) == 0


def test_the_server_ends_with_its_parent(model: Path, tmp_path: Path) -> None:
    command = embedded_command(model, free_port())
    script = f"import subprocess, time; p = subprocess.Popen({command!r}); print(p.pid, flush=True); time.sleep(99)"
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    url = f"http://127.0.0.1:{command[command.index('--port') + 1]}"
    probe = Engine(url, parent, model)
    while not _answers(probe):
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while _exists(child):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _exists(pid: int) -> bool:
    """Whether the process runs (one that nobody has waited for yet does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_port_in_use_and_a_bad_model_are_one_clear_message(model: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for command, message in (
            (embedded_command(model, port), f"--port {port}"),
            (embedded_command(tmp_path, free_port()), "there is no config.json"),
        ):
            result = subprocess.run(
                command,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert result.returncode == 1
            assert message in result.stderr
            assert "Traceback" not in result.stderr
