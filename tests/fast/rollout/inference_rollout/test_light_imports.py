"""Importing the rollout library loads none of the heavy packages, so that its tests run in milliseconds."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "transformers", "sglang", "megatron", "pyarrow")


@pytest.mark.parametrize(
    "module",
    [
        "miles.rollout.inference_rollout.inference_rollout_common",
        "miles.rollout.inference_rollout.inference_rollout_train",
        "miles.rollout.inference_rollout.inference_rollout_eval",
        "miles.rollout.sglang_rollout",
        "miles.rollout.data_source",
    ],
)
def test_import_loads_no_heavy_package(module):
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert result.stdout.strip() == "[]"
