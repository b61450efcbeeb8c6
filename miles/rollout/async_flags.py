"""Flags of the fully asynchronous worker: its bounds, and what it does with what it cannot use."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from miles.utils.flag_rules import EXPERIMENTAL_ROLLOUT_ENV, require, require_not_negative, require_positive

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

DESTS = (
    "max_weight_staleness",
    "strict_weight_versions",
    "async_max_concurrent_samples",
    "rollout_submission_granularity",
    "async_data_buffer_capacity_factor",
    "async_data_buffer_max_bytes",
    "custom_async_data_buffer_path",
    "async_unused_samples_handler",
    "async_max_group_retries",
    "no_progress_timeout",
    "max_empty_batches",
)
"""What has an effect with --fully-async only."""


def add_flags(parser: ArgumentParser) -> None:
    """Declare the flags of this module on `parser`."""
    group = parser.add_argument_group("fully asynchronous rollout")
    group.add_argument(
        "--fully-async",
        action="store_true",
        default=False,
        help="Keep generation running all the time and let each step drain finished groups. train_async.py only; "
        f"needs {EXPERIMENTAL_ROLLOUT_ENV}=1.",
    )
    group.add_argument(
        "--max-weight-staleness",
        type=int,
        default=None,
        help="Most weight updates between the oldest token of a group and the training step that uses it; older groups "
        "are generated again, and groups that would be born too old are held back. 0: current weights only, as in "
        "synchronous training. None: no limit.",
    )
    group.add_argument(
        "--async-max-concurrent-samples",
        type=int,
        default=None,
        help="Most samples in flight; a group starts when all of its samples fit. At least --n-samples-per-prompt. "
        "None: those of --rollout-batch-size groups.",
    )
    group.add_argument(
        "--async-data-buffer-capacity-factor",
        type=float,
        default=None,
        help="Most finished groups that wait for the trainer, as a multiple of --rollout-batch-size (at least one "
        "group); generation pauses when they are full. None: 1000 groups.",
    )
    group.add_argument(
        "--async-data-buffer-max-bytes",
        type=int,
        default=None,
        help="Most bytes of finished groups that wait for the trainer, estimated from the lengths of tokens, "
        "log-probabilities and texts; generation pauses when they are full. None: no limit.",
    )
    group.add_argument(
        "--custom-async-data-buffer-path",
        type=str,
        default=None,
        help="Dotted path of a class(DataBufferConstructorInput) with async put(item), async get(**context) and "
        "get_metrics() that stores finished groups. None: first in, first out.",
    )
    group.add_argument(
        "--async-unused-samples-handler",
        type=str,
        choices=("retry", "drop"),
        default="retry",
        help="What becomes of a group that was aborted or grew too stale: retry generates it again, drop forgets it.",
    )
    group.add_argument(
        "--async-max-group-retries",
        type=int,
        default=8,
        help="Times that a group may be generated again before it is dropped.",
    )
    group.add_argument(
        "--rollout-submission-granularity",
        type=str,
        choices=("sample", "group"),
        default=None,
        help="When places in generation become free: with each finished sample, or with its whole group. "
        "None: sample with --fully-async, else group.",
    )
    group.add_argument(
        "--strict-weight-versions",
        action="store_true",
        default=False,
        help="Fail on a sample whose weight version is missing or unknown, naming it, instead of counting it.",
    )
    group.add_argument(
        "--no-progress-timeout",
        type=float,
        default=None,
        help="Seconds without a finished group after which a training step that waits for one stops the run and lists "
        "the groups in flight; the same for the samples of an evaluation on the same engines. None: wait and warn.",
    )
    group.add_argument(
        "--max-empty-batches",
        type=int,
        default=None,
        help="Stop the run, with the reasons, when this many batches' worth of finished groups in a row were filtered, "
        "aborted or too stale. None: go on for ever.",
    )


def resolve(args: Namespace) -> None:
    """Fill in the defaults that depend on other flags."""
    if args.rollout_submission_granularity is None:
        args.rollout_submission_granularity = "sample" if args.fully_async else "group"


def validate(args: Namespace) -> None:
    """Raise ValueError where the values break a rule."""
    require_positive(
        args,
        "async_max_concurrent_samples",
        "async_data_buffer_capacity_factor",
        "async_data_buffer_max_bytes",
        "no_progress_timeout",
        "max_empty_batches",
    )
    require_not_negative(args, "max_weight_staleness", "async_max_group_retries")
    require(
        args.async_max_concurrent_samples is None or args.async_max_concurrent_samples >= args.n_samples_per_prompt,
        f"--async-max-concurrent-samples ({args.async_max_concurrent_samples}) must be at least --n-samples-per-prompt "
        f"({args.n_samples_per_prompt}): one whole group must fit",
    )
    require(
        math.isfinite((args.async_data_buffer_capacity_factor or 0) * args.rollout_batch_size),
        f"--async-data-buffer-capacity-factor {args.async_data_buffer_capacity_factor} x --rollout-batch-size "
        f"{args.rollout_batch_size} is too large",
    )
    require(
        not args.strict_weight_versions or args.max_weight_staleness is not None,
        "--strict-weight-versions needs --max-weight-staleness: without a limit no version is looked at",
    )
