"""Nothing gets stuck: time-outs, budgets, the end of the data, and places in generation counted in samples."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

import pytest

import miles.rollout.fully_async_rollout as module
from miles.rollout._fully_async_errors import NoProgress, NothingGetsThrough
from miles.rollout._fully_async_ledger import LedgerError
from miles.rollout.data_source import RolloutDataSourceWithBuffer
from miles.utils.types import Sample
from tests.fast.fakes import (
    FakeDataSource,
    GatedGeneration,
    answer,
    finished,
    generate_at_once,
    group_indexes,
    prompt_group,
)
from tests.fast.rollout.fully_async_setup import fed_by_hand, running, train
from tests.fast.virtual_time import settle, virtual

ABORTED = Sample.Status.ABORTED


class Finite(FakeDataSource):
    """Ends after `groups` groups; recycled ones come again."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        if not self.buffer and self._next_index >= self.groups:
            return []
        return super().get_samples(num_samples)


# ---- no progress


async def _stuck(monkeypatch: pytest.MonkeyPatch, workers: Any) -> list[str]:
    """The lines of the error where the router answers `workers`."""

    async def router(url: str) -> Any:
        assert url.endswith("/workers")
        if workers is None:
            await asyncio.Event().wait()
        return workers

    monkeypatch.setattr(module, "get", router)
    async with running(monkeypatch, GatedGeneration(), rollout_batch_size=2, no_progress_timeout=100) as fn:
        with pytest.raises(NoProgress) as raised:
            await fn(train())
    return str(raised.value).splitlines()


@virtual
async def test_no_progress_names_the_engines(monkeypatch):
    first, second = {"url": "http://engine-1"}, {"url": "http://engine-2"}
    lines = await _stuck(monkeypatch, {"workers": [first]})
    assert len(lines) == 3 and all(line.endswith("engine http://engine-1") for line in lines[1:])
    lines = await _stuck(monkeypatch, {"workers": [first, second]})
    assert all(line.endswith("engine one of 2") for line in lines[1:-1])
    assert lines[-1] == "engines behind the router: http://engine-1, http://engine-2"
    for no_answer in (None, {"error": "overloaded"}):
        assert all(line.endswith("engine not known") for line in (await _stuck(monkeypatch, no_answer))[1:])


@virtual
async def test_no_progress_stops_the_call_and_lists_the_stuck_groups(monkeypatch):
    generate = GatedGeneration()

    async def no_router(url: str) -> Any:
        return {"workers": []}

    monkeypatch.setattr(module, "get", no_router)
    async with running(monkeypatch, generate, rollout_batch_size=2, no_progress_timeout=100) as fn:
        call = asyncio.create_task(fn(train()))
        await asyncio.sleep(60)
        generate.finish(1)
        await asyncio.sleep(1)
        fn.data_source.pulled[0][0].engine = "http://engine-3"
        began = asyncio.get_running_loop().time()
        with pytest.raises(NoProgress) as raised:
            await call
        assert 98 <= asyncio.get_running_loop().time() - began <= 100
        lines = str(raised.value).splitlines()
        assert lines[0] == "no finished group for 100 s, the limit of --no-progress-timeout; in flight:"
        assert lines[1].startswith("  group 0 (samples 0..1): 160 s old, in generation, samples 2 pending")
        assert lines[1].endswith("2 of 2 places held, engine http://engine-3")
        assert lines[2].startswith("  group 2 (samples 4..5): 100 s old")
        assert fn.queue_size == 1


@virtual
async def test_no_progress_is_not_counted_while_submission_is_paused(monkeypatch):
    async with running(monkeypatch, rollout_batch_size=2, no_progress_timeout=100) as fn:
        async with fn.submission_paused():
            call = asyncio.create_task(fn(train()))
            await asyncio.sleep(1000)
            assert not call.done()
        assert len((await call).samples) == 2


@virtual
async def test_groups_that_come_in_slowly_are_progress(monkeypatch):
    async def slow(state: Any, group: list[Sample], **keywords: Any) -> list[Sample]:
        await asyncio.sleep(90)
        return answer(group)

    async with running(
        monkeypatch, slow, rollout_batch_size=4, async_max_concurrent_samples=2, no_progress_timeout=100
    ) as fn:
        assert len((await fn(train())).samples) == 4


# ---- nothing gets through


