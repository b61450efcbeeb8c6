"""What the rollout itself tells about its groups: recorded, and believed only where it is plausible."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles.rollout._fully_async_ledger import DropReason, Owner

if TYPE_CHECKING:
    from miles.rollout._fully_async_ledger import GroupKey
    from miles.sim.observer import Observer
    from miles.sim.process import TrainingProcess
    from miles.sim.trace import Trace


class Transitions:
    """A group observer. It passes on drops that nobody outside can see: those of the handler of unused groups."""

    def __init__(self, process: TrainingProcess, observer: Observer, trace: Trace) -> None:
        self.process = process
        self.observer = observer
        self.trace = trace

    def on_transition(
        self, key: GroupKey, group_index: int | None, old: Owner | None, new: Owner, reason: str | None, now: float
    ) -> None:
        assert group_index is not None
        if new is Owner.QUEUED or new is Owner.DRAINED:
            self.trace.add(new.value, group_index)
            if new is Owner.DRAINED:
                self.process.group_came(group_index)
        elif new is Owner.RECYCLED:
            self.trace.add(f"recycle {reason}", group_index)
        elif new is Owner.DROPPED and reason != DropReason.FILTERED.value:
            self.trace.add(f"drop {reason}", group_index)
            self.observer.dropped_by_handler(group_index, str(reason))
