"""Evaluation while training goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles.rollout.eval_flags import eval_way

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Awaitable, Callable

    from miles.ray.eval.dispatcher import EvalDispatcher
    from miles.ray.eval.types import EvalPoint
    from miles.ray.placement_group import Bundles


def make_eval_dispatcher(
    args: Namespace,
    bundles: Bundles,
    export: Callable[[str], Awaitable[None]],
    publish: Callable[[EvalPoint], None],
) -> EvalDispatcher | None:
    """What evaluates snapshots beside training; None where evaluation uses the engines of training."""
    if not eval_way(args).uses_snapshots:
        return None
    from miles.ray.eval.client import EvalClient
    from miles.ray.eval.dispatcher import EvalDispatcher
    from miles.ray.eval.snapshots import SnapshotStore

    return EvalDispatcher(
        EvalClient(args, bundles),
        export=export,
        publish=publish,
        snapshots=SnapshotStore.from_args(args),
        max_in_flight=args.eval_max_in_flight,
        skip_when_busy=args.eval_overflow_policy == "skip",
    )
