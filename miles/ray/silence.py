"""Who has been silent for too long. Decisions only: `heartbeats` does the listening.

A process is lost when it was heard at least once and then not for `limit_secs`. Time counts only as far as somebody
was listening: where the listener itself stood still (it was stopped, or its loop was blocked) nobody else was silent.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_LIMIT_SECS = 60.0
LONGEST_LOOK_SECS = 5.0
_LOOKS_WITHIN_LIMIT = 6


@dataclass
class _Record:
    looked_at: float
    was_heard: bool = False
    silent_secs: float = 0.0


class Silence:
    """How long each process has been silent. Times are seconds of one clock that never goes back."""

    def __init__(self, limit_secs: float) -> None:
        self.limit_secs = limit_secs
        self._records: dict[str, _Record] = {}

    @property
    def look_secs(self) -> float:
        """How often to look, and how long a look may take: several fit into the limit."""
        return min(LONGEST_LOOK_SECS, self.limit_secs / _LOOKS_WITHIN_LIMIT)

    def begin(self, name: str, now: float, *, was_heard: bool = False) -> None:
        """From now on somebody looks at this process every `look_secs`; `was_heard`: it has answered before."""
        self._records[name] = _Record(looked_at=now, was_heard=was_heard)

    def learn(self, name: str, *, heard: bool, now: float) -> None:
        """What a look has found."""
        record = self._records[name]
        listened_secs = min(now - record.looked_at, 2 * self.look_secs)
        record.looked_at = now
        record.was_heard |= heard
        record.silent_secs = 0.0 if heard else record.silent_secs + listened_secs

    def forget(self, name: str) -> None:
        """It is gone, which others tell better."""
        del self._records[name]

    def suspects(self) -> list[str]:
        """Those that did not answer the last look, the most silent first."""
        return self._silent_for_more_than(0.0)

    def lost(self) -> list[str]:
        """Those among the suspects for which the limit is over."""
        return self._silent_for_more_than(self.limit_secs)

    def never_heard(self, name: str) -> bool:
        """Whether the limit has passed without a first answer: it is out of reach, and nothing is known of it."""
        record = self._records[name]
        return not record.was_heard and record.silent_secs >= self.limit_secs

    def _silent_for_more_than(self, secs: float) -> list[str]:
        silent = {name: r.silent_secs for name, r in self._records.items() if r.was_heard and r.silent_secs > 0.0}
        return sorted((name for name in silent if silent[name] >= secs), key=lambda name: -silent[name])
