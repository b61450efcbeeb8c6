"""What becomes of an engine when something happens to it: decisions alone, without a clock and without IO.

starting --started--> waiting for weights --serving--> serving
   ^                          |                           |
   |                          +---------- died -----------+
   +---- pause, again -------- dead -- the run stops: faults are not tolerated, every engine is lost, or this one
                                       has died too often in a row without ever serving
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles.utils.trace import EngineEvent

PAUSES_SECS = (0.0, 5.0, 15.0)
"""Before the first, second and third start in the place of an engine that has served. When the third has died without
serving either, the run stops."""


class EngineState(enum.Enum):
    STARTING = "starting"
    WAITING = "waiting for weights"
    SERVING = "serving"
    DEAD = "dead"

    @property
    def is_up(self) -> bool:
        """Whether its server is healthy, as far as is known."""
        return self in (EngineState.WAITING, EngineState.SERVING)


@dataclass(frozen=True)
class EngineRef:
    """One life of an engine: after a restart it is another one, even where the address is the same."""

    index: int
    life: int
    url: str


@dataclass(frozen=True)
class Verdict:
    """What follows from a death: the run stops with the message `fatal`, or the engine is started in `pause_secs`."""

    fatal: str | None = None
    pause_secs: float = 0.0


@dataclass(frozen=True)
class FleetView:
    """The engines as the driver sees them. It travels between processes."""

    serving: tuple[EngineRef, ...]
    waiting: tuple[EngineRef, ...]
    restarts: int
    """Engines that were started again and became healthy, since the run began."""
    events: tuple[EngineEvent, ...] = ()
    """What has happened to engines since the last view."""
    pids: dict[str, int] = field(default_factory=dict)
    """Process ids of the engines by name; empty where they have not changed since the last view."""


@dataclass
class _Record:
    state: EngineState = EngineState.STARTING
    url: str = ""
    life: int = 0
    failures: int = 0
    """Deaths in a row before serving."""

    def ref(self, index: int) -> EngineRef:
        return EngineRef(index, self.life, self.url)


class EngineStates:
    """The states of `count` engines. `restarts_engines`: whether faults are tolerated."""

    def __init__(self, count: int, *, restarts_engines: bool) -> None:
        self._records = [_Record() for _ in range(count)]
        self._restarts_engines = restarts_engines
        self.restarts = 0

    def started(self, index: int, url: str) -> EngineRef:
        """Its server is healthy at `url`."""
        record = self._records[index]
        assert record.state is EngineState.STARTING, record
        record.state, record.url, record.life = EngineState.WAITING, url, record.life + 1
        self.restarts += record.life > 1
        return record.ref(index)

    def serving(self, ref: EngineRef) -> None:
        """It has current weights and gets requests. Nothing where that life is over."""
        if self.is_up(ref):
            self._records[ref.index].state = EngineState.SERVING

    def died(self, index: int, name: str, reason: str) -> Verdict:
        """Its server, or the start of one, has failed."""
        record = self._records[index]
        record.failures = 0 if record.state is EngineState.SERVING else record.failures + 1
        record.state = EngineState.DEAD
        if not self._restarts_engines:
            return Verdict(fatal=reason)
        if not any(r.state.is_up for r in self._records):
            others = f" of {len(self._records)}" if len(self._records) > 1 else ""
            return Verdict(fatal=f"the last engine{others} is lost: {reason}")
        if record.failures >= len(PAUSES_SECS):
            return Verdict(fatal=f"{name} has died {record.failures} times in a row before it served: {reason}")
        return Verdict(pause_secs=PAUSES_SECS[record.failures])

    def starting(self, index: int) -> None:
        """It is started again."""
        record = self._records[index]
        assert record.state is EngineState.DEAD, record
        record.state = EngineState.STARTING

    def is_up(self, ref: EngineRef) -> bool:
        """Whether that very life goes on."""
        record = self._records[ref.index]
        return record.state.is_up and record.ref(ref.index) == ref

    def in_state(self, *states: EngineState) -> tuple[EngineRef, ...]:
        return tuple(record.ref(i) for i, record in enumerate(self._records) if record.state in states)

    @property
    def up(self) -> tuple[EngineRef, ...]:
        return self.in_state(EngineState.WAITING, EngineState.SERVING)
