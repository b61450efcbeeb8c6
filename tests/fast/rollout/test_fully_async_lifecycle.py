"""Failure, cancellation and the end: no task is left behind, no finished group is lost, nothing waits for ever.

`virtual` fails a test that hangs or that leaves a task behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from typing import Any

import pytest

import miles.rollout.fully_async_rollout as module
from miles.rollout._fully_async_buffer import DefaultDataBuffer
from miles.utils.misc import function_registry
from miles.utils.types import Sample
from tests.fast.fakes import FakeDataSource, GatedGeneration, answer, finished, group_indexes
from tests.fast.rollout.fully_async_setup import build, fed_by_hand, running, train
from tests.fast.virtual_time import settle, virtual


async def start_drain(fn: module.FullyAsyncRolloutFn, rollout_id: int = 0) -> asyncio.Task[Any]:
    drain = asyncio.create_task(fn(train(rollout_id)), name="drain")
    await settle()
    return drain


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


def pending_gets(fn: module.FullyAsyncRolloutFn) -> int:
    return sum(not getter.done() for getter in fn._output._getters)


# ---- a drain that is cancelled


@virtual
async def test_cancelled_drain_gives_its_groups_back_in_front(monkeypatch):
    async with fed_by_hand(monkeypatch, finished(3), finished(1), rollout_batch_size=3) as fn:
        await cancel(await start_drain(fn))
        assert fn.queue_size == 2
        assert pending_gets(fn) == 0
        for group_index in (0, 2):
            fn._output.put_nowait(finished(group_index))
        output = await fn(train())
        assert group_indexes(output.samples) == [0, 1, 3]
        assert output.metrics["rollout/fully_async/queue_size"] == 1


@virtual
async def test_cancelled_wait_leaves_no_get_behind_and_takes_no_group_with_it(monkeypatch):
    async with fed_by_hand(monkeypatch, rollout_batch_size=1) as fn:
        await cancel(await start_drain(fn))
        assert pending_gets(fn) == 0
        fn._output.put_nowait(finished(0))
        await settle()
        assert fn.queue_size == 1
        assert group_indexes((await fn(train())).samples) == [0]


@virtual
async def test_returned_groups_keep_their_order_over_several_failures(monkeypatch):
    failing_on = 2

    def dynamic_filter(args: Any, group: list[Sample]) -> bool:
        if group[0].group_index == failing_on:
            raise ZeroDivisionError
        return True

    async with fed_by_hand(monkeypatch, *(finished(i) for i in range(4)), rollout_batch_size=4) as fn:
        fn._dynamic_filter = dynamic_filter
        for failing_on in (2, 1, 3, 0):  # noqa: B007 - read by the filter
            with pytest.raises(ZeroDivisionError):
                await fn(train())
        assert [(await fn._next_group()).group_index for _ in range(4)] == [0, 1, 2, 3]


@virtual
async def test_cancelled_wait_ends_only_after_its_get_has_ended(monkeypatch):
    left = []

    async def wait_for_group(fn: module.FullyAsyncRolloutFn) -> None:
        try:
            await fn._next_group()
        finally:
            left.extend(task.get_name() for task in asyncio.all_tasks() if "next group" in task.get_name())

    async with fed_by_hand(monkeypatch) as fn:
        waiting = asyncio.create_task(wait_for_group(fn))
        await settle()
        await cancel(waiting)
    assert left == []


@pytest.mark.parametrize("steps", range(6))
@virtual
async def test_group_that_arrives_while_the_drain_is_cancelled_is_not_lost(monkeypatch, steps):
    """The cancellation hits at every point between `put` and the drain's next step."""
    async with fed_by_hand(monkeypatch, rollout_batch_size=2) as fn:
        drain = await start_drain(fn)
        fn._output.put_nowait(finished(0))
        await settle(steps)
        await cancel(drain)
        assert fn.queue_size == 1
        assert pending_gets(fn) == 0
        fn._output.put_nowait(finished(1))
        assert group_indexes((await fn(train())).samples) == [0, 1]


