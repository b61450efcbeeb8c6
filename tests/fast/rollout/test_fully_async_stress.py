"""Random schedules: whatever happens in whatever order, every pulled group is in exactly one place.

Each seed is one schedule of generation times, aborts, stale and nested groups, dropped groups, failing filters and
calls that are cancelled at a random moment, on virtual time. An observer that sees only the data source, the filter
and the batches keeps the books. Run one seed: `pytest tests/fast/rollout/test_fully_async_stress.py -k seed7`.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from miles.rollout._fully_async_ledger import Owner
from miles.utils.types import Sample
from tests.fast.fakes import FakeDataSource, answer, group_indexes
from tests.fast.rollout.fully_async_setup import build, train
from tests.fast.virtual_time import run_virtual, settle

if TYPE_CHECKING:
    from miles.rollout.fully_async_rollout import FullyAsyncRolloutFn

SEEDS = 150
STEPS = 12


class Schedule:
    """One seed's world: generation, filter, trainer and the observer's books."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.version = 1
        self.batch_size = self.random.randint(1, 6)
        self.source = FakeDataSource()
        self.trained: Counter[int] = Counter()
        self.dropped: Counter[int] = Counter()
        self.generating = 0
        self.generating_peak = 0
        self.events: Counter[str] = Counter()

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    async def generate(self, state: Any, group: list[Sample], **keywords: Any) -> list[Any]:
        self.generating += 1
        self.generating_peak = max(self.generating_peak, self.generating)
        try:
            born = self.version
            if self.chance(0.8):
                await asyncio.sleep(self.random.expovariate(1.0))
            status = Sample.Status.ABORTED if self.chance(0.15) else Sample.Status.COMPLETED
            label = "default" if self.chance(0.05) else str(born)
            answer(group, versions=(label, str(self.version)))
            group[-1].status = status
            return [[group[0], Sample(index=group[0].index)], *group[1:]] if self.chance(0.3) else group
        finally:
            self.generating -= 1

    def dynamic_filter(self, args: Any, group: list[Any]) -> bool:
        if self.chance(0.04):
            self.events["filter failed"] += 1
            raise ZeroDivisionError
        if self.chance(0.9):
            return True
        self.dropped[group_indexes([group])[0]] += 1
        self.events["dropped"] += 1
        return False

    async def take_batch(self, fn: FullyAsyncRolloutFn, step: int) -> None:
        call = asyncio.create_task(fn(train(step, self.version if self.chance(0.5) else None)), name="call")
        timeout = self.random.expovariate(2.0) if self.chance(0.3) else None
        await asyncio.wait({call}, timeout=timeout)
        if not call.done():
            self.events["cancelled"] += 1
            call.cancel()
            await asyncio.wait({call})
            assert call.cancelled()
            return
        try:
            batch = call.result().samples
        except ZeroDivisionError:
            return
        self.events["batches"] += 1
        assert len(batch) == self.batch_size
        assert group_indexes(batch) == sorted(group_indexes(batch))
        self.trained.update(group_indexes(batch))

    def check_books(self, fn: FullyAsyncRolloutFn) -> None:
        waiting = [key.prompt_group for key in fn._finished.returned]
        waiting += [pair[0] for pair in (fn._output._queue if fn._output else ())]
        in_flight = [key.prompt_group for key in fn.ledger.held_by(Owner.IN_FLIGHT)]
        places = self.trained + self.dropped + _count(self.source.added) + _count(waiting) + _count(in_flight)
        assert places == _count(self.source.pulled)
        assert max(self.trained.values(), default=0) <= 1
        assert len(in_flight) <= fn.max_in_flight_groups
        assert len(waiting) <= fn.queue_capacity + self.batch_size


def _count(groups: list[list[Sample]]) -> Counter[int]:
    return Counter(group_indexes(groups))


async def run_schedule(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    fn = build(
        monkeypatch,
        schedule.generate,
        schedule.source,
        rollout_batch_size=schedule.batch_size,
        max_weight_staleness=schedule.random.choice([None, 0, 1, 3]),
        async_max_concurrent_samples=schedule.random.choice([None, 2, 8, 32]),
        async_data_buffer_capacity_factor=schedule.random.choice([0.5, 1.0, 4.0]),
        async_max_group_retries=1000,
    )

    class EngineVersion:
        async def get(self, args: Any) -> int:
            if schedule.chance(0.3):
                await asyncio.sleep(schedule.random.random())
            return schedule.version

    fn._weight_version = EngineVersion()
    fn._dynamic_filter = schedule.dynamic_filter
    for step in range(STEPS):
        await schedule.take_batch(fn, step)
        await settle(3)
        schedule.check_books(fn)
        if schedule.chance(0.5):
            await asyncio.sleep(schedule.random.random() * 2)
            schedule.check_books(fn)
        schedule.version += 1
    assert schedule.generating_peak <= fn.max_in_flight_groups
    schedule.events["recycled"] += len(schedule.source.added)
    await fn.close()
    assert schedule.generating == 0


@pytest.mark.parametrize("seed", range(SEEDS), ids=lambda seed: f"seed{seed}")
def test_every_pulled_group_is_in_exactly_one_place(monkeypatch, seed):
    run_virtual(run_schedule(Schedule(seed), monkeypatch), debug=False)


def test_the_schedules_cover_what_can_happen(monkeypatch):
    coverage: Counter[str] = Counter()
    for seed in range(SEEDS, SEEDS + 10):
        schedule = Schedule(seed)
        run_virtual(run_schedule(schedule, monkeypatch), debug=False)
        coverage += schedule.events
    for event in ("batches", "cancelled", "dropped", "recycled", "filter failed"):
        assert coverage[event] >= 3, coverage