@virtual
async def test_a_budget_for_zero_output_stops_the_run_with_the_reasons(monkeypatch):
    async def generate(state: Any, group: list[Sample], **keywords: Any) -> list[Sample]:
        return answer(group, status=ABORTED if group[0].group_index % 3 == 0 else Sample.Status.COMPLETED)

    def drop(args: Any, group: list[Sample]) -> module.Any:
        return False

    async with running(
        monkeypatch, generate, rollout_batch_size=4, max_empty_batches=3, async_max_group_retries=0
    ) as fn:
        fn._dynamic_filter = drop
        with pytest.raises(NothingGetsThrough) as raised:
            await fn(train())
        assert str(raised.value) == (
            "12 finished groups in a row were turned down and none was kept, the limit of --max-empty-batches 3: "
            "8 filtered, 4 aborted"
        )


@virtual
async def test_one_kept_group_renews_the_budget(monkeypatch):
    count = 0

    def keep_every_seventh(args: Any, group: list[Sample]) -> bool:
        nonlocal count
        count += 1
        return count % 7 == 0

    async with running(monkeypatch, rollout_batch_size=4, max_empty_batches=2) as fn:
        fn._dynamic_filter = keep_every_seventh
        assert len((await fn(train())).samples) == 4


@virtual
async def test_groups_that_finish_and_are_never_kept_are_a_warning_with_the_reasons(monkeypatch, caplog):
    async def one_second(state: Any, group: list[Sample], **_: Any) -> list[Sample]:
        await asyncio.sleep(1)
        return await generate_at_once(state, group)

    async with running(monkeypatch, one_second, rollout_batch_size=2) as fn:
        fn._dynamic_filter = lambda args, group, **_: False
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(65.5):
                await fn(train())
    warnings = [record.getMessage() for record in caplog.records if "no usable group" in record.getMessage()]
    # The first two of two a second are turned down after 1 s, the clock runs from there.
    assert warnings == [
        "no usable group for 30 s: all 61 finished ones were turned down (61 filtered)",
        "no usable group for 60 s: all 121 finished ones were turned down (121 filtered)",
    ]


# ---- the end of the data


@virtual
async def test_what_is_left_at_the_end_of_the_data_is_the_last_batch(monkeypatch):
    async with running(monkeypatch, data_source=Finite(7), rollout_batch_size=3) as fn:
        sizes = [len((await fn(train(step))).samples) for step in range(3)]
        assert sizes == [3, 3, 1]
        for _ in range(2):
            with pytest.raises(module.EndOfData, match=r"Finite.get_samples\(1\) returned 0 groups"):
                await fn(train(3))
        assert fn.ledger.trained == 7
        assert fn.ledger.pulled == 7


@virtual
async def test_the_metrics_say_that_the_data_has_ended(monkeypatch):
    async with running(monkeypatch, data_source=Finite(8), rollout_batch_size=2) as fn:
        metrics = [(await fn(train(step))).metrics for step in range(2)]
        await settle()
        metrics += [(await fn(train(step))).metrics for step in range(2, 4)]
    assert [step["rollout/fully_async/data_ended"] for step in metrics] == [0, 0, 1, 1]


@pytest.mark.parametrize("batches", [0, 2])
@virtual
async def test_end_of_data_at_a_batch_boundary(monkeypatch, batches):
    async with running(monkeypatch, data_source=Finite(3 * batches), rollout_batch_size=3) as fn:
        for step in range(batches):
            assert len((await fn(train(step))).samples) == 3
        with pytest.raises(module.EndOfData):
            await fn(train())


@virtual
async def test_the_data_has_not_ended_while_groups_are_in_flight_or_recycled(monkeypatch):
    generate = GatedGeneration()
    async with running(monkeypatch, generate, Finite(2), rollout_batch_size=2) as fn:
        call = asyncio.create_task(fn(train()))
        await asyncio.sleep(10)
        generate.finish(0)
        await asyncio.sleep(10)
        generate.finish(1, make=lambda group: answer(group, status=ABORTED))
        await asyncio.sleep(10)
        assert not call.done()
        assert generate.running == [1]
        generate.finish(1)
        assert group_indexes((await call).samples) == [0, 1]


@virtual
async def test_a_last_group_that_is_dropped_ends_the_data_for_a_call_that_waits(monkeypatch):
    generate = GatedGeneration()
    async with running(monkeypatch, generate, Finite(2), rollout_batch_size=2) as fn:
        fn._dynamic_filter = lambda args, group: group[0].group_index == 0
        call = asyncio.create_task(fn(train()))
        await settle()
        generate.finish(0)
        await settle()
        generate.finish(1)
        assert group_indexes((await call).samples) == [0]


