"""Fully asynchronous runs of three rollouts with real SGLang, sglang-router and gloo weight updates in each pause mode.

One run starts its engine itself. The others use the server of the contract tests as an external engine, which saves
two starts of a minute each, and shows after the run what weights it was left with.
"""

from __future__ import annotations

import json
import random
import urllib.request
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch

from tests.e2e.cpu.runs import FinishedRun, Launcher
from tests.fast.backends.embedded_engine.tiny import char_ids, full_forward_logprobs, hugging_face
from tests.sglang.server import ENVIRONMENT, PYTHON, SELECTED, SERVER_FLAGS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.sglang.server import SglangServer

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(not SELECTED, reason="tests/run_sglang.sh runs it, with SGLang installed"),
]

RUN_SECS = 300


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


def run(launcher: Launcher, model: Path, *flags: str) -> FinishedRun:
    """Three rollouts of 4 groups of 4 samples, which are as long as they may be."""

    def all_flags(runs_dir: Path) -> list[str]:
        options: dict[str, Any] = {
            "--rollout-engine": "sglang",
            "--hf-checkpoint": model,
            "--prompt-data": launcher.data / "prompts.jsonl",
            "--actor-num-gpus-per-node": 1,
            "--num-rollout": 3,
            "--rollout-batch-size": 4,
            "--n-samples-per-prompt": 4,
            "--rollout-max-response-len": 96,
            "--async-max-concurrent-samples": 16,
            "--custom-generate-function-path": "tests.e2e.cpu.plugins.generate_long",
            "--custom-rm-path": "tests.sglang.reward.share_of_letters",
            "--lr": 1e-3,
            "--runs-dir": runs_dir,
            "--log-sample-interval": 0,
        }
        return ["--fully-async", *(str(word) for option in options.items() for word in option), *flags]

    running = launcher.start_as(all_flags)
    running.pids()
    running.remember_processes()
    finished = running.finish()
    assert finished.exit_code == 0, finished.output
    # Ray's own agents may take longer to notice the end on a busy machine.
    assert [process for process in running.survivors(15) if _is_server(process)] == []
    return finished


def _is_server(process: psutil.Process) -> bool:
    """A server, one of its children, or the router."""
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:  # it has ended meanwhile
        return False
    return any(name in command for name in ("sglang::", "sglang.launch_server", "sglang_router"))


def check_steps(finished: FinishedRun) -> None:
    steps = finished.steps()
    assert [step["step"] for step in steps] == [0, 1, 2]
    for step in steps:
        assert step["rollout/num_groups"] == 4
        assert step["train/grad_norm"] > 0
    # On-policy: the trainer and SGLang agree on every token.
    assert steps[0]["train/train_rollout_logprob_abs_diff"] < 1e-4


def test_a_run_starts_its_own_engine_and_leaves_no_server(launcher: Launcher, contract_model: Path) -> None:
    flags = [f"--sglang-{word[2:]}" if word.startswith("--") else word for word in SERVER_FLAGS]
    finished = run(launcher, contract_model, *flags, "--sglang-python", PYTHON, "--pause-generation-mode", "retract")
    check_steps(finished)
    assert finished.sum_of("rollout/fully_async/aborted_groups_recycled") == 0
    log = (finished.run_dir / "logs" / "engine-0.log").read_text(errors="replace")
    assert log.count("POST /update_weights_from_distributed") >= 4


@pytest.mark.parametrize("mode", ["abort", "in_place"])
def test_a_run_leaves_an_external_engine_with_the_last_weights(
    launcher: Launcher, contract_model: Path, sglang_server: SglangServer, mode: str, tmp_path: Path
) -> None:
    finished = run(
        launcher,
        contract_model,
        *("--rollout-external", "--rollout-external-engine-addrs", f"127.0.0.1:{sglang_server.port}"),
        *("--pause-generation-mode", mode, "--save", str(tmp_path / "save"), "--save-hf", str(tmp_path / "hf")),
    )
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


def post(server: SglangServer, path: str, body: Any) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)
