"""Flags of the embedded engine, a small inference server of miles' own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles.utils.flag_rules import flag_name, require, require_positive

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator


def add_flags(parser: ArgumentParser) -> None:
    """Declare the flags of this module on `parser`."""
    group = parser.add_argument_group("embedded engine")
    group.add_argument(
        "--embedded-max-running-requests",
        type=int,
        default=256,
        help="Most requests that one engine decodes together; further ones wait.",
    )
    group.add_argument(
        "--embedded-dtype",
        type=str,
        default="float32",
        choices=["float32", "bfloat16"],
        help="Number format of the engine's weights and arithmetic.",
    )
    group.add_argument(
        "--embedded-device",
        type=str,
        default=None,
        choices=["cpu", "cuda"],
        help="Device of the engines. None: cuda where there is one, else cpu.",
    )


def validate(args: Namespace) -> None:
    """Raise ValueError where the values break a rule."""
    require_positive(args, "embedded_max_running_requests")
    if args.rollout_engine == "embedded":
        require(
            args.rollout_num_gpus_per_engine == 1,
            f"--rollout-num-gpus-per-engine must be 1 with --rollout-engine embedded, which uses one device, got "
            f"{args.rollout_num_gpus_per_engine}",
        )


def warnings(args: Namespace, given: frozenset[str]) -> Iterator[str]:
    """Legal values that have no effect, given the other flags."""
    mine = sorted(dest for dest in given if dest.startswith("embedded_"))
    if mine and args.rollout_engine != "embedded":
        names = ", ".join(map(flag_name, mine))
        yield f"no effect without --rollout-engine embedded: {names}"
