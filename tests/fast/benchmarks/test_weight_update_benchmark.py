"""The benchmark of a weight update runs, at a tiny size. No time is asserted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(180)
def test_it_compares_with_bare_broadcasts_and_checks_the_weights() -> None:
    command = [sys.executable, "benchmarks/weight_update.py", "--rounds", "1", "--layers", "1", "--bucket-mib", "16"]
    ran = subprocess.run(
        [*command, "--width", "64"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert ran.returncode in (0, 1), ran.stderr
    assert "weights are equal by checksum" in ran.stdout, ran.stdout + ran.stderr
    assert "of the transfer" in ran.stdout and "buckets at most" in ran.stdout
