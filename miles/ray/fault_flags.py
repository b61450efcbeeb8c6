"""Flags of faults: what happens when a process of the run dies or hangs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles.ray.faults import tolerates_engine_faults
from miles.ray.silence import DEFAULT_LIMIT_SECS
from miles.utils.flag_rules import require, require_not_negative, require_positive

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator

_HEALTH = {
    "rollout_health_check_interval": 30.0,
    "rollout_health_check_timeout": 30.0,
    "rollout_health_check_first_wait": 0.0,
}


def add_flags(parser: ArgumentParser) -> None:
    """Declare the flags of this module on `parser`."""
    group = parser.add_argument_group("fault tolerance")
    group.add_argument(
        "--use-fault-tolerance",
        action="store_true",
        default=False,
        help="Replace an engine that dies, hangs or fails, instead of ending the run: its samples go to the other "
        "engines, and it serves again once it has current weights. The loss of anything else ends the run, and so does "
        "that of the last engine.",
    )
    group.add_argument(
        "--heartbeat-timeout-secs",
        type=float,
        default=DEFAULT_LIMIT_SECS,
        help="Seconds. A process of the run (trainer rank, rollout manager, router, Ray's own) that lives and does not "
        "answer for so long is taken for lost and ends the run; of the evaluation manager, it ends that evaluation. "
        "Must be longer than any call into native code that keeps Python from running, and than a debugger's stops.",
    )
    group.add_argument(
        "--ft-components",
        nargs="+",
        default=["rollout"],
        choices=["rollout", "train"],
        help="What is replaced. rollout: engines.",
    )
    group.add_argument(
        "--rollout-health-check-interval",
        type=float,
        default=_HEALTH["rollout_health_check_interval"],
        help="Seconds between two looks at an engine, with --use-fault-tolerance.",
    )
    group.add_argument(
        "--rollout-health-check-timeout",
        type=float,
        default=_HEALTH["rollout_health_check_timeout"],
        help="An engine that has generated nothing for so long when it is asked to, seconds, counts as dead.",
    )
    group.add_argument(
        "--rollout-health-check-first-wait",
        type=float,
        default=_HEALTH["rollout_health_check_first_wait"],
        help="Seconds from an engine's start to the first look at it, in addition to the interval.",
    )


def validate(args: Namespace) -> None:
    """Raise ValueError where the values break a rule."""
    require_positive(args, "rollout_health_check_interval", "rollout_health_check_timeout", "heartbeat_timeout_secs")
    require(
        args.heartbeat_timeout_secs <= 60 * args.distributed_timeout_minutes,
        f"--heartbeat-timeout-secs {args.heartbeat_timeout_secs:g} must not be above --distributed-timeout-minutes "
        f"{args.distributed_timeout_minutes}: the other ranks would give up first, and none would be named",
    )
    require_not_negative(args, "rollout_health_check_first_wait")
    require(
        "train" not in args.ft_components,
        "--ft-components train: lost training ranks are not replaced, the run ends with a message. "
        "Instead: --save with --save-interval, and the same command with --load",
    )
    require(
        not tolerates_engine_faults(args) or args.sample_max_retries > 0,
        "--use-fault-tolerance with --sample-max-retries 0: a sample whose engine dies ends the run then. "
        "Instead: --sample-max-retries 3",
    )


def warnings(args: Namespace, given: frozenset[str]) -> Iterator[str]:
    """Legal values that have no effect, given the other flags."""
    if not args.use_fault_tolerance:
        for dest in ("ft_components", *_HEALTH):
            if dest in given:
                yield f"--{dest.replace('_', '-')} has no effect without --use-fault-tolerance"
    elif args.rollout_num_gpus == args.rollout_num_gpus_per_engine:
        yield (
            "--use-fault-tolerance has little effect with one engine: the run ends when the last engine is lost; give "
            "--rollout-num-gpus for two or more"
        )
