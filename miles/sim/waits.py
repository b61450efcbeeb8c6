"""How long a call of the rollout has waited for a finished group, and whether it gave up when its flag says.

The wait begins with the call, or when it took its last group. It may last for `--no-progress-timeout`, and for as long
again as an evaluation kept submission paused; the rollout looks for such a pause every 30 s.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from miles.sim.observer import Observer
    from miles.sim.trace import Trace

LOOK_SECONDS = 30.0
EXACTLY = 0.01
LISTED = 20


class Waits:
    """One call's. `paused_since(moment)`: seconds since then during which submission was paused."""

    def __init__(
        self, limit: float | None, now: float, paused_since: Callable[[float], float], observer: Observer, trace: Trace
    ) -> None:
        self._limit = limit
        self._since = now
        self._paused_since = paused_since
        self._observer = observer
        self._trace = trace

    def group_came(self, now: float) -> None:
        """The call has taken a group, or has ended."""
        paused = self._paused_since(self._since)
        if self._limit is not None and now - self._since > self._limit + self._tolerance(paused):
            self._trace.violate(f"a call has waited for {now - self._since:.2f} s, its limit is {self._limit:g} s")
        self._since = now

    def gave_up(self, message: str, now: float, stuck: list[int]) -> None:
        """The call raises NoProgress with this message, while the groups `stuck` are being generated."""
        waited, paused = now - self._since, self._paused_since(self._since)
        if self._limit is None or not -EXACTLY <= waited - self._limit <= self._tolerance(paused):
            self._trace.violate(f"no progress is reported after {waited:.2f} s, the limit is {self._limit}")
        lines = message.splitlines()
        for index in stuck if len(lines) <= LISTED else ():
            line = next((line for line in lines if f" group {index} (" in line), None)
            age = re.search(r": (\d+) s old, ", line or "")
            since = now - self._observer.began_at[index]
            if age is None or abs(int(age[1]) - since) > 1:
                self._trace.violate(f"group {index} is stuck for {since:.0f} s, and not listed so in {message!r}")
        self._trace.add("no progress", len(stuck))

    @staticmethod
    def _tolerance(paused: float) -> float:
        return EXACTLY + (paused + LOOK_SECONDS if paused else 0.0)