@virtual
async def test_drain_cancelled_while_it_measures_a_group_gives_that_group_back(monkeypatch):
    class SlowVersion:
        async def get(self, args: Any) -> int:
            await asyncio.sleep(1)
            return 1

    groups = [finished(i, versions=("1",)) for i in range(3)]
    async with fed_by_hand(monkeypatch, *groups, max_weight_staleness=1, rollout_batch_size=3) as fn:
        fn._weight_version = SlowVersion()
        drain = asyncio.create_task(fn(train()))
        await asyncio.sleep(1.5)  # one group kept, one being measured, one queued
        assert fn.queue_size == 1
        await cancel(drain)
        assert fn.queue_size == 3
        assert group_indexes((await fn(train())).samples) == [0, 1, 2]


@virtual
async def test_cancelling_a_drain_does_not_touch_the_worker(monkeypatch):
    generate = GatedGeneration()
    async with running(monkeypatch, generate) as fn:
        await cancel(await start_drain(fn))
        assert not fn._worker.done()
        assert generate.running == [0, 1]
        generate.finish(0, 1)
        assert group_indexes((await fn(train())).samples) == [0, 1]


# ---- a drain that fails


@virtual
async def test_failing_dynamic_filter_fails_the_call_and_loses_no_group(monkeypatch):
    broken = True

    def dynamic_filter(args: Any, group: list[Sample]) -> bool:
        if broken and group[0].group_index == 1:
            raise ZeroDivisionError
        return True

    async with fed_by_hand(monkeypatch, *(finished(i) for i in range(3)), rollout_batch_size=3) as fn:
        fn._dynamic_filter = dynamic_filter
        with pytest.raises(ZeroDivisionError):
            await fn(train())
        assert fn.queue_size == 3
        broken = False
        assert group_indexes((await fn(train())).samples) == [0, 1, 2]


@virtual
async def test_failing_sample_filter_loses_no_group(monkeypatch):
    def sample_filter(args: Any, data: Any) -> None:
        raise KeyError("reward")

    async with fed_by_hand(monkeypatch, finished(1), finished(0)) as fn:
        fn._sample_filter = sample_filter
        with pytest.raises(KeyError):
            await fn(train())
        fn._sample_filter = None
        assert group_indexes((await fn(train())).samples) == [0, 1]


@virtual
async def test_failing_recycle_loses_no_group_and_is_raised(monkeypatch):
    class TakesNothingBack(FakeDataSource):
        def add_samples(self, samples: Any) -> None:
            raise NotImplementedError("this data source has no buffer")

    aborted = finished(0, status=Sample.Status.ABORTED)
    async with fed_by_hand(monkeypatch, finished(5), aborted, data_source=TakesNothingBack()) as fn:
        with pytest.raises(NotImplementedError):
            await fn(train())
        assert fn.queue_size == 2


@virtual
async def test_counts_of_a_failed_drain_are_reported_by_the_next_one_and_ages_are_not_doubled(monkeypatch):
    source = FakeDataSource()
    groups = [finished(0, versions=("1",)), finished(1, versions=("5",)), finished(2, versions=("5",), reward=0.0)]
    async with fed_by_hand(monkeypatch, *groups, data_source=source, max_weight_staleness=2) as fn:
        fn._dynamic_filter = lambda args, group: group[0].reward != 0.0
        drain = asyncio.create_task(fn(train(weight_version=6)))
        await settle(60)
        await cancel(drain)
        fn._output.put_nowait(finished(3, versions=("6",)))
        output = await fn(train(weight_version=6))
        assert output.metrics["rollout/fully_async/stale_groups_recycled"] == 1
        assert output.metrics["rollout/fully_async/avg_staleness"] == 0.5
        fn._output.put_nowait(finished(4))
        fn._output.put_nowait(finished(5))
        output = await fn(train())
        assert output.metrics["rollout/fully_async/stale_groups_recycled"] == 0


