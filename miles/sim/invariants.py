"""What must hold whenever everything waits: checked after each round of the event loop in which something happened."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles.sim.process import TrainingProcess


class Invariants:
    """The bounds and the ledger of one process."""

    def __init__(self, process: TrainingProcess) -> None:
        self.process = process
        self.fn = process.fn
        self._events_seen = 0

    def check_if_something_happened(self) -> None:
        if self.process.trace.violation is not None:
            raise self.process.trace.violation
        events = len(self.process.trace)
        if events != self._events_seen:
            self._events_seen = events
            self.check()

    def check(self) -> None:
        self._check_bounds()
        self._check_ledger()

    def _check_bounds(self) -> None:
        engines, fn = self.process.engines, self.fn
        if engines.running > fn.max_in_flight_samples:
            self.process.trace.violate(
                f"{engines.running} samples are in flight, the bound is {fn.max_in_flight_samples}"
            )
        allowed = fn.queue_capacity + self.process.schedule.rollout_batch_size
        if fn.queue_size > allowed:
            self.process.trace.violate(f"{fn.queue_size} groups wait, the bound is {allowed}")

    def _check_ledger(self) -> None:
        ledger, observer = self.fn.ledger, self.process.observer
        ledger.check()
        counts, books = observer.counts, observer.books
        seen = (ledger.recycled, ledger.trained, ledger.in_flight + ledger.queued + ledger.drained)
        expected = (counts["returned"], counts["trained"], len(books.outstanding))
        if seen != expected:
            self.process.trace.violate(f"the ledger says {ledger}, the observer {expected}")
