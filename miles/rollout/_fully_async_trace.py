"""Notes how each prompt group spends its time, for the run's trace: an observer of the ledger."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from miles.rollout._fully_async_ledger import Owner
from miles.utils.trace import GroupPhase

if TYPE_CHECKING:
    from collections.abc import Callable

    from miles.rollout._fully_async_ledger import GroupKey

_PHASES = {Owner.IN_FLIGHT: "in flight", Owner.QUEUED: "queued", Owner.DRAINED: "with the trainer"}
_WAITS_FOR_ROOM = "waits for room"
_WORTH_A_PHASE_SECS = 0.001


class GroupPhases:
    """`limit` phases at most, then it is blind. `epoch_of` turns loop time into seconds since the epoch."""

    def __init__(self, limit: int, epoch_of: Callable[[float], float]) -> None:
        self._left = limit
        self._epoch_of = epoch_of
        self._since: dict[int, float] = {}
        self._phases: deque[GroupPhase] = deque()

    def on_transition(
        self, key: GroupKey, group_index: int | None, old: Owner | None, new: Owner, reason: str | None, now: float
    ) -> None:
        if self._left <= 0:
            return
        start = self._since.pop(key.number, None)
        if new in _PHASES:
            self._since[key.number] = now
        if old is None or start is None:
            return
        outcome = new.value if reason is None else f"{new.value}: {reason}"
        finished = key.finished_at
        if old is Owner.IN_FLIGHT and finished is not None and now - finished >= _WORTH_A_PHASE_SECS:
            self._note(key, group_index, _PHASES[old], start, finished, _WAITS_FOR_ROOM)
            self._note(key, group_index, _WAITS_FOR_ROOM, finished, now, outcome)
        else:
            self._note(key, group_index, _PHASES[old], start, now, outcome)

    def take(self) -> list[GroupPhase]:
        """The phases that have ended since the last call; from any thread."""
        phases = self._phases
        return [phases.popleft() for _ in range(len(phases))]

    def _note(self, key: GroupKey, group_index: int | None, phase: str, start: float, end: float, outcome: str) -> None:
        self._phases.append(
            GroupPhase(key.number, group_index, phase, self._epoch_of(start), self._epoch_of(end), outcome, key.tokens)
        )
        self._left -= 1
        if self._left <= 0:
            self._since.clear()


def observe_groups(rollout_fn: Any, max_events: int) -> GroupPhases | None:
    """Note the phases of this rollout function's groups; None where it keeps no ledger, or nothing is wanted. A phase
    makes two events."""
    observers = getattr(rollout_fn, "observers", None)
    if observers is None or max_events <= 0:
        return None
    offset = time.time() - time.monotonic()  # loop time is the monotonic clock
    phases = GroupPhases(max_events // 2, lambda loop_time: loop_time + offset)
    observers.append(phases)
    return phases
