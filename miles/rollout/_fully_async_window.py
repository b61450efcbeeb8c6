"""What has happened since the last batch was handed over: counts from the books, and who worked or waited how long.

    last batch handed over                                   this batch handed over
    |--------------------------- window -----------------------------|
    generation  ####-------##########################-----###########    idle: no sample is being generated
    blocked     ------------------------------------####-------------    a finished group waits for room in the store
    waiting     -----------------------------------------------######    a call waits for a finished group

Every moment and every event belongs to one window: counts are differences, and an activity that goes on is cut at the
window's end. There is one reader, the drain. Gauges are read, never changed, but for the peak, which starts again at
what is queued at that moment.
"""

from __future__ import annotations

from operator import sub
from typing import TYPE_CHECKING

from miles.rollout._fully_async_ledger import RecycleReason

if TYPE_CHECKING:
    from miles.rollout._fully_async_ledger import GroupLedger
    from miles.utils.loop_lag import LoopLag

_PREFIX = "rollout/fully_async"


class ActiveTime:
    """Seconds during which at least one holder was active. Times are given, in seconds of one clock."""

    __slots__ = ("_active", "_seconds", "_since")

    def __init__(self) -> None:
        self._active = 0
        self._since = 0.0
        self._seconds = 0.0

    def begin(self, now: float) -> None:
        if not self._active:
            self._since = now
        self._active += 1

    def end(self, now: float) -> None:
        self._active -= 1
        if not self._active:
            self._seconds += now - self._since

    def take(self, now: float) -> float:
        """The seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        if self._active:
            seconds += now - self._since
            self._since = now
        return seconds


class Activity:
    """Generation, producer and consumer of one rollout function, window by window."""

    def __init__(self) -> None:
        self.generation = ActiveTime()
        """Held by a group from its pull until none of its samples is being generated any more."""

        self.blocked = ActiveTime()
        """Held by a finished group that waits for room in the store."""

        self.waiting = ActiveTime()
        """Held by a call that waits for a finished group."""

        self._began: float | None = None

    def start(self, now: float) -> None:
        """The first window begins, unless it has."""
        if self._began is None:
            self._began = now

    def metrics(self, now: float) -> dict[str, float]:
        """Of the window that ends now."""
        window = 0.0 if self._began is None else now - self._began
        self._began = now
        idle = window - self.generation.take(now)
        return {
            f"{_PREFIX}/generation_idle_fraction": max(0.0, idle / window) if window > 0 else 0.0,
            f"{_PREFIX}/producer_blocked_seconds": self.blocked.take(now),
            f"{_PREFIX}/consumer_wait_seconds": self.waiting.take(now),
        }


class LedgerWindow:
    """What the books have counted in the window: one per rollout function, `metrics` once a step.

    `restored`: how many groups the books have just counted as recycled because they were in flight in the state that
    was restored. The first step reports them; whatever else is in the books was reported before the state was saved.
    """

    def __init__(self, ledger: GroupLedger, restored: int = 0) -> None:
        self._ledger = ledger
        self._names = [
            f"{_PREFIX}/{name}"
            for name in (
                "groups_pulled",
                "groups_trained",
                *(f"groups_recycled_{reason.value}" for reason in ledger.recycled_by),
                *(f"groups_dropped_{reason.value}" for reason in ledger.dropped_by),
                *(f"tokens_wasted_{reason}" for reason in ledger.wasted_tokens),
                "tokens_generated",
                "tokens_trained",
            )
        ]
        self._sample_retries = 0
        self._before, self._samples_before = self._read(), self._read_samples()
        self._before[self._names.index(f"{_PREFIX}/groups_recycled_{RecycleReason.RESTORED.value}")] -= restored

    def metrics(
        self,
        *,
        in_flight_samples: int,
        in_flight_bound: int,
        queue_size: int,
        queue_bytes: int,
        sample_retries: int,
        data_ended: bool,
    ) -> dict[str, float]:
        """The key set is fixed. Mean lengths are of samples; 0 where there were none.

        `sample_retries` counts since the start. What others put into the store is in `queue_size` alone until it is
        drained.
        """
        before, now = self._before, self._read()
        samples_before, samples = self._samples_before, self._read_samples()
        retries_before = self._sample_retries
        self._before, self._samples_before, self._sample_retries = now, samples, sample_retries
        since = dict(zip(self._names, map(sub, now, before), strict=True))
        generated, trained = map(sub, samples, samples_before)
        return {
            **since,
            f"{_PREFIX}/response_len_generated_mean": _ratio(since[f"{_PREFIX}/tokens_generated"], generated),
            f"{_PREFIX}/response_len_trained_mean": _ratio(since[f"{_PREFIX}/tokens_trained"], trained),
            f"{_PREFIX}/in_flight_samples": in_flight_samples,
            f"{_PREFIX}/in_flight_bound": in_flight_bound,
            f"{_PREFIX}/queue_bytes": queue_bytes,
            f"{_PREFIX}/queue_peak": max(self._ledger.take_queue_peak(), queue_size),
            f"{_PREFIX}/sample_retries": sample_retries - retries_before,
            f"{_PREFIX}/data_ended": int(data_ended),
        }

    def _read(self) -> list[int]:
        """The counts, in the order of their names."""
        ledger = self._ledger
        return [
            ledger.pulled,
            ledger.trained,
            *ledger.recycled_by.values(),
            *ledger.dropped_by.values(),
            *ledger.wasted_tokens.values(),
            ledger.generated_tokens,
            ledger.trained_tokens,
        ]

    def _read_samples(self) -> tuple[int, int]:
        return self._ledger.generated_samples, self._ledger.trained_samples


def loop_lag_metrics(lag: LoopLag) -> dict[str, float]:
    return {
        f"{_PREFIX}/event_loop_lag_p99_seconds": lag.p99,
        f"{_PREFIX}/event_loop_lag_max_seconds": lag.maximum,
    }


def _ratio(total: float, count: float) -> float:
    return total / count if count else 0.0
