"""Which engines get which weights, when engines fail during an update, die, and come back."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from miles.backends.megatron_utils.engine_client import WeightUpdateError
from miles.ray.rollout.engine_states import EngineRef, FleetView
from miles.ray.weight_publisher import POLL_SECS, WeightPublisher
from miles.rollout._fully_async_ledger import RecycleReason
from tests.fast.fakes import finished, group_indexes
from tests.fast.rollout.fully_async_setup import fed_by_hand, train
from tests.fast.virtual_time import virtual

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from miles.rollout.base_types import RolloutFnTrainOutput
    from miles.rollout.fully_async_rollout import FullyAsyncRolloutFn

TRAINED_MAX_STALENESS = "rollout/fully_async/trained_max_staleness"


class Remote:
    def __init__(self, method: Any) -> None:
        self.remote = method


class FakeManager:
    """A fleet that changes only through its calls and through the test."""

    def __init__(self, count: int = 2) -> None:
        self.serving: list[EngineRef] = []
        self.waiting = [EngineRef(i, 1, f"http://engine-{i}") for i in range(count)]
        self.failed: list[tuple[str, bool]] = []
        self.engines = Remote(self._engines)
        self.begin_update, self.fail_update = Remote(self._begin), Remote(self._fail)
        self.announce_weight_version = Remote(self._announce)
        self.finish_update = Remote(self._finish)

    async def _engines(self) -> FleetView:
        return FleetView(tuple(self.serving), tuple(self.waiting), restarts=0)

    async def _begin(self, only_waiting: bool) -> tuple[EngineRef, ...]:
        return tuple(self.waiting) if only_waiting else tuple(sorted(self.serving + self.waiting, key=str))

    async def _fail(self, engines: Any, urls: Sequence[str], reason: str, answered: bool) -> None:
        for url in urls:
            self.failed.append((url, answered))
            self.lose(url)

    async def _announce(self, version: int) -> bool:
        return True

    async def _finish(self, engines: tuple[EngineRef, ...], version: int) -> FleetView:
        for ref in engines:
            if ref in self.waiting:
                self.waiting.remove(ref)
                self.serving.append(ref)
        return await self._engines()

    def lose(self, url: str) -> None:
        self.serving = [ref for ref in self.serving if ref.url != url]
        self.waiting = [ref for ref in self.waiting if ref.url != url]

    def come_back(self, index: int) -> None:
        self.waiting.append(EngineRef(index, 2, f"http://engine-{index}"))


class FakeTrainers:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.version = 0
        self.errors: list[Exception] = []
        self.sending = asyncio.Event()
        self.sending.set()

    async def connect_engines(self, urls: list[str]) -> None:
        self.calls.append("connect " + " ".join(url.removeprefix("http://engine-") for url in urls))

    async def update_weights(self, *, again: bool) -> tuple[int, dict[str, float]]:
        if self.errors:
            raise self.errors.pop(0)
        await self.sending.wait()
        self.version += not again
        self.calls.append(f"version {self.version}")
        return self.version, {"bytes": 1.0, "perf/weight_update_pause_seconds": 0.25}


class Setup:
    def __init__(self, *, tolerates_faults: bool = True) -> None:
        self.manager, self.trainers = FakeManager(), FakeTrainers()
        self.published: list[int] = []
        self.pauses: list[float] = []
        self.publisher = WeightPublisher(
            self.manager,
            self.trainers,  # type: ignore[arg-type]
            tolerates_faults=tolerates_faults,
            on_published=self.published.append,
            on_view=lambda view: None,
            on_paused=lambda start, end: self.pauses.append(end - start),
        )

    @property
    def calls(self) -> list[str]:
        """Since the last look."""
        calls, self.trainers.calls = self.trainers.calls, []
        return calls


def failure(index: int, status: int | None = None) -> WeightUpdateError:
    return WeightUpdateError(f"http://engine-{index}", "/end_weight_update", status, "reset by peer")


@virtual
async def test_the_group_is_formed_once_for_the_same_engines() -> None:
    s = Setup()
    assert (await s.publisher.publish())["bytes"] == 1.0
    await s.publisher.publish()
    assert s.calls == ["connect 0 1", "version 1", "version 2"]
    assert s.published == [1, 2]


@virtual
async def test_an_update_that_an_engine_fails_is_repeated_without_it_as_the_same_version() -> None:
    s = Setup()
    await s.publisher.publish()
    s.trainers.errors = [failure(0)]
    await s.publisher.publish()
    assert s.calls == ["connect 0 1", "version 1", "connect 1", "version 2"]
    assert s.manager.failed == [("http://engine-0", False)] and s.published == [1, 2]


@virtual
async def test_an_engine_that_answered_is_told_from_one_that_did_not() -> None:
    s = Setup()
    s.trainers.errors = [failure(1, status=400)]
    await s.publisher.publish()
    assert s.manager.failed == [("http://engine-1", True)]


@virtual
async def test_other_failures_and_failures_without_fault_tolerance_are_raised() -> None:
    s = Setup()
    s.trainers.errors = [ValueError("checksums differ")]
    with pytest.raises(ValueError, match="checksums differ"):
        await s.publisher.publish()
    s = Setup(tolerates_faults=False)
    s.trainers.errors = [failure(0)]
    with pytest.raises(WeightUpdateError):
        await s.publisher.publish()


@virtual
async def test_an_engine_that_comes_back_joins_at_the_next_update_though_its_address_is_the_same() -> None:
    s = Setup()
    await s.publisher.publish()
    s.manager.lose("http://engine-0")
    s.manager.come_back(0)
    s.publisher.on_trained()
    assert await s.publisher.engine_waits()
    await s.publisher.publish()
    assert s.calls == ["connect 0 1", "version 1", "connect 0 1", "version 2"]
    assert not await s.publisher.engine_waits()


@virtual
async def test_while_the_trainer_is_idle_the_engine_alone_gets_the_published_version() -> None:
    s = Setup()
    await s.publisher.publish()
    s.manager.lose("http://engine-0")
    batch = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(s.publisher.wait(batch))
    await asyncio.sleep(2 * POLL_SECS)
    assert s.calls == ["connect 0 1", "version 1"]
    s.manager.come_back(0)
    await asyncio.sleep(2 * POLL_SECS)
    assert s.calls == ["connect 0", "version 1"] and len(s.manager.serving) == 2 and s.published == [1]
    batch.set_result("batch")
    assert await waiting == "batch"
    await s.publisher.publish()
    assert s.calls == ["connect 0 1", "version 2"]


@virtual
async def test_trained_weights_wait_for_the_next_update_unless_no_engine_serves() -> None:
    s = Setup()
    await s.publisher.publish()
    s.publisher.on_trained()
    s.manager.lose("http://engine-0")
    s.manager.come_back(0)
    batch = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(s.publisher.wait(batch))
    await asyncio.sleep(3 * POLL_SECS)
    assert s.calls == ["connect 0 1", "version 1"]
    s.manager.lose("http://engine-1")
    await asyncio.sleep(2 * POLL_SECS)
    assert s.calls == ["connect 0", "version 2"] and s.published == [1, 2]
    batch.set_result("batch")
    await waiting


@virtual
async def test_a_batch_that_fails_is_raised_and_nothing_is_asked_without_fault_tolerance() -> None:
    for tolerates_faults in (True, False):
        s = Setup(tolerates_faults=tolerates_faults)
        batch = asyncio.get_running_loop().create_future()
        batch.set_exception(KeyError("no reward"))
        with pytest.raises(KeyError):
            await s.publisher.wait(batch)
    assert not await s.publisher.engine_waits()


@virtual
async def test_an_engine_that_dies_before_it_got_weights_leaves_nothing_to_send() -> None:
    s = Setup()
    await s.publisher.publish()
    s.manager.lose("http://engine-0")
    s.manager.come_back(0)
    s.trainers.errors = [failure(0)]
    batch = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(s.publisher.wait(batch))
    await asyncio.sleep(2 * POLL_SECS)
    assert s.manager.failed and s.published == [1] and s.trainers.version == 1
    batch.set_result("batch")
    await waiting


@virtual
async def test_the_pause_of_an_update_is_told_unless_it_concerned_only_engines_that_had_come_back() -> None:
    s = Setup()
    await s.publisher.publish()
    s.manager.lose("http://engine-0")
    s.manager.come_back(0)
    await s.publisher._heal()
    assert s.calls[-1] == "version 1"
    await s.publisher.publish()
    assert s.pauses == pytest.approx([0.25, 0.25], abs=1e-3)


# ---- a batch of the fully-async rollout that is on its way to the trainer while every engine has come back


class RolloutSide(FakeManager):
    """A fleet of one engine and a rollout function, whose batches reach the driver when `arrives` is set."""

    def __init__(self, fn: FullyAsyncRolloutFn) -> None:
        super().__init__(count=1)
        self.fn = fn
        self.arrives = asyncio.Event()
        self.announce_weight_version = Remote(self._announce)

    async def _announce(self, version: int) -> bool:
        return self.fn.announce_weight_version(version)

    async def _finish(self, engines: tuple[EngineRef, ...], version: int) -> FleetView:
        self.fn.on_weight_version(version)
        return await super()._finish(engines, version)

    async def generate(self, rollout_id: int) -> RolloutFnTrainOutput:
        output = await self.fn(train(rollout_id))
        await self.arrives.wait()
        return output

    def staleness_at_the_step(self, output: RolloutFnTrainOutput) -> int:
        """As the metrics have it, against the version that the trainer has when the step begins."""
        labels = {label for group in output.samples for sample in group for label in sample.weight_versions}
        return max(age for label in labels if (age := self.fn._trainer.versions.age(label)) is not None)


@asynccontextmanager
async def trained_with_every_engine_lost_and_back(
    monkeypatch: pytest.MonkeyPatch, *pairs: Any
) -> AsyncIterator[tuple[Setup, RolloutSide]]:
    """One step after the only update, between two updates: what waits for weights gets others than the published."""
    async with fed_by_hand(monkeypatch, *pairs, max_weight_staleness=0, update_weights_interval=2) as fn:
        s, side = Setup(), RolloutSide(fn)
        s.manager = s.publisher._manager = side
        await s.publisher.publish()
        fn.acknowledge(0)
        s.publisher.on_trained()
        side.lose("http://engine-0")
        side.come_back(0)
        yield s, side


@virtual
async def test_no_version_is_published_between_the_hand_over_of_a_batch_and_its_step(monkeypatch):
    pairs = [finished(i, versions=("1",)) for i in range(2)]
    async with trained_with_every_engine_lost_and_back(monkeypatch, *pairs) as (s, side):
        waiting = asyncio.ensure_future(s.publisher.wait(side.generate(1)))
        await asyncio.sleep(3 * POLL_SECS)
        assert side.fn.ledger.drained == 2 and not waiting.done()
        assert s.published == [1]
        side.arrives.set()
        output = await waiting
        assert side.staleness_at_the_step(output) == 0 == output.metrics[TRAINED_MAX_STALENESS]
        assert side.fn.acknowledge(1) == 2
        assert await s.publisher.engine_waits()  # so the driver publishes now, with no batch on its way
        await s.publisher.publish()
        assert s.published == [1, 2] and not await s.publisher.engine_waits()


@virtual
async def test_a_batch_that_is_complete_while_weights_are_sent_is_measured_against_these(monkeypatch):
    async with trained_with_every_engine_lost_and_back(monkeypatch, finished(0, versions=("1",))) as (s, side):
        s.trainers.sending.clear()
        side.arrives.set()
        waiting = asyncio.ensure_future(s.publisher.wait(side.generate(1)))
        await asyncio.sleep(2 * POLL_SECS)
        assert s.published == [1] and side.fn.ledger.drained == 1
        for i in (1, 2, 3):
            side.fn._output.put_nowait(finished(i, versions=("1" if i == 1 else "2",)))
        await asyncio.sleep(2 * POLL_SECS)
        assert side.fn.ledger.recycled_by[RecycleReason.STALE] == 2
        s.trainers.sending.set()
        output = await waiting
        assert s.published == [1, 2] and group_indexes(output.samples) == [2, 3]
        assert side.staleness_at_the_step(output) == 0 == output.metrics[TRAINED_MAX_STALENESS]
        assert side.fn.acknowledge(1) == 2