@virtual
async def test_a_given_back_last_batch_comes_again(monkeypatch):
    async with running(monkeypatch, data_source=Finite(3), rollout_batch_size=2) as fn:
        await fn(train(0))
        fn.acknowledge(0)
        await fn(train(1))
        fn.give_back(1)
        assert group_indexes((await fn(train(1))).samples) == [2]
        fn.acknowledge(1)
        with pytest.raises(module.EndOfData):
            await fn(train(2))


@virtual
async def test_a_source_that_has_something_again_is_asked_again(monkeypatch):
    source = Finite(2)
    async with running(monkeypatch, data_source=source, rollout_batch_size=2) as fn:
        await fn(train(0))
        with pytest.raises(module.EndOfData):
            await fn(train(1))
        source.groups = 4
        assert group_indexes((await fn(train(1))).samples) == [2, 3]


@virtual
async def test_an_epoch_with_fewer_prompts_than_a_batch(monkeypatch):
    class OnePrompt(FakeDataSource):
        """Numbers each pull of its one prompt anew, as the built-in data source does epoch after epoch."""

    async with running(monkeypatch, data_source=OnePrompt(), rollout_batch_size=8) as fn:
        assert len((await fn(train())).samples) == 8


# ---- places in generation, counted in samples


class Tails:
    """Samples of a group finish one per second, in the order of their places; the last one waits for the test."""

    def __init__(self, tail: float) -> None:
        self.tail = tail
        self.holding = 0
        self.peak = 0
        self.callbacks: list[Any] = []

    async def __call__(self, state: Any, group: list[Sample], sample_done_callback: Any = None, **kw: Any) -> Any:
        self.holding += len(group)
        self.peak = max(self.peak, self.holding)
        self.callbacks.append(sample_done_callback)
        for i in range(len(group)):
            await asyncio.sleep(self.tail if i == len(group) - 1 else 1)
            self.holding -= 1
            if sample_done_callback is not None:
                sample_done_callback()
        return answer(group)


@virtual
async def test_a_finished_sample_frees_its_place_at_once(monkeypatch):
    tails = Tails(tail=1000)
    async with running(
        monkeypatch,
        tails,
        rollout_batch_size=2,
        n_samples_per_prompt=4,
        async_max_concurrent_samples=10,
        rollout_submission_granularity="sample",
    ) as fn:
        call = asyncio.create_task(fn(train()))
        await asyncio.sleep(0.5)
        assert (fn.ledger.in_flight, fn._slots.used) == (2, 8)
        await asyncio.sleep(1)  # one of each has finished: 6 are left, and a third group fits exactly
        assert (fn.ledger.in_flight, fn._slots.used) == (3, 10)
        await asyncio.sleep(20)  # only tails are left, one of each group
        assert fn._slots.used <= fn.max_in_flight_samples == 10
        assert fn.ledger.in_flight == 7 <= fn.config.most_groups_in_flight == 9
        await call
        assert tails.peak <= 10


@virtual
async def test_by_group_a_place_is_held_until_the_whole_group_has_finished(monkeypatch):
    tails = Tails(tail=1000)
    async with running(
        monkeypatch, tails, rollout_batch_size=2, n_samples_per_prompt=4, async_max_concurrent_samples=10
    ) as fn:
        call = asyncio.create_task(fn(train()))
        await asyncio.sleep(500)
        assert (fn.ledger.in_flight, fn._slots.used) == (2, 8)
        assert tails.callbacks == [None, None]
        await call


@virtual
async def test_a_place_is_never_freed_twice(monkeypatch):
    async def generate(state: Any, group: list[Sample], sample_done_callback: Any, **kw: Any) -> Any:
        for _ in range(5):
            sample_done_callback()
        await asyncio.sleep(1)
        return answer(group)

    async with running(monkeypatch, generate, rollout_batch_size=4, rollout_submission_granularity="sample") as fn:
        for step in range(3):
            await fn(train(step))
            assert 0 <= fn._slots.used <= fn.max_in_flight_samples
            assert fn.ledger.in_flight <= fn.config.most_groups_in_flight


@virtual
async def test_a_full_queue_pauses_submission_by_sample_too(monkeypatch):
    async def generate(state: Any, group: list[Sample], sample_done_callback: Any, **kw: Any) -> Any:
        for _ in group:
            sample_done_callback()
        return answer(group)

    async with running(
        monkeypatch,
        generate,
        rollout_batch_size=2,
        async_data_buffer_capacity_factor=1.5,
        rollout_submission_granularity="sample",
    ) as fn:
        await fn(train())
        await settle(200)
        assert fn.queue_size == 3
        assert fn.ledger.in_flight <= fn.config.most_groups_in_flight


