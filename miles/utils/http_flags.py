"""Flags of the HTTP client that talks to engines and reward servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles.utils.flag_rules import require_not_negative, require_positive

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def add_flags(parser: ArgumentParser) -> None:
    """Declare the flags of this module on `parser`."""
    group = parser.add_argument_group("HTTP client")
    group.add_argument(
        "--http-connect-timeout-secs", type=float, default=10.0, help="Longest wait for a connection, seconds."
    )
    group.add_argument(
        "--http-timeout-secs", type=float, default=14400.0, help="Longest time of one request in all, seconds."
    )
    group.add_argument(
        "--http-max-retries",
        type=int,
        default=8,
        help="Retries of one generation request after a connection error, 429 or 5xx. 0: none. Nothing else is.",
    )


def validate(args: Namespace) -> None:
    """Raise ValueError where the values break a rule."""
    require_positive(args, "http_connect_timeout_secs", "http_timeout_secs")
    require_not_negative(args, "http_max_retries")
