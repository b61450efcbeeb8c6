"""Random schedules against an observer that sees only data-source calls and training steps: its books and the ledger's
must agree, at every moment that somebody looks.

Each seed is one schedule of generation times, aborts, updates, filters, failed and cancelled calls and steps, batches
that are acknowledged, given back or neither, and restarts from a snapshot, on virtual time.
Run one seed: `pytest tests/fast/rollout/test_fully_async_books.py -k seed7`.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from miles.rollout._fully_async_groups import samples_of
from miles.rollout._fully_async_ledger import Owner
from miles.utils.types import Sample
from tests.fast.fakes import FakeDataSource, answer, group_indexes, prompt_group
from tests.fast.rollout.fully_async_setup import build, train
from tests.fast.virtual_time import run_virtual

if TYPE_CHECKING:
    from miles.rollout.fully_async_rollout import FullyAsyncRolloutFn

SEEDS = 120
STEPS = 14


class ObservedSource(FakeDataSource):
    """The observer's half of the data source: what went out, what came back."""

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next_index, "buffer": group_indexes(self.buffer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next_index = state["next"]
        self.buffer = [prompt_group(index) for index in state["buffer"]]


class World:
    def __init__(self, seed: int) -> None:
        self.random = rng = random.Random(seed)
        self.events: Counter[str] = Counter()
        self.version = 1
        self.batch_size = rng.randint(1, 5)
        self.acknowledges = rng.random() < 0.8
        self.interval = rng.choice([1, 1, 2, 3])
        self.flags: dict[str, Any] = {
            "rollout_batch_size": self.batch_size,
            "max_weight_staleness": rng.choice([None, 0, 1, 3]),
            "async_max_concurrent_samples": rng.choice([None, 2, 9, 32]),
            "async_data_buffer_capacity_factor": rng.choice([0.5, 1.0, 4.0]),
            "async_data_buffer_max_bytes": rng.choice([None, None, 9000]),
            "rollout_submission_granularity": rng.choice(["group", "sample"]),
            "async_unused_samples_handler": rng.choice(["retry", "retry", "drop"]),
            "async_max_group_retries": rng.choice([0, 2, 8]),
            "update_weights_interval": self.interval,
        }
        self.source = ObservedSource()
        self.pulled_before = self.recycled_before = self.reissued = 0
        self.trained: Counter[int] = Counter()
        self.holding = self.holding_peak = 0

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    async def generate(self, state: Any, group: list[Sample], sample_done_callback: Any = None, **kw: Any) -> list[Any]:
        holding = len(group)
        self.holding += holding
        self.holding_peak = max(self.holding_peak, self.holding)
        try:
            born = self.version
            for _ in range(len(group)):
                if self.chance(0.7):
                    await asyncio.sleep(self.random.expovariate(2.0))
                if sample_done_callback is not None:
                    sample_done_callback()
                    self.holding -= 1
                    holding -= 1
            answer(group, versions=(str(born), str(self.version)))
            if self.chance(0.15):
                group[-1].status = Sample.Status.ABORTED
            return [[group[0], Sample(index=group[0].index)], *group[1:]] if self.chance(0.2) else group
        finally:
            self.holding -= holding

    async def filter(self, args: Any, group: list[Any]) -> bool:
        if self.chance(0.2):
            await asyncio.sleep(self.random.random())
        if self.chance(0.03):
            self.events["filter failed"] += 1
            raise ZeroDivisionError
        return self.chance(0.9)

    # ---- the training process

    async def live(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fn = self.start(monkeypatch)
        step = 0
        for _ in range(STEPS):
            fn = await self.maybe_restart(fn, monkeypatch)
            if await self.train_one(fn, step):
                step += 1
                if step % self.interval == 0:
                    self.version += 1
                    fn.on_weight_version(self.version)
            self.check(fn)
            if self.chance(0.4):
                await asyncio.sleep(self.random.random() * 3)
                self.check(fn)
        await fn.close()
        assert self.holding == 0

    def start(self, monkeypatch: pytest.MonkeyPatch) -> FullyAsyncRolloutFn:
        fn = build(monkeypatch, self.generate, self.source, **self.flags)
        fn._dynamic_filter = self.filter
        fn.on_weight_version(self.version)
        return fn

    async def train_one(self, fn: FullyAsyncRolloutFn, step: int) -> bool:
        call = asyncio.create_task(fn(train(step)), name="call")
        await asyncio.wait({call}, timeout=self.random.expovariate(1.0) if self.chance(0.25) else 10_000)
        if not call.done():
            self.events["cancelled"] += 1
            call.cancel()
            await asyncio.wait({call})
            return False
        if isinstance(call.exception(), ZeroDivisionError):
            return False
        batch = call.result().samples
        assert len(batch) == self.batch_size
        self.require_fresh(batch)
        if self.acknowledges and self.chance(0.2):
            self.events["given back"] += 1
            assert fn.give_back(step) == len(batch)
            assert fn.give_back(step) == fn.acknowledge(step) == 0
            return False
        await asyncio.sleep(self.random.random() * 4)
        self.events["steps"] += 1
        self.trained.update(group_indexes(batch))
        if self.acknowledges:
            assert fn.acknowledge(step) == len(batch)
            assert fn.give_back(step) == fn.acknowledge(step) == 0
        return True

    def require_fresh(self, batch: list[Any]) -> None:
        limit = self.flags["max_weight_staleness"]
        for group in batch:
            for sample in (s for member in group for s in (member if isinstance(member, list) else [member])):
                assert limit is None or self.version - min(map(int, sample.weight_versions or ["99"])) <= limit

    async def maybe_restart(self, fn: FullyAsyncRolloutFn, monkeypatch: pytest.MonkeyPatch) -> FullyAsyncRolloutFn:
        if not self.acknowledges or not self.chance(0.1):
            return fn
        self.events["restarted"] += 1
        self.check(fn)
        state = json.loads(json.dumps(fn.snapshot()))
        start_over = [  # those in generation, and the finished ones that cannot be trained on
            key
            for key in fn.ledger.open.values()
            if key.owner is Owner.IN_FLIGHT or any(s.status is Sample.Status.ABORTED for s in samples_of(key.group))
        ]
        self.pulled_before = fn.ledger.pulled
        self.recycled_before = fn.ledger.recycled + len(start_over)
        await fn.close()
        self.reissued = len(state["prompts"])
        self.source = ObservedSource()
        fn = self.start(monkeypatch)
        fn.restore(state)
        self.check(fn)
        return fn

    # ---- the observer's books

    def check(self, fn: FullyAsyncRolloutFn) -> None:
        ledger = fn.ledger
        ledger.check()
        issued_again = self.reissued - len(fn._prompts.waiting)
        pulled = self.pulled_before + len(self.source.pulled) + issued_again
        recycled = self.recycled_before + len(self.source.added)
        trained = self.trained.total()
        assert (ledger.pulled, ledger.recycled) == (pulled, recycled)
        if self.acknowledges:
            assert ledger.trained == trained
            held = ledger.in_flight + ledger.queued + ledger.drained + ledger.dropped
            assert held == pulled - recycled - trained
        assert max(self.trained.values(), default=0) <= 1
        assert ledger.in_flight <= fn.config.most_groups_in_flight
        assert self.holding_peak <= fn.max_in_flight_samples
        assert fn._slots.used <= fn.max_in_flight_samples
        self.events["dropped"] += ledger.dropped > 0
        self.events["recycled"] += ledger.recycled > 0


@pytest.mark.parametrize("seed", range(SEEDS), ids=lambda seed: f"seed{seed}")
def test_the_observers_books_agree_with_the_ledger(monkeypatch, seed):
    run_virtual(World(seed).live(monkeypatch), debug=False)


def test_the_schedules_cover_what_can_happen(monkeypatch):
    coverage: Counter[str] = Counter()
    for seed in range(SEEDS, SEEDS + 12):
        world = World(seed)
        run_virtual(world.live(monkeypatch), debug=False)
        coverage += world.events
    for event in ("steps", "cancelled", "given back", "restarted", "filter failed", "dropped", "recycled"):
        assert coverage[event] >= 3, coverage
