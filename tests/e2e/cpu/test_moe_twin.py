"""The configuration of `tests/e2e/megatron/test_qwen3_30B_A3B`, all its parallelisms, with a tiny model on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.megatron.fully_async_run import H100, Gates, Scale, check, flags
from tests.e2e.megatron.tiny_models import make_tiny_qwen3

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.cpu.runs import Launcher

pytestmark = [pytest.mark.timeout(480), getattr(pytest.mark, "stage-a-cpu")]

MIXTURE_OF_EXPERTS = True

TWIN = Scale(
    trainers=H100.trainers,
    parallelism=H100.parallelism,  # pipeline 3, context 2, experts 2
    rollout_gpus=1,
    gpus_per_engine=1,
    rollout_batch_size=4,
    samples_per_prompt=4,
    max_response_len=16,
    max_tokens_per_gpu=8192,
    learning_rate=1e-4,
    gates=Gates(grad_norm=100.0, ppo_kl=0.02, log_prob_diff=1e-4, log_prob_diff_moved_on=0.1, reward=(0.3, 0.7)),
    reward=("--custom-rm-path", "benchmarks.gpu_smoke_task.even_tokens", "--rollout-skip-special-tokens"),
    engine=("--rollout-engine", "embedded"),
    trainer=("--use-distributed-optimizer",),  # comes with --optimizer-cpu-offload, which needs a GPU
)


def test_cold_start_warm_queue_and_drain_across_an_update(launcher: Launcher, tmp_path: Path) -> None:
    checkpoint = make_tiny_qwen3(tmp_path / "model", mixture_of_experts=MIXTURE_OF_EXPERTS)
    prompts = launcher.data / "train.jsonl"
    run = launcher.start_as(
        lambda runs_dir: [
            *flags(TWIN, checkpoint=checkpoint, prompts=prompts, runs_dir=runs_dir),
            "--check-weight-update-equal",
        ]
    )
    finished = run.finish(timeout_secs=400)  # eight processes import torch on what may be two cores
    assert finished.exit_code == 0, finished.output
    check(finished.steps(), TWIN)
