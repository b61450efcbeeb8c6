"""The smoke test for one GPU, without its run: sizes, flags, the report, and what it says where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.gpu_smoke import FULL, NO_DEVICE, TINY, Size, flags, report
from benchmarks.gpu_smoke_task import even_tokens
from miles.utils.types import Sample

ROOT = Path(__file__).resolve().parents[3]


def parameters(size: Size) -> int:
    attention = size.hidden * size.head_dim * (2 * size.heads + 2 * size.kv_heads) + 2 * size.head_dim
    layer = attention + 3 * size.hidden * size.intermediate + 2 * size.hidden
    return size.vocab * size.hidden + size.layers * layer + size.hidden


def test_the_model_has_the_size_that_is_claimed() -> None:
    assert parameters(FULL) == 596_049_920


@pytest.mark.parametrize("size", [FULL, TINY])
def test_prompt_and_answer_fit_one_length_class_of_the_engine(size: Size) -> None:
    longest_prompt = len("123456>")
    assert longest_prompt + size.response_len <= 256


def test_it_says_that_there_is_no_device() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    script = str(ROOT / "benchmarks" / "gpu_smoke.sh")
    ended = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == NO_DEVICE
    assert "there is no CUDA device here" in ended.stderr and "--device cpu --tiny" in ended.stderr


def test_its_flags_are_accepted_on_a_machine_with_one_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.contracts.gpu_scripts import PROBLEM, Command, check, make_checkpoint

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(f'{{"input": "52914>", "label": "{PROBLEM["label"]}"}}\n')
    words = flags(
        FULL,
        checkpoint=make_checkpoint(tmp_path / "model", "Qwen3-4B"),
        prompts=prompts,
        runs_dir=tmp_path / "runs",
        device="cuda",
        steps=10,
    )
    environment = {"MILES_EXPERIMENTAL_ROLLOUT_REFACTOR": "1"}
    verdict = check(Command(["train_async.py", *words], environment, str(ROOT)), monkeypatch, caplog)
    assert (verdict.mistakes, verdict.not_yet, verdict.warnings) == ([], [], [])
    assert verdict.args is not None and verdict.args.distributed_backend == "nccl"


async def test_the_reward_is_the_share_of_even_tokens() -> None:
    sample = Sample(tokens=[1, 1, 2, 4, 5], response_length=3)
    assert await even_tokens(Namespace(), sample) == pytest.approx(2 / 3)
    assert await even_tokens(Namespace(), Sample(tokens=[1], response_length=0)) == 0


def test_the_report_leaves_the_first_steps_out_of_the_times() -> None:
    step = {
        "perf/step_time": 2.0,
        "rollout/fully_async/tokens_generated": 200,
        "rollout/fully_async/tokens_trained": 100,
        "perf/actor_train_tok_per_s": 80.0,
        "train/train_rollout_logprob_abs_diff": 0.01,
        "perf/weight_update_pause_seconds": 0.1,
        "perf/update_weights_bytes": 1.2e9,
        "rollout/fully_async/trained_avg_staleness": 1.0,
        "rollout/raw_reward": 0.5,
    }
    first = {**step, "perf/step_time": 100.0, "train/train_rollout_logprob_abs_diff": 0.02}
    numbers = report([first, first, step, step])
    assert numbers["step time, median, s"] == 2.0
    assert numbers["generated tokens / s"] == 100.0
    assert numbers["log-prob difference, largest"] == 0.02
    assert numbers["weights sent per update, GB"] == 1.2