@virtual
async def test_group_in_the_waiting_get_survives_a_worker_that_fails_at_the_same_moment(monkeypatch):
    async with fed_by_hand(monkeypatch, rollout_batch_size=1) as fn:
        idle, failing = fn._worker, asyncio.get_running_loop().create_future()
        fn._worker = failing
        drain = await start_drain(fn)
        fn._output.put_nowait(finished(0))
        failing.set_exception(OSError("engine gone"))
        with pytest.raises(OSError, match="engine gone"):
            await drain
        assert fn.queue_size == 1
        fn._worker = idle
        assert group_indexes((await fn(train())).samples) == [0]


# ---- a worker that ends


@virtual
async def test_error_of_the_data_source_is_raised_as_it_is(monkeypatch):
    error = FileNotFoundError("prompts.jsonl")
    source = FakeDataSource(error=error, error_after=3)
    generate = GatedGeneration()
    async with running(monkeypatch, generate, source, rollout_batch_size=4) as fn:
        with pytest.raises(FileNotFoundError) as raised:
            await fn(train())
        assert raised.value is error
        assert generate.running == []


@pytest.mark.parametrize("count", [0, 2])
@virtual
async def test_data_source_that_returns_no_group_or_several_is_an_error_naming_it(monkeypatch, count):
    class Odd(FakeDataSource):
        def get_samples(self, num_samples: int) -> list[list[Sample]]:
            return super().get_samples(num_samples * count)

    async with running(monkeypatch, data_source=Odd()) as fn:
        with pytest.raises(RuntimeError, match=rf"Odd.get_samples\(1\) returned {count} groups"):
            await fn(train())


@virtual
async def test_leaked_cancellation_is_a_failure_and_not_a_cancelled_worker(monkeypatch):
    generate = GatedGeneration()
    async with running(monkeypatch, generate) as fn:
        drain = await start_drain(fn)
        leak = asyncio.CancelledError("of an inner task")
        generate.fail(1, leak)
        with pytest.raises(RuntimeError, match=r"generating group 1 \(samples 2..3\) ended cancelled") as raised:
            await drain
        assert isinstance(raised.value.__cause__, asyncio.CancelledError)
        with pytest.raises(RuntimeError, match="ended cancelled"):
            await fn(train())
        assert generate.running == []


@virtual
async def test_worker_that_somebody_else_cancels_is_an_error(monkeypatch):
    generate = GatedGeneration()
    async with running(monkeypatch, generate) as fn:
        drain = await start_drain(fn)
        fn._worker.cancel()
        with pytest.raises(RuntimeError, match="worker was cancelled, though nobody closed"):
            await drain
        assert generate.running == []


@virtual
async def test_worker_that_returns_is_an_error(monkeypatch):
    async def end_cleanly() -> None: ...

    async with fed_by_hand(monkeypatch, finished(0), rollout_batch_size=1) as fn:
        fn._worker.cancel()
        fn._worker = asyncio.create_task(end_cleanly())
        with pytest.raises(RuntimeError, match="must never end"):
            await fn(train())


@virtual
async def test_failure_ends_the_other_group_tasks(monkeypatch):
    generate = GatedGeneration()
    async with running(monkeypatch, generate, rollout_batch_size=3) as fn:
        drain = await start_drain(fn)
        generate.fail(0, ValueError("bad prompt"))
        await settle()
        assert sorted(generate.cancelled) == [1, 2]
        assert fn._worker.done()
        assert drain.done()
        with pytest.raises(ValueError, match="bad prompt"):
            await drain


@virtual
async def test_second_failure_is_logged(monkeypatch, caplog):
    generate = GatedGeneration()
    async with running(monkeypatch, generate) as fn:
        drain = await start_drain(fn)
        generate.fail(0, ValueError("first"))
        generate.fail(1, KeyError("second"))
        with pytest.raises(ValueError, match="first"):
            await drain
    assert [record.exc_info[1].args for record in caplog.records if record.exc_info] == [("second",)]


