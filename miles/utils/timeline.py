"""Intervals of activity: what was busy when, cheaply enough to be recorded for every sample."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

Interval = tuple[float, float]


class BusyIntervals:
    """The times during which at least one holder was active.

    Used as a context manager, re-entrant and from one event loop only: `with busy: ...` around each piece of work.
    Work that overlaps merges into one interval, so the memory needed grows with the pauses, not with the pieces.
    `drain` hands over what was recorded; an interval that is still open is cut there, so each moment is reported
    once.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._active = 0
        self._since = 0.0
        self._closed: list[Interval] = []

    @property
    def active(self) -> int:
        """Holders at this moment."""
        return self._active

    def __enter__(self) -> BusyIntervals:
        if self._active == 0:
            self._since = self._clock()
        self._active += 1
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._active -= 1
        if self._active == 0:
            self._closed.append((self._since, self._clock()))

    def drain(self) -> list[Interval]:
        """The intervals since the last drain, in seconds of the clock, oldest first."""
        intervals, self._closed = self._closed, []
        if self._active:
            now = self._clock()
            intervals.append((self._since, now))
            self._since = now
        return intervals
