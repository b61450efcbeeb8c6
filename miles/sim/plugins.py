"""The user code of a simulated run: reward, dynamic filter; they misbehave where the schedule says so."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from miles.rollout.filter_hub.base_types import DynamicFilterOutput
from miles.sim.engines import place_of
from miles.sim.faults import FaultBook, Misbehaved, SimulatedError
from miles.sim.noise import noise
from miles.sim.observer import Observer, index_of
from miles.sim.schedule import Fault, FaultKind

if TYPE_CHECKING:
    from miles.sim.schedule import Schedule
    from miles.utils.types import Sample

_PLACES_OF_REWARD = frozenset(
    {
        FaultKind.REWARD_RAISES,
        FaultKind.REWARD_LEAKS_CANCELLATION,
        FaultKind.REWARD_NAN,
        FaultKind.REWARD_NONE,
    }
)


IN_EVALUATION = "simulated_evaluation"
"""Marks, in their metadata, the samples of an evaluation."""


class Plugins:
    """`reward` and `filter` of one simulated run."""

    def __init__(self, schedule: Schedule, faults: FaultBook, observer: Observer) -> None:
        self.schedule = schedule
        self.faults = faults
        self.observer = observer
        self._drops = 0  # so many groups are dropped, whichever they are

    async def reward(self, args: Any, samples: Any, **keywords: Any) -> Any:
        """The reward of one sample, or of each in a list; takes a moment for most of them."""
        first = samples[0] if isinstance(samples, list) else samples
        if IN_EVALUATION in first.metadata:
            return 1.0
        wait = noise(self.schedule.seed, first.index, 3)
        if wait > 0.3:
            await asyncio.sleep(wait / 4)
        return self.reward_now(args, samples)

    def reward_now(self, args: Any, samples: Any, **keywords: Any) -> Any:
        """The same as an ordinary function."""
        if not isinstance(samples, list):
            return 1.0 if IN_EVALUATION in samples.metadata else self._value(samples)
        return [self._value(s) for s in samples]

    def _value(self, sample: Sample) -> float | None:
        group_index, member = place_of(sample, self.schedule)
        fault = self.faults.at_sample(group_index, member, _PLACES_OF_REWARD)
        if fault is None:
            return float(noise(self.schedule.seed, sample.index or 0, 4) > 0.5)
        return self._misbehave(fault)

    def _misbehave(self, fault: Fault) -> float | None:
        missing = {FaultKind.REWARD_NAN: float("nan"), FaultKind.REWARD_NONE: None}
        if fault.kind in missing:
            if self.schedule.missing_reward == "error":
                self.observer.fatal(Misbehaved(f"{fault}"))
            return missing[fault.kind]
        if fault.kind is FaultKind.REWARD_LEAKS_CANCELLATION:
            self.observer.fatal(Misbehaved(f"{fault}"))
            raise asyncio.CancelledError
        error = SimulatedError(f"{fault}")
        self.observer.fatal(error)
        raise error

    def filter(self, args: Any, group: list[Any], **keywords: Any) -> DynamicFilterOutput:
        """Drops some groups, and raises for some."""
        index = index_of(group)
        if self.faults.at_group(index, FaultKind.FILTER_RAISES):
            raise FilterFailed(f"the filter fails for group {index}")
        many = self.faults.at_group(index, FaultKind.FILTER_DROPS_MANY)
        if many is not None:
            self._drops = max(self._drops, 1 + int(many.seconds * self.schedule.rollout_batch_size))
        if self.faults.at_group(index, FaultKind.FILTER_DROPS) or (self._drops and not self.faults.quiet):
            self._drops = max(0, self._drops - 1)
            self.observer.dropped(index, "filter")
            return DynamicFilterOutput(keep=False, reason="simulated")
        self.observer.kept(index)
        return DynamicFilterOutput(keep=True)


class FilterFailed(SimulatedError):
    """What the simulated dynamic filter raises."""
