"""Qwen3-30B-A3B on eight GPUs: six train (pipeline 3, context 2, experts 2), two generate as one SGLang engine.

    MILES_QWEN3_30B_A3B=/data/Qwen3-30B-A3B python -m pytest tests/e2e/megatron/test_qwen3_30B_A3B

`tests/e2e/cpu/test_moe_twin.py` runs the same configuration with a tiny model on a CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.cpu.runs import REPOSITORY, read_steps
from tests.e2e.megatron.fully_async_run import H100, check, flags, write_arithmetic

MODEL = "MILES_QWEN3_30B_A3B"
TIMEOUT_SECS = 3600

pytestmark = [pytest.mark.timeout(TIMEOUT_SECS + 60), getattr(pytest.mark, "stage-c-8-gpu-h100")]


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    """The model's directory; skips where the test cannot run, and says why."""
    import torch

    if torch.cuda.device_count() < 8:
        pytest.skip(f"needs 8 GPUs of 80 GB, and there are {torch.cuda.device_count()}")
    directory = os.environ.get(MODEL)
    if not directory:
        pytest.skip(f"needs {MODEL}, the directory of the Qwen3-30B-A3B checkpoint")
    return Path(directory)


def test_cold_start_warm_queue_and_drain_across_an_update(checkpoint: Path, tmp_path: Path) -> None:
    prompts = write_arithmetic(tmp_path / "prompts.jsonl", count=1024, as_messages=True)
    runs_dir = tmp_path / "runs"
    command = [
        sys.executable,
        "train_async.py",
        *flags(H100, checkpoint=checkpoint, prompts=prompts, runs_dir=runs_dir),
    ]
    environment = {
        **os.environ,
        "MILES_EXPERIMENTAL_ROLLOUT_REFACTOR": "1",
        "PYTHONPATH": str(REPOSITORY),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # megatron-core overlaps communication in the order that this keeps
    }
    subprocess.run(command, cwd=REPOSITORY, env=environment, stdin=subprocess.DEVNULL, timeout=TIMEOUT_SECS, check=True)
    (run_dir,) = runs_dir.iterdir()
    check(read_steps(run_dir), H100)
