"""What happened, in order: the record that a replay prints and that two runs of one seed must agree on."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from typing import NoReturn


class Violation(AssertionError):
    """The simulated run broke a promise of the rollout."""


class Trace:
    """Events with their virtual time; `counts` by kind. Texts are put together only where somebody reads them."""

    def __init__(self) -> None:
        self.events: list[tuple[float, str, tuple[object, ...]]] = []
        self.counts: Counter[str] = Counter()
        self.violation: Violation | None = None

    def __len__(self) -> int:
        return len(self.events)

    def add(self, kind: str, *details: object) -> None:
        self.events.append((asyncio.get_running_loop().time(), kind, details))
        self.counts[kind] += 1

    def met(self, name: str) -> bool:
        """Whether an event of this kind happened."""
        return name in self.counts

    def violate(self, text: str) -> NoReturn:
        """Raise Violation, and keep the first one: whoever catches it in between cannot make it unseen."""
        violation = Violation(text)
        self.violation = self.violation or violation
        self.add("VIOLATION", text)
        raise violation

    def lines(self, last: int | None = None) -> list[str]:
        """`   12.345  train start       step 3`, one an event; the last `last` of them."""
        events = self.events if last is None else self.events[-last:]
        return [f"{at:10.3f}  {kind:<20} {' '.join(str(d) for d in details)}".rstrip() for at, kind, details in events]

    def digest(self) -> str:
        """A short fingerprint of everything that happened."""
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()[:16]