# ---- failures keep the books


@virtual
async def test_a_failed_generation_stays_in_the_books_and_frees_its_places(monkeypatch):
    generate = GatedGeneration()
    async with running(monkeypatch, generate) as fn:
        call = asyncio.create_task(fn(train()))
        await settle()
        generate.fail(0, KeyError("reward"))
        with pytest.raises(KeyError):
            await call
        fn.ledger.check()
        assert fn.ledger.counts()["in_flight"] == 2
        assert fn._slots.used <= 2


@virtual
async def test_a_ledger_error_in_a_task_ends_the_run(monkeypatch):
    async with running(monkeypatch) as fn:
        fn.ledger.pulled += 1
        with pytest.raises(LedgerError, match="do not balance"):
            await fn(train())


@virtual
async def test_a_task_that_is_cancelled_before_its_first_step_is_noticed(monkeypatch):
    generate = GatedGeneration()
    async with running(monkeypatch, generate) as fn:
        call = asyncio.create_task(fn(train()))
        while not (new := [t for t in asyncio.all_tasks() if t.get_name() == "fully-async group"]):  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert generate.started == []
        new[0].cancel()
        with pytest.raises(RuntimeError, match="ended cancelled, though the rollout did not cancel it"):
            await call
        assert len(generate.started) == 1


@virtual
async def test_failure_while_submission_is_paused_is_raised_at_once(monkeypatch):
    generate = GatedGeneration()
    async with running(monkeypatch, generate) as fn:
        call = asyncio.create_task(fn(train()))
        await settle()
        async with fn.submission_paused():
            generate.fail(0, ValueError("bad"))
            with pytest.raises(ValueError, match="bad"):
                await asyncio.wait_for(call, 1)
            assert fn._worker.done()


@virtual
async def test_close_at_the_end_of_the_run_with_everything_open(monkeypatch):
    async with fed_by_hand(monkeypatch, *(finished(i) for i in range(5))) as fn:
        await fn(train(0))
        await fn.close()
        fn.ledger.check()
        assert fn.acknowledge(0) == 2
    assert prompt_group(0)


# ---- retried and fresh groups, through the real data source


class Numbered(RolloutDataSourceWithBuffer):
    """The real one, without a prompt file. Notes what it hands out."""

    def __init__(self, n_samples_per_prompt: int = 2) -> None:
        super().__init__(Namespace(n_samples_per_prompt=n_samples_per_prompt, rollout_global_dataset=False))


async def always_aborted(state: Any, group: list[Sample], **_: Any) -> list[Sample]:
    await asyncio.sleep(1)
    return answer(group, status=ABORTED if group[0].group_index < 8 else Sample.Status.COMPLETED)


@virtual
async def test_groups_that_fail_for_ever_do_not_keep_fresh_ones_waiting(monkeypatch):
    async with running(
        monkeypatch, always_aborted, Numbered(), rollout_batch_size=4, async_max_group_retries=1_000_000
    ) as fn:
        for step in range(5):
            async with asyncio.timeout(60):
                output = await fn(train(step))
            assert group_indexes(output.samples) == list(range(8 + 4 * step, 12 + 4 * step))
        assert asyncio.get_running_loop().time() < 15  # every other place is a fresh group's
        assert fn.ledger.recycled > 15


class EndsEarly(Numbered):
    """Replaces where the data ends, and nothing else."""

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        return super().get_samples(num_samples if self.buffer or self.sample_group_index < 10 else 0)


@virtual
async def test_a_source_that_replaces_only_get_samples_is_asked_for_nothing_else(monkeypatch):
    async with running(monkeypatch, always_aborted, EndsEarly(), rollout_batch_size=4, async_max_group_retries=3) as fn:
        assert group_indexes((await fn(train())).samples) == [8, 9]
        with pytest.raises(module.EndOfData):
            await fn(train(1))


@pytest.mark.parametrize("returned", [None, (1,)])
@virtual
async def test_a_data_source_that_returns_no_list_is_named(monkeypatch, returned):
    source = FakeDataSource()
    source.get_samples = lambda n: returned  # type: ignore[method-assign]
    async with running(monkeypatch, data_source=source) as fn:
        with pytest.raises(TypeError, match=r"FakeDataSource.get_samples\(1\) returned .*expected a list"):
            await fn(train())
