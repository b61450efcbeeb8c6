"""Flags of evaluation while generation goes on: where it runs, and what happens when it is slower than training."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from miles.rollout.checkpoint_eval import CheckpointEvalFn
from miles.utils.flag_rules import flag_name, require, require_not_negative, require_positive
from miles.utils.misc import load_function

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator

_SNAPSHOT_FLAGS = ("eval_hf_dir", "eval_max_in_flight", "eval_overflow_policy", "eval_keep_snapshots")


class EvalWay(Enum):
    """How a run evaluates."""

    SHARED = "on the engines of training, which take no new training work meanwhile"
    DEDICATED = "on engines of its own (--eval-num-gpus), pinned to a snapshot"
    CHECKPOINT_FN = "by the user's CheckpointEvalFn (--eval-function-path), given a snapshot"

    @property
    def uses_snapshots(self) -> bool:
        return self is not EvalWay.SHARED


def eval_way(args: Namespace) -> EvalWay:
    """The way that the flags choose. The only place where this is decided."""
    if getattr(args, "eval_interval", None) is None:
        return EvalWay.SHARED
    if getattr(args, "eval_num_gpus", 0):
        return EvalWay.DEDICATED
    return EvalWay.CHECKPOINT_FN if _names_checkpoint_eval(args) else EvalWay.SHARED


def _names_checkpoint_eval(args: Namespace) -> bool:
    path = getattr(args, "eval_function_path", None)
    try:
        fn = load_function(path)
    except Exception as error:  # A user's module may raise anything while it is imported; the flag must be named.
        raise ValueError(
            f"--eval-function-path {path!r}: importing it raised {type(error).__name__}: {error}"
        ) from error
    return isinstance(fn, type) and issubclass(fn, CheckpointEvalFn)


def add_flags(parser: ArgumentParser) -> None:
    """Declare the flags of this module on `parser`."""
    group = parser.add_argument_group("evaluation while training goes on")
    group.add_argument(
        "--eval-num-gpus",
        type=int,
        default=0,
        help="GPUs (or processes where there is none) for engines that only evaluate, on snapshots of the weights, "
        "while training goes on. 0: evaluation uses the engines of training.",
    )
    group.add_argument("--eval-num-gpus-per-engine", type=int, default=1, help="GPUs of one evaluation engine.")
    group.add_argument(
        "--eval-hf-dir",
        type=str,
        default=None,
        help="Directory for the snapshots that are evaluated, one run at a time; trainers and evaluation must both see "
        "it. None: eval_snapshots in the run's directory.",
    )
    group.add_argument(
        "--eval-max-in-flight",
        type=int,
        default=2,
        help="Most evaluations of snapshots that are begun and not finished. They run one after the other.",
    )
    group.add_argument(
        "--eval-overflow-policy",
        default="backpressure",
        choices=["backpressure", "skip"],
        help="What an evaluation does that would be one too many. backpressure: training waits. skip: it is left out "
        "and counted in eval/skipped_busy; the one after the last rollout waits all the same.",
    )
    group.add_argument(
        "--eval-keep-snapshots",
        type=int,
        default=2,
        help="Snapshots that stay on disk, the newest ones. One that is being evaluated always stays.",
    )


def validate(args: Namespace) -> None:
    """Raise ValueError where the values break a rule."""
    require_not_negative(args, "eval_num_gpus", "eval_keep_snapshots")
    require_positive(args, "eval_num_gpus_per_engine", "eval_max_in_flight")
    if not args.eval_num_gpus:
        return
    require(
        args.eval_num_gpus % args.eval_num_gpus_per_engine == 0,
        f"--eval-num-gpus {args.eval_num_gpus} does not divide into engines of --eval-num-gpus-per-engine "
        f"{args.eval_num_gpus_per_engine}",
    )
    require(
        args.eval_interval is not None,
        f"--eval-num-gpus {args.eval_num_gpus} reserves engines that would never be used: set --eval-interval too",
    )
    require(
        not _names_checkpoint_eval(args),
        f"--eval-num-gpus {args.eval_num_gpus} does not go together with --eval-function-path "
        f"{args.eval_function_path}: a CheckpointEvalFn gets a directory and no engines. Instead: drop one of the two",
    )


def warnings(args: Namespace, given: frozenset[str]) -> Iterator[str]:
    """Legal values that have no effect, given the other flags."""
    if eval_way(args).uses_snapshots:
        return
    for dest in (*_SNAPSHOT_FLAGS, "eval_num_gpus_per_engine"):
        if dest in given:
            yield f"{flag_name(dest)} has no effect: no snapshots are evaluated (see --eval-num-gpus)"
