"""Fully asynchronous runs with real SGLang, sglang-router and gloo weight updates in each pause mode.

One run starts its engines itself and loses both of them on the way, another one is killed while its engine starts. The
others use the server of the contract tests as an external engine, which saves two starts of a minute each, and shows
after the run what weights it was left with.
"""

from __future__ import annotations

import json
import random
import signal
import time
import urllib.request
from collections import Counter
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch

from tests.e2e.cpu.kills import record_of
from tests.e2e.cpu.runs import FinishedRun, Launcher, RunningRun
from tests.fast.backends.embedded_engine.tiny import char_ids, full_forward_logprobs, hugging_face
from tests.sglang import faulty_scheduler
from tests.sglang.plugins import gate_path
from tests.sglang.server import ENVIRONMENT, PYTHON, SELECTED, SERVER_FLAGS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tests.sglang.server import SglangServer

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not SELECTED, reason="tests/run_sglang.sh runs it, with SGLang installed"),
]

RUN_SECS = 300
GONE_SECS = 15
GROUPS, SAMPLES = 4, 4
STEPS = 12
SMALL_BUCKET = 20_000
"""Bytes, a fraction of the model."""
OWN_ENGINES = (
    *("--sglang-" + word.removeprefix("--") if word.startswith("--") else word for word in SERVER_FLAGS),
    "--sglang-python",
    PYTHON,
)