@virtual
async def test_failure_is_noticed_although_the_queue_is_full(monkeypatch):
    generate = GatedGeneration()
    async with running(monkeypatch, generate, rollout_batch_size=1, async_max_concurrent_samples=4) as fn:
        fn._output = asyncio.Queue(maxsize=1)
        generate.finish(0)
        await fn(train())
        generate.finish(1, 3)  # one in the queue, one waits for room
        await settle()
        generate.fail(2, ValueError("bad prompt"))
        await settle()
        with pytest.raises(ValueError, match="bad prompt"):
            await fn(train())


@virtual
async def test_failure_is_raised_although_another_task_ignores_its_cancellation(monkeypatch):
    async def generate(state: Any, group: list[Sample], **keywords: Any) -> list[Sample]:
        if group[0].group_index == 0:
            await asyncio.sleep(1)
            raise ValueError("bad prompt")
        await ignore_cancellation(seconds=60)
        return answer(group)

    async with running(monkeypatch, generate) as fn:
        began = asyncio.get_running_loop().time()
        with pytest.raises(ValueError, match="bad prompt"):
            await fn(train())
        assert asyncio.get_running_loop().time() - began <= 1 + module.CLOSE_GRACE_SECS
        await asyncio.sleep(120)


# ---- close


async def ignore_cancellation(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while (left := end - loop.time()) > 0:
        try:
            await asyncio.sleep(left)
        except asyncio.CancelledError:
            continue


@virtual
async def test_close_before_the_first_call(monkeypatch):
    fn = build(monkeypatch)
    await fn.close()
    await fn.close()
    assert fn._worker is None
    with pytest.raises(RuntimeError, match="closed"):
        await fn(train())
    assert fn.data_source.pulled == []


@virtual
async def test_close_between_two_calls_twice(monkeypatch):
    generate = GatedGeneration()
    fn = build(monkeypatch, generate)
    generate.finish(0, 1)
    await fn(train())
    await settle()
    assert len(generate.running) == 2
    await fn.close()
    assert generate.running == []
    assert fn._worker.done()
    await fn.close()
    with pytest.raises(RuntimeError, match="closed"):
        await fn(train())


@virtual
async def test_close_while_a_call_waits_fails_that_call(monkeypatch):
    generate = GatedGeneration()
    fn = build(monkeypatch, generate)
    drain = await start_drain(fn)
    await fn.close()
    with pytest.raises(RuntimeError, match="was closed while a batch was being collected"):
        await drain
    assert sorted(generate.cancelled) == [0, 1]


@virtual
async def test_close_right_after_the_worker_was_started(monkeypatch):
    fn = build(monkeypatch)
    drain = asyncio.create_task(fn(train()))
    await asyncio.sleep(0)
    await fn.close()
    with pytest.raises(RuntimeError, match="closed"):
        await drain


@virtual
async def test_close_with_a_full_queue_and_tasks_waiting_for_room(monkeypatch):
    monkeypatch.setattr(module, "OUTPUT_QUEUE_MAX_GROUPS", 1)
    fn = build(monkeypatch)
    await fn(train())
    await settle()
    assert fn._output.full()
    await fn.close()
    assert fn._worker.done()
    assert fn.queue_size == 1


@virtual
async def test_close_after_the_worker_has_failed(monkeypatch, caplog):
    generate = GatedGeneration()
    fn = build(monkeypatch, generate)
    drain = await start_drain(fn)
    await cancel(drain)
    generate.fail(0, ValueError("seen by nobody"))
    await settle()
    await fn.close()
    await fn.close()
    assert "closing a fully-async rollout whose worker had failed: ValueError('seen by nobody')" in caplog.text
    with pytest.raises(RuntimeError, match="closed"):
        await fn(train())


@virtual
async def test_close_ends_a_replaced_worker(monkeypatch):
    async with fed_by_hand(monkeypatch) as fn:
        await fn.close()
        assert fn._worker.cancelled()


@virtual
async def test_two_closes_at_once(monkeypatch):
    generate = GatedGeneration()
    fn = build(monkeypatch, generate)
    drain = await start_drain(fn)
    await asyncio.gather(fn.close(), fn.close())
    assert generate.running == []
    with pytest.raises(RuntimeError, match="closed"):
        await drain


@virtual
async def test_close_can_be_cancelled_and_repeated(monkeypatch):
    async def generate(state: Any, group: list[Sample], **keywords: Any) -> list[Sample]:
        await ignore_cancellation(seconds=3)
        return answer(group)

    fn = build(monkeypatch, generate)
    drain = await start_drain(fn)
    closing = asyncio.create_task(fn.close())
    await asyncio.sleep(1)
    await cancel(closing)
    await fn.close()
    assert fn._worker.done()
    with pytest.raises(RuntimeError, match="closed"):
        await drain


@virtual
async def test_close_waits_for_the_cleanup_of_generation(monkeypatch):
    cleaned_up = []

    async def generate(state: Any, group: list[Sample], **keywords: Any) -> list[Sample]:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1)
            cleaned_up.append(group[0].group_index)
        return answer(group)

    fn = build(monkeypatch, generate)
    await cancel(await start_drain(fn))
    await fn.close()
    assert sorted(cleaned_up) == [0, 1]


