"""What the rollout notes for the run's trace: how each prompt group spends its time, and each attempt at a sample."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from miles.rollout._fully_async_ledger import Owner
from miles.rollout.generate_utils.attempts import AttemptLog
from miles.utils.trace import GroupPhase, SampleSpan

if TYPE_CHECKING:
    from collections.abc import Callable

    from miles.rollout._fully_async_ledger import GroupKey

_PHASES = {Owner.IN_FLIGHT: "in flight", Owner.QUEUED: "queued", Owner.DRAINED: "drained"}
_WAITS_FOR_ROOM = "waits for room"
_WORTH_A_PHASE_SECS = 0.001
_EVENTS_OF_A_PHASE, _EVENTS_OF_AN_ATTEMPT = 2, 2


class _Open(NamedTuple):
    key: GroupKey
    group_index: int | None
    phase: str
    since: float


class GroupPhases:
    """An observer of the ledger. `limit` phases at most, then it is blind. `epoch_of` turns loop time into seconds
    since the epoch."""

    def __init__(self, limit: int, epoch_of: Callable[[float], float]) -> None:
        self._left = limit
        self._epoch_of = epoch_of
        self._open: dict[int, _Open] = {}
        self._phases: deque[GroupPhase] = deque()

    def on_transition(
        self, key: GroupKey, group_index: int | None, old: Owner | None, new: Owner, reason: str | None, now: float
    ) -> None:
        if self._left <= 0:
            return
        before = self._open.pop(key.number, None)
        if new in _PHASES:
            self._open[key.number] = _Open(key, group_index, _PHASES[new], now)
        if before is None:
            return
        outcome = new.value if reason is None else f"{new.value}: {reason}"
        finished = key.finished_at
        if old is Owner.IN_FLIGHT and finished is not None and now - finished >= _WORTH_A_PHASE_SECS:
            self._note(before, finished, _WAITS_FOR_ROOM)
            before = before._replace(phase=_WAITS_FOR_ROOM, since=finished)
        self._note(before, now, outcome, is_last=new not in _PHASES)

    def take(self) -> list[GroupPhase]:
        """The phases that have ended since the last call; from any thread."""
        return [self._phases.popleft() for _ in range(len(self._phases))]

    def end(self, now: float) -> None:
        """The run ends: so do the phases that go on, at the loop time `now`."""
        for number in list(self._open):
            open_phase = self._open.pop(number, None)
            if open_phase is not None:
                self._note(open_phase, now, "the run ends", is_last=True)

    def _note(self, p: _Open, end: float, outcome: str, *, is_last: bool = False) -> None:
        start = self._epoch_of(p.since)
        self._phases.append(
            GroupPhase(
                p.key.number, p.group_index, p.phase, start, self._epoch_of(end), outcome, p.key.tokens, is_last=is_last
            )
        )
        self._left -= 1
        if self._left <= 0:
            self._open.clear()


class RolloutTrace:
    """The notes of one run. `groups` is None where the rollout function keeps no ledger."""

    def __init__(self, groups: GroupPhases | None, attempts: AttemptLog) -> None:
        self._groups = groups
        self._attempts = attempts

    def take(self) -> list[GroupPhase | SampleSpan]:
        """What has ended since the last call; from any thread."""
        groups = [] if self._groups is None else self._groups.take()
        return [*groups, *self._attempts.take()]

    def end(self) -> list[GroupPhase | SampleSpan]:
        """As `take`, and what goes on while the run ends."""
        if self._groups is not None:
            self._groups.end(time.monotonic())
        return self.take()


def observe_rollout(rollout_fns: tuple[Any, ...], max_events: int) -> RolloutTrace | None:
    """Note the groups of the first of these rollout functions, and the samples of all of them, as far as they are built
    on `GenerateState`; None where nothing is wanted."""
    if max_events <= 0:
        return None
    attempts = AttemptLog(max_events // _EVENTS_OF_AN_ATTEMPT)
    for fn in rollout_fns:
        if hasattr(getattr(fn, "state", None), "attempts"):
            fn.state.attempts = attempts
    groups, observers = None, getattr(rollout_fns[0], "observers", None)
    if observers is not None:
        offset = time.time() - time.monotonic()  # loop time is the monotonic clock
        groups = GroupPhases(max_events // _EVENTS_OF_A_PHASE, lambda loop_time: loop_time + offset)
        observers.append(groups)
    return RolloutTrace(groups, attempts)
