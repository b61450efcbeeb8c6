"""What must hold whenever everything waits: checked after each round of the event loop in which something happened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles.sim.store import SimulatedStore

if TYPE_CHECKING:
    from miles.sim.process import TrainingProcess


class Invariants:
    """The bounds and the ledger of one process."""

    def __init__(self, process: TrainingProcess) -> None:
        self.process = process
        self.fn = process.fn
        self._events_seen = 0
        self._was_full = False
        ledger = process.fn.ledger  # its counts go on over restarts, the observer's begin anew
        self._recycled_before, self._dropped_before = ledger.recycled, ledger.dropped
        self._trained_before = ledger.trained

    def check_if_something_happened(self) -> None:
        if self.process.trace.violation is not None:
            raise self.process.trace.violation
        events = len(self.process.trace)
        if events != self._events_seen:
            self._events_seen = events
            self.check()

    def check_where_all_waits(self) -> None:
        """Nothing happens until the next timer: so the worker must have nothing to do."""
        worker = self.fn._worker
        idle = worker is not None and not worker.done() and self.fn._group_tasks.failure is None
        if idle and not self.fn._closed and self.fn._room_to_submit() > 0:
            self.process.trace.violate("the worker sleeps, though one more group may be submitted")

    def check(self) -> None:
        self._check_bounds()
        self._check_ledger()

    def _check_bounds(self) -> None:
        engines, fn = self.process.engines, self.fn
        if engines.running > fn.max_in_flight_samples:
            self.process.trace.violate(
                f"{engines.running} samples are in flight, the bound is {fn.max_in_flight_samples}"
            )
        if (full := fn.queue_size >= fn.queue_capacity) and not self._was_full:
            self.process.trace.add("queue full", fn.queue_size)
        self._was_full = full
        store = fn._finished.store
        if isinstance(store, SimulatedStore):  # its bound is its own; what was given back or restored waits before it
            if len(store.items) > store.capacity:
                self.process.trace.violate(f"{len(store.items)} groups are in the store, its bound is {store.capacity}")
            return
        most, queue = self.process.schedule.max_bytes, fn._output
        if most is not None and queue is not None and queue.qsize() > 1:  # one group alone may exceed it
            finished = fn._finished
            stored = finished.size_bytes - sum(key.size_bytes for key in finished.returned)
            if stored > most:
                self.process.trace.violate(f"{stored} bytes wait, the bound is {most}")
        allowed = fn.queue_capacity + self.process.schedule.rollout_batch_size
        if fn.queue_size > allowed:
            self.process.trace.violate(f"{fn.queue_size} groups wait, the bound is {allowed}")

    def _check_ledger(self) -> None:
        ledger, observer = self.fn.ledger, self.process.observer
        ledger.check()
        counts = observer.counts
        seen = [ledger.recycled - self._recycled_before, ledger.dropped - self._dropped_before]
        expected = [counts["returned"], counts["dropped"]]
        if self.process.schedule.acknowledges:
            held = ledger.in_flight + ledger.queued + ledger.drained + len(self.fn._prompts.waiting)
            seen += [ledger.trained - self._trained_before, held]
            expected += [counts["trained"], len(observer.books.outstanding)]
        if seen != expected:
            self.process.trace.violate(
                f"recycled, dropped, trained and held are {seen} in the ledger ({ledger}), {expected} for the observer"
            )