@pytest.fixture(scope="module")
def launcher(contract_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    root = tmp_path_factory.mktemp("sglang-runs")
    numbers = random.Random(0)
    prompts = [{"input": "".join(numbers.choices("0123456789", k=6)) + ">", "label": ""} for _ in range(64)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return Launcher(root, root, timeout_secs=RUN_SECS)


@pytest.fixture(autouse=True)
def _sglang_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def start(launcher: Launcher, model: Path, *flags: str, environment: Mapping[str, str] | None = None) -> RunningRun:
    """Three rollouts of 4 groups of 4 samples, which are as long as they may be, unless flags say otherwise."""

    def all_flags(runs_dir: Path) -> list[str]:
        options: dict[str, Any] = {
            "--rollout-engine": "sglang",
            "--hf-checkpoint": model,
            "--prompt-data": launcher.data / "prompts.jsonl",
            "--actor-num-gpus-per-node": 1,
            "--num-rollout": 3,
            "--rollout-batch-size": GROUPS,
            "--n-samples-per-prompt": SAMPLES,
            "--rollout-max-response-len": 96,
            "--async-max-concurrent-samples": 16,
            "--custom-generate-function-path": "tests.e2e.cpu.plugins.generate_long",
            "--custom-rm-path": "tests.sglang.plugins.share_of_letters",
            "--lr": 1e-3,
            "--runs-dir": runs_dir,
            "--log-sample-interval": 0,
        }
        return ["--fully-async", *(str(word) for option in options.items() for word in option), *flags]

    return launcher.start_as(all_flags, environment=environment)


def end_of(running: RunningRun) -> FinishedRun:
    """What the run has left; it must end well, and no server is part of it."""
    finished = running.finish()
    assert finished.exit_code == 0, finished.output
    assert surviving_servers(running) == []
    return finished


def surviving_servers(running: RunningRun) -> list[psutil.Process]:
    """Without Ray's own agents, which may take longer to notice the end on a busy machine."""
    return [process for process in running.survivors(GONE_SECS) if _is_server(process)]


def _is_server(process: psutil.Process) -> bool:
    """A server, one of its children, or the router."""
    names = ("sglang::", "sglang.launch_server", "sglang_router", "multiprocessing")
    return any(name in command_of(process) for name in names)


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended meanwhile
        return ""


def check_steps(finished: FinishedRun) -> None:
    steps = finished.steps()
    assert [step["step"] for step in steps] == [0, 1, 2]
    for step in steps:
        assert step["rollout/num_groups"] == 4
        assert step["train/grad_norm"] > 0
    # On-policy: the trainer and SGLang agree on every token.
    assert steps[0]["train/train_rollout_logprob_abs_diff"] < 1e-4


@pytest.mark.own_servers
def test_engines_that_lose_their_schedulers_are_replaced_and_each_prompt_is_trained_exactly_once(
    launcher: Launcher, contract_model: Path, tmp_path: Path
) -> None:
    """One while it generates, the other within a bucket of a weight update, of which the first one holds a half then.

    The HTTP process is there still: SGLang notices the death a second later, and ends.
    """
    save, prompts, faults = tmp_path / "save", launcher.data / "prompts.jsonl", tmp_path / "faults"
    running = start(
        launcher,
        contract_model,
        *(*OWN_ENGINES, "--rollout-num-gpus", "2", "--pause-generation-mode", "retract"),
        *("--update-weight-buffer-size", str(SMALL_BUCKET)),
        # An engine that served before it had weights would have a version that is no number, which ends the run.
        *("--use-fault-tolerance", "--max-weight-staleness", "1000", "--strict-weight-versions", "--save", str(save)),
        *("--num-rollout", str(STEPS), "--prompt-data", f"{prompts}@[0:{STEPS * GROUPS}]"),
        *("--data-source-path", "tests.e2e.cpu.resume_plugins.OneEpoch", "--async-data-buffer-capacity-factor", "1"),
        *("--custom-generate-function-path", "tests.sglang.plugins.generate_long_behind_a_gate"),
        *("--custom-megatron-before-train-step-hook-path", "tests.e2e.cpu.resume_plugins.record_forward_passes"),
        environment=faulty_scheduler.environment(faults),
    )
    try:
        running.wait_for_steps(1)
        running.remember_processes()
        server = server_of(running, "engine-1")
        wait_until(lambda: requests_at(server) > 0)
        gate_path(save).touch()  # what begins from here on, waits until the engine is there again
        process_named("sglang::scheduler", server).kill()
        wait_until_replaced(running, "engine-1", server)
        server = server_of(running, "engine-0")
        faulty_scheduler.order(faults, server.pid, buckets=2)
        gate_path(save).unlink()
        wait_until(lambda: faulty_scheduler.has_died(faults, server.pid))
        gate_path(save).touch()
        wait_until_replaced(running, "engine-0", server)
        gate_path(save).unlink()
        finished = end_of(running)
    except BaseException:
        running.end()
        raise
    for name in ("engine-0", "engine-1"):
        assert f"{name} has the current weights and serves again" in finished.output
        log = (finished.run_dir / "logs" / f"{name}.log").read_text(errors="replace")
        assert log.split("crashed with exit code")[-1].count("POST /generate") > SAMPLES, f"{name} serves little"
    assert len(finished.steps()) == STEPS
    assert finished.sum_of("rollout/engine_restarts") == 2
    assert finished.sum_of("rollout/fully_async/aborted_groups_recycled") == 0
    assert finished.steps()[0]["train/train_rollout_logprob_abs_diff"] < 1e-4
    trained = [Counter(batch) for _, batch in sorted(record_of(save, finished.run_dir.name).items())]
    assert [sorted(batch.values()) for batch in trained] == [[SAMPLES] * GROUPS] * STEPS
    expected = [json.loads(line)["input"] for line in prompts.read_text().splitlines()[: STEPS * GROUPS]]
    assert sorted(prompt for batch in trained for prompt in batch) == sorted(expected)


@pytest.mark.own_servers
def test_no_server_outlives_a_driver_that_is_killed_while_its_engine_starts(
    launcher: Launcher, contract_model: Path
) -> None:
    """The processes that SGLang starts ask only later to die with it."""
    running = start(launcher, contract_model, *OWN_ENGINES)
    try:
        wait_until(lambda: any("multiprocessing.spawn" in command_of(p) for p in running.remember_processes()))
        running.send(signal.SIGKILL)
        running.reap()
        assert surviving_servers(running) == []
    finally:
        running.end()


@pytest.mark.parametrize("mode", ["abort", "in_place"])
def test_a_run_leaves_an_external_engine_with_the_last_weights(
    launcher: Launcher, contract_model: Path, sglang_server: SglangServer, mode: str, tmp_path: Path
) -> None:
    running = start(
        launcher,
        contract_model,
        *("--rollout-external", "--rollout-external-engine-addrs", f"127.0.0.1:{sglang_server.port}"),
        *("--pause-generation-mode", mode, "--save", str(tmp_path / "save"), "--save-hf", str(tmp_path / "hf")),
    )
    running.pids()
    running.remember_processes()
    finished = end_of(running)
    check_steps(finished)
    assert sglang_server.process.poll() is None, "the run ended an engine that is not its own"
    assert post(sglang_server, "/model_info", None)["weight_version"] == "4"
    prompt = char_ids("52914>")
    body = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": 12, "ignore_eos": True},
        "return_logprob": True,
    }
    answer = post(sglang_server, "/generate", body)
    torch.set_num_threads(1)
    expected = full_forward_logprobs(hugging_face(tmp_path / "hf"), prompt, answer["output_ids"])
    found = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    assert found == pytest.approx(expected, abs=1e-4)
    changed = full_forward_logprobs(hugging_face(contract_model), prompt, answer["output_ids"])
    assert found != pytest.approx(changed, abs=1e-4), "training moved nothing"


def test_nothing_of_a_server_outlives_it(sglang_server: SglangServer) -> None:
    """The last test: a kill that nothing can react to, as the death of the engine's actor is."""
    server = psutil.Process(sglang_server.process.pid)
    processes = server.children(recursive=True)
    assert processes, "the scheduler and the detokenizer"
    server.kill()
    sglang_server.process.wait(10)
    _, alive = psutil.wait_procs(processes, timeout=15)
    assert alive == []


def server_of(running: RunningRun, engine: str) -> psutil.Process:
    return psutil.Process(running.pids()[engine])


def process_named(name: str, server: psutil.Process) -> psutil.Process:
    (found,) = [process for process in server.children(recursive=True) if process.cmdline()[0] == name]
    return found


def wait_until_replaced(running: RunningRun, engine: str, server: psutil.Process) -> None:
    """Until another server is there in this one's place and has weights of the trainer's."""
    wait_until(lambda: running.pids()[engine] != server.pid)
    running.remember_processes()
    wait_until(lambda: str(ask(server_of(running, engine), "/model_info")["weight_version"]).isdecimal())


def requests_at(server: psutil.Process) -> int:
    """How many requests the server is generating answers to."""
    return sum(int(load["num_running_reqs"]) for load in ask(server, "/v1/loads")["loads"])


def ask(server: psutil.Process, path: str) -> Any:
    words = server.cmdline()
    with urllib.request.urlopen(f"http://127.0.0.1:{words[words.index('--port') + 1]}{path}", timeout=60) as answer:
        return json.load(answer)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + RUN_SECS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def post(server: SglangServer, path: str, body: Any) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)