@virtual
async def test_close_is_bounded_and_loud_when_generation_ignores_its_cancellation(monkeypatch, caplog):
    async def generate(state: Any, group: list[Sample], **keywords: Any) -> list[Sample]:
        await ignore_cancellation(seconds=100)
        return answer(group)

    fn = build(monkeypatch, generate)
    await cancel(await start_drain(fn))
    began = asyncio.get_running_loop().time()
    await fn.close()
    assert asyncio.get_running_loop().time() - began <= module.CLOSE_GRACE_SECS
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.message == (
        "2 task(s) still run 5 s after they were cancelled: "
        "fully-async group 0 (samples 0..1), fully-async group 1 (samples 2..3)"
    )
    await asyncio.sleep(200)  # they end by themselves, and do not wait for room in a queue that nobody reads
    assert fn.queue_size == 0


class Stubborn(DefaultDataBuffer):
    """Its `get` ignores cancellations until it has a group."""

    async def get(self, **context: Any) -> Any:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                return await super().get(**context)


@virtual
async def test_close_is_bounded_and_loud_when_a_store_ignores_its_cancellation(monkeypatch, caplog):
    with function_registry.temporary("stubborn", Stubborn):
        fn = build(monkeypatch, GatedGeneration(), custom_async_data_buffer_path="stubborn", rollout_batch_size=1)
    drain = await start_drain(fn)
    began = asyncio.get_running_loop().time()
    await fn.close()
    with pytest.raises(RuntimeError, match="was closed while a batch was being collected"):
        await drain
    assert asyncio.get_running_loop().time() - began <= module.CLOSE_GRACE_SECS
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.message == (
        f"get of the data buffer {__name__}.Stubborn still runs 5 s after it was cancelled; it is left behind"
    )
    await fn._finished.store.put(finished(7))  # the get ends at last: its group goes in front of the store
    await settle()
    assert group_indexes([group for _, group in fn._finished.returned]) == [7]
    assert fn.queue_size == fn.ledger.queued == 1


# ---- sharing the loop


@virtual
async def test_ramp_gives_other_tasks_their_turn(monkeypatch):
    generate = GatedGeneration()
    pulled_at_each_turn = []
    async with running(monkeypatch, generate, rollout_batch_size=500) as fn:
        drain = asyncio.create_task(fn(train()))
        while len(generate.running) < 500:
            await asyncio.sleep(0)
            pulled_at_each_turn.append(len(fn.data_source.pulled))
        await cancel(drain)
    steps = [b - a for a, b in itertools.pairwise(pulled_at_each_turn)]
    assert max(steps) <= module._GROUPS_A_TURN


@virtual
async def test_drain_of_a_long_queue_gives_other_tasks_their_turn(monkeypatch):
    async with fed_by_hand(monkeypatch, *(finished(i) for i in range(100)), rollout_batch_size=100) as fn:
        drain = asyncio.create_task(fn(train()))
        turns = 0
        while not drain.done():
            await asyncio.sleep(0)
            turns += 1
    assert turns >= 100 // module._GROUPS_A_TURN
