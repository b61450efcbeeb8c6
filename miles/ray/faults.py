"""Which faults a run survives."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import Namespace


def tolerates_engine_faults(args: Namespace) -> bool:
    """Whether a lost engine is replaced; the loss of anything else always ends the run."""
    return bool(args.use_fault_tolerance) and "rollout" in args.ft_components
