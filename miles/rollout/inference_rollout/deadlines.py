"""When an attempt at a sample has taken too long. Loop time only.

sample deadline   from the moment its attempt has a generation slot           --sample-timeout-secs
group deadline    from the moment the group's first attempt has one; past it  --group-timeout-secs
                  every unfinished sample is replaced, and the replacements
                  share the next deadline
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import Namespace


@dataclass(frozen=True)
class DeadlineConfig:
    """Seconds; None means no deadline. Raises ValueError naming the flag, the rule and the value."""

    sample_timeout_secs: float | None = None
    group_timeout_secs: float | None = None

    @classmethod
    def from_args(cls, args: Namespace) -> DeadlineConfig:
        return cls(getattr(args, "sample_timeout_secs", None), getattr(args, "group_timeout_secs", None))

    def __post_init__(self) -> None:
        for name in ("sample_timeout_secs", "group_timeout_secs"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"--{name.replace('_', '-')} must be greater than 0, got {value!r}")

    @property
    def any(self) -> bool:
        return self.sample_timeout_secs is not None or self.group_timeout_secs is not None


class GroupClock:
    """The deadlines of one group's attempts."""

    def __init__(self, config: DeadlineConfig) -> None:
        self._config = config
        self._group_deadline: float | None = None

    @property
    def group_deadline(self) -> float | None:
        """Loop time at which every sample of the group must have answer and reward; None where there is no limit."""
        return self._group_deadline

    def begin_attempt(self) -> float | None:
        """The deadline, in loop time, of an attempt that begins now; None where there is none."""
        if not self._config.any:
            return None
        now = asyncio.get_running_loop().time()
        deadlines = []
        if self._config.sample_timeout_secs is not None:
            deadlines.append(now + self._config.sample_timeout_secs)
        if self._config.group_timeout_secs is not None:
            if self._group_deadline is None or now >= self._group_deadline:
                self._group_deadline = now + self._config.group_timeout_secs
            deadlines.append(self._group_deadline)
        return min(deadlines)
