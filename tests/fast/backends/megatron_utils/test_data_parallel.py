"""Two ranks over gloo do what one rank does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles.backends.megatron_utils.checkpoint import verify
from tests.fast.backends.megatron_utils.conftest import free_port
from tests.fast.backends.megatron_utils.data_parallel_main import FLAGS, run

ROOT = Path(__file__).parents[4]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")


def test_two_ranks_equal_one(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    ports = ",".join(str(free_port()) for _ in FLAGS)
    module = "tests.fast.backends.megatron_utils.data_parallel_main"
    checkpoint = str(checkpoints["qwen3-tied"])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), ports, checkpoint, str(tmp_path / f"{rank}.json"), str(tmp_path / "save")],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=50)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(outputs)

    expected = run(checkpoint, rank=0, world_size=1, ports=[free_port() for _ in FLAGS], save="")
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
        for name, want in expected.items():
            for a, b in zip(want["metrics"], found[name]["metrics"], strict=True):
                assert a.keys() == b.keys()
                for key in (k for k in a if not k.startswith("perf/")):
                    assert b[key] == pytest.approx(a[key], abs=1e-5), (rank, name, key)
            for key, values in want["weights"].items():
                assert found[name]["weights"][key] == pytest.approx(values, abs=1e-5), (rank, name, key)
    assert verify(tmp_path / "save" / "iter_0000001") is None
