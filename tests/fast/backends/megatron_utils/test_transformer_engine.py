"""The trainer on Transformer Engine's layer spec: megatron-core's classes for it, over stand-ins for its modules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]


def test_steps_and_a_resume_are_those_of_the_local_layers(tmp_path: Path) -> None:
    """Dense with and without biases, and experts in one grouped layer; weights by name, packed rows, recomputation."""
    command = [sys.executable, "-m", "tests.fast.backends.megatron_utils.te_main", str(tmp_path)]
    ended = subprocess.run(
        [*command, "qwen3-tied", "qwen2-untied", "qwen3-moe"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
