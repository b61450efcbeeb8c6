"""Flags of what happens inside the generation of one group: replacement of samples, deadlines, the loop's watch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles.utils.flag_rules import require, require_not_negative, require_positive

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator


def add_flags(parser: ArgumentParser) -> None:
    """Declare the flags of this module on `parser`."""
    group = parser.add_argument_group("generation of a group")
    group.add_argument(
        "--sample-max-retries",
        type=int,
        default=3,
        help="How often one sample is generated again, alone, after a lost connection, a timeout, or an engine that "
        "aborted or failed it. What is left after that goes back with its whole group. 0: never; a transport failure "
        "then ends the run.",
    )
    group.add_argument(
        "--sample-timeout-secs",
        type=float,
        default=None,
        help="Longest time of one attempt at a training sample, all its turns together, from its generation slot on; "
        "past it the attempt is aborted on its engine and the sample generated again (--sample-max-retries). "
        "None: no limit.",
    )
    group.add_argument(
        "--group-timeout-secs",
        type=float,
        default=None,
        help="The same for a training group, from its first slot to its last reward: past it every sample without an "
        "answer is replaced, and they get as long again. A group without all its rewards by then goes back whole. "
        "None: no limit.",
    )
    group.add_argument(
        "--event-loop-lag-warn-secs",
        type=float,
        default=1.0,
        help="The rollout event loop is reported, with the stack of the code that blocks it, when it stands still for "
        "longer than this, seconds. 0: not watched.",
    )


def validate(args: Namespace) -> None:
    """Raise ValueError where the values break a rule."""
    require_not_negative(args, "sample_max_retries", "event_loop_lag_warn_secs")
    require_positive(args, "sample_timeout_secs", "group_timeout_secs")
    sample, group = args.sample_timeout_secs, args.group_timeout_secs
    require(
        sample is None or group is None or sample <= group,
        f"--sample-timeout-secs ({sample}) must be at most --group-timeout-secs ({group}), or it never takes effect",
    )


def warnings(args: Namespace, given: frozenset[str]) -> Iterator[str]:
    """Legal values that have no effect, given the other flags."""
    for dest in ("sample_timeout_secs", "group_timeout_secs"):
        value = getattr(args, dest)
        if value is not None and value >= args.http_timeout_secs:
            yield (
                f"--{dest.replace('_', '-')} {value} has no effect on a single request: --http-timeout-secs "
                f"{args.http_timeout_secs} ends it first"
            )
