"""One trainer at a time in this process: a world of one rank on gloo."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from miles.backends.megatron_utils.cpu_shim import install_cpu_shim
from miles.utils.network import find_available_port
from tests.fast.backends.megatron_utils.tiny_models import CONFIGS, write_checkpoint

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from miles.backends.megatron_utils.trainer import MegatronTrainer

if not torch.cuda.is_available():
    install_cpu_shim()  # before test modules import what needs megatron-core


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Configuration name -> a Hugging Face checkpoint with random weights."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: write_checkpoint(root / name, name) for name in CONFIGS}


def free_port() -> int:
    return find_available_port()


@contextmanager
def open_trainer(args: Namespace) -> Iterator[MegatronTrainer]:
    from miles.backends.megatron_utils.trainer import MegatronTrainer

    trainer = MegatronTrainer(args, rank=0, world_size=1, master_addr="127.0.0.1", master_port=free_port())
    try:
        yield trainer
    finally:
        trainer.close()


@pytest.fixture
def trainer_of() -> Iterator[Callable[[Namespace], Any]]:
    """`trainer_of(args)` builds a trainer, and closes the one before it: there is one default group per process."""
    current = ExitStack()

    def build(args: Namespace) -> MegatronTrainer:
        current.close()
        return current.enter_context(open_trainer(args))

    yield build
    current.close()
