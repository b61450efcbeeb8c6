"""What a refusal is made of: a flag, or some values of a flag, with the reason and what to use instead."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class RefusedFlag:
    """One flag that is refused unless it is left at (or set to) `default`."""

    flag: str
    default: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `add_argument`: how many values of which type the flag takes."""

    @property
    def dest(self) -> str:
        return str(self.options.get("dest", self.flag[2:].replace("-", "_")))


@dataclass(frozen=True)
class Refusal:
    """Why `flags` are refused, and what to use instead."""

    reason: str
    instead: str
    flags: tuple[RefusedFlag, ...]


@dataclass(frozen=True)
class RefusedValue:
    """A flag whose values are refused where `allows` says no."""

    flag: str
    allows: Callable[[Any], bool]
    reason: str
    instead: str

    @property
    def dest(self) -> str:
        return self.flag[2:].replace("-", "_")


def switch(flag: str) -> RefusedFlag:
    """A flag without a value, off by default."""
    return RefusedFlag(flag, False, {"action": "store_true"})


def switch_off(flag: str, dest: str) -> RefusedFlag:
    """A flag without a value that turns `dest` off, which is on by default."""
    return RefusedFlag(flag, True, {"action": "store_false", "dest": dest})


def either(flag: str) -> RefusedFlag:
    """A flag with a --no- form, None by default."""
    return RefusedFlag(flag, None, {"action": argparse.BooleanOptionalAction})


def value(flag: str, default: Any = None, kind: type | None = None) -> RefusedFlag:
    """A flag with one value."""
    return RefusedFlag(flag, default, {"type": kind or (type(default) if default is not None else str)})


def values(flag: str, default: Any = None, kind: type = str) -> RefusedFlag:
    """A flag with any number of values."""
    return RefusedFlag(flag, default, {"type": kind, "nargs": "*"})
