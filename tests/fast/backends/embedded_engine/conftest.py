from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.fast.backends.embedded_engine.tiny import hugging_face, write_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny-qwen3"))


@pytest.fixture(scope="session")
def reference(model_dir: Path) -> Any:
    """The same model run by the library alone."""
    return hugging_face(model_dir)
