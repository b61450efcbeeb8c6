"""Flags of the memory estimate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles.utils.flag_rules import require_positive

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def add_flags(parser: ArgumentParser) -> None:
    """Declare the flags of this module on `parser`."""
    group = parser.add_argument_group("memory estimate")
    group.add_argument(
        "--gpu-memory-gib",
        type=float,
        default=None,
        help="GiB of one GPU, for the estimate at start and `python -m miles.tools.memory`. None: what this machine's "
        "first GPU has; without a GPU a run is not checked, and the tool assumes 80.",
    )
    group.add_argument(
        "--no-memory-check",
        action="store_true",
        default=False,
        help="Start also where weights, gradients and optimizer states alone are more than a GPU has.",
    )


def validate(args: Namespace) -> None:
    """Raise ValueError where the values break a rule."""
    require_positive(args, "gpu_memory_gib")
