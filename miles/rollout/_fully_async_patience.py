"""How long a call waits for a finished group before it warns, and before it gives up."""

from __future__ import annotations


class Patience:
    """Times are loop time in seconds; `limit` None means that it never ends."""

    def __init__(self, now: float, *, warn_every: float, limit: float | None) -> None:
        self._began = self._warned = now
        self._warn_every = warn_every
        self._limit = limit

    def next_look(self, now: float) -> float:
        """Seconds until the next warning or, where that is nearer, the end."""
        seconds = self._warned + self._warn_every - now
        if self._limit is not None:
            seconds = min(seconds, self._began + self._limit - now)
        return max(0.0, seconds)

    def waited(self, now: float) -> float:
        return now - self._began

    def is_over(self, now: float) -> bool:
        return self._limit is not None and self.waited(now) >= self._limit

    def should_warn(self, now: float) -> bool:
        """Whether a warning is due; if so, the next one is due an interval later."""
        if now - self._warned < self._warn_every:
            return False
        self._warned = now
        return True

    def renew(self, now: float) -> None:
        """Nothing could be expected until now."""
        self._began = now
