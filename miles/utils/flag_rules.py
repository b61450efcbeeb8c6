"""Small building blocks for the `flags.py` modules: value types, rules and the messages they raise.

Standard library only, so that a flags module stays as light as argparse itself.
"""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Mapping

EXPERIMENTAL_ROLLOUT_ENV = "MILES_EXPERIMENTAL_ROLLOUT_REFACTOR"
"""Set to 1 to choose the class-based rollout API; `--fully-async` needs it."""


def class_based_rollout_enabled(env: Mapping[str, str] | None = None) -> bool:
    """Whether `MILES_EXPERIMENTAL_ROLLOUT_REFACTOR` is switched on in `env` (default: this process's environment)."""
    value = (os.environ if env is None else env).get(EXPERIMENTAL_ROLLOUT_ENV, "")
    return value.strip().lower() not in ("", "0", "false", "no", "off")


def json_value(text: str) -> Any:
    """The argparse type of flags that take JSON, such as `{"enable_thinking": false}`."""
    return json.loads(text)


def flag_name(dest: str) -> str:
    """`rollout_batch_size` -> `--rollout-batch-size`."""
    return "--" + dest.replace("_", "-")


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def _require_each(args: Namespace, dests: tuple[str, ...], holds: Callable[[Any], bool], rule: str) -> None:
    for dest in dests:
        value = getattr(args, dest)
        if value is not None and not holds(value):
            raise ValueError(f"{flag_name(dest)} must be {rule}, got {value!r}")


def require_positive(args: Namespace, *dests: str) -> None:
    """Each of the flags is None or > 0."""
    _require_each(args, dests, lambda value: value > 0, "greater than 0")


def require_not_negative(args: Namespace, *dests: str) -> None:
    """Each of the flags is None or >= 0."""
    _require_each(args, dests, lambda value: value >= 0, "at least 0")


def require_fraction(args: Namespace, *dests: str) -> None:
    """Each of the flags is None or within [0, 1]."""
    _require_each(args, dests, lambda value: 0 <= value <= 1, "between 0 and 1")


def require_finite(args: Namespace, *dests: str) -> None:
    """Each of the flags is None, a number that is neither NaN nor infinite, or a list of such."""
    for dest in dests:
        value = getattr(args, dest)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and not math.isfinite(number):
                raise ValueError(f"{flag_name(dest)} must be a finite number, got {number!r}")


def require_file(flag: str, path: str, what: str) -> None:
    """`path` is a readable file."""
    if not os.path.exists(path):
        raise ValueError(f"{flag}: {what} {path!r} does not exist (current directory: {os.getcwd()})")
    if not os.path.isfile(path):
        raise ValueError(f"{flag}: {what} {path!r} is not a file")
