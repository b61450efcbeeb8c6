"""Real runs on the CPU: Ray, sglang-router, the embedded engine, megatron-core and gloo weight updates."""

from __future__ import annotations

import pytest

from examples.quickstart.prepare import prepare
from tests.e2e.cpu.runs import Launcher


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    """Starts runs on the quickstart's base model, made with fewer steps than the quickstart makes it with."""
    root = tmp_path_factory.mktemp("e2e")
    return Launcher(root, prepare(root / "data", steps=300))
