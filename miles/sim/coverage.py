"""What a number of simulated runs has met, as a table."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import TYPE_CHECKING

from miles.sim.schedule import FaultKind

if TYPE_CHECKING:
    from miles.sim.simulation import Report

# Events that are no faults of a schedule and still ought to be met: what the rollout itself had to do.
CONSEQUENCES = (
    "recycle aborted",
    "recycle stale",
    "drop max_retries",
    "store refuses",
    "store drops",
    "queue full",
    "no progress",
    "nothing gets through",
    "end of data",
    "eval failed",
    "eval cancelled",
    "process crashed",
    "save",
)


class Coverage:
    """Counts, for each kind of fault, in how many runs it really happened."""

    def __init__(self) -> None:
        self.runs = 0
        self.events: list[int] = []
        self.seconds = 0.0
        self.faults: Counter[FaultKind] = Counter()
        self.consequences: Counter[str] = Counter()

    def add(self, report: Report) -> None:
        self.runs += 1
        self.events.append(len(report.trace))
        self.seconds += report.seconds
        self.faults.update(report.fired.keys())
        self.consequences.update(name for name in CONSEQUENCES if report.trace.met(name))

    @property
    def median_events(self) -> float:
        return statistics.median(self.events) if self.events else 0.0

    def share(self, kind: FaultKind) -> float:
        """The share of runs in which this fault happened."""
        return self.faults[kind] / self.runs if self.runs else 0.0

    def rare(self, least: float) -> list[FaultKind]:
        """The kinds that happened in less than this share of the runs."""
        return [kind for kind in FaultKind if self.share(kind) < least]

    def table(self) -> str:
        lines = [
            f"{self.runs} runs, {sum(self.events)} events, median {self.median_events:g} a run, "
            f"{self.seconds / 3600:.1f} h of virtual time",
            *(f"  {kind.value:<28} {self.share(kind):6.1%}" for kind in FaultKind),
            *(f"  ({name + ')':<27} {self.consequences[name] / max(1, self.runs):6.1%}" for name in CONSEQUENCES),
        ]
        return "\n".join(lines)
