"""The faults of a schedule that have not happened yet, found by what they hit."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from miles.sim.schedule import Fault, FaultKind, Target

if TYPE_CHECKING:
    from collections.abc import Iterable

    from miles.sim.trace import Trace

Place = tuple[Target, int, int]


class SimulatedError(Exception):
    """What simulated user code raises."""


class Misbehaved(SimulatedError):
    """Stands for what user code did without raising: the rollout itself must turn it into an error."""


class FaultBook:
    """Hands out each fault as often as it says, at its place. Once `quiet`, nothing goes wrong any more.

    The book outlives kills: what has gone wrong before a kill does not go wrong again after it.
    """

    def __init__(self, faults: Iterable[Fault], trace: Trace) -> None:
        self.quiet = False
        self.fired: Counter[FaultKind] = Counter()
        self.timed = [fault for fault in faults if fault.kind.target is Target.TIME]
        self._trace = trace
        self._left: dict[Fault, int] = {}
        self._by_place: dict[Place, list[Fault]] = {}
        for fault in faults:
            if fault.kind.target is not Target.TIME:
                self._left[fault] = fault.times
                self._by_place.setdefault(self._place(fault), []).append(fault)

    def at_sample(self, group_index: int, member: int, kinds: frozenset[FaultKind]) -> Fault | None:
        return self._take((Target.SAMPLE, group_index, member), kinds)

    def at_group(self, group_index: int, kind: FaultKind) -> Fault | None:
        return self._take((Target.GROUP, group_index, 0), frozenset({kind}))

    def at_step(self, step: int, kind: FaultKind) -> Fault | None:
        return self._take((Target.STEP, step, 0), frozenset({kind}))

    def fire(self, fault: Fault) -> None:
        self.fired[fault.kind] += 1
        self._trace.add("fault", fault)

    def _take(self, place: Place, kinds: frozenset[FaultKind]) -> Fault | None:
        if self.quiet or place not in self._by_place:
            return None
        for fault in self._by_place[place]:
            if fault.kind in kinds and self._left[fault] > 0:
                self._left[fault] -= 1
                self.fire(fault)
                return fault
        return None

    @staticmethod
    def _place(fault: Fault) -> Place:
        target = fault.kind.target
        return target, int(fault.at), fault.member if target is Target.SAMPLE else 0
