"""Bounds that hold: staleness at the training step, admission, versions as labels, the queue's capacity."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest

from miles.rollout._fully_async_admission import Admission
from miles.rollout._fully_async_buffer import DataBufferInput
from miles.rollout._fully_async_config import FullyAsyncConfig
from miles.rollout._fully_async_versions import WeightVersions, version_number
from miles.utils.misc import function_registry
from miles.utils.types import Sample
from tests.fast.fakes import FakeDataSource, GatedGeneration, answer, finished, group_indexes, prompt_group
from tests.fast.rollout.fully_async_setup import build, fed_by_hand, running, train
from tests.fast.virtual_time import settle, virtual

PREFIX = "rollout/fully_async/"


class Engines:
    """Generation that takes a second and answers with the version that the engines have then."""

    def __init__(self, version: int | str = 1, seconds: float = 1.0) -> None:
        self.version = version
        self.seconds = seconds
        self.born: list[tuple[int, int | str]] = []

    async def __call__(self, state: Any, group: list[Sample], **keywords: Any) -> list[Sample]:
        born = self.version
        self.born.append((group[0].group_index, born))
        await asyncio.sleep(self.seconds)
        return answer(group, versions=(str(born),))


# ---- at the training step


@virtual
async def test_groups_that_an_update_made_too_old_during_the_drain_are_not_handed_over(monkeypatch):
    source = FakeDataSource()
    pairs = [finished(0, versions=("1",)), finished(1, versions=("2",))]
    async with fed_by_hand(monkeypatch, *pairs, data_source=source, max_weight_staleness=1, rollout_batch_size=3) as fn:
        fn.on_weight_version(2)
        call = asyncio.create_task(fn(train()))
        await settle()
        fn.on_weight_version(3)  # both groups were judged against 2
        fn._output.put_nowait(finished(2, versions=("3",)))
        await settle()
        assert group_indexes(source.added) == [0]
        fn._output.put_nowait(finished(3, versions=("3",)))
        output = await call
    assert group_indexes(output.samples) == [1, 2, 3]
    assert output.metrics[PREFIX + "trained_max_staleness"] == 1
    assert output.metrics[PREFIX + "max_staleness"] == 2


@virtual
async def test_an_update_during_the_sample_filter_counts_too(monkeypatch):
    source = FakeDataSource()
    pairs = [finished(0, versions=("1",)), finished(1, versions=("2",)), finished(2, versions=("2",))]
    async with fed_by_hand(monkeypatch, *pairs, data_source=source, max_weight_staleness=0) as fn:
        fn.on_weight_version(1)
        seen = []

        async def slow_filter(args: Any, batch: list[Any]) -> None:
            seen.append(group_indexes(batch))
            if len(seen) == 1:
                fn.on_weight_version(2)

        fn._sample_filter = slow_filter
        output = await fn(train())
    assert seen == [[0, 1], [1, 2]]
    assert group_indexes(output.samples) == [1, 2]
    assert group_indexes(source.added) == [0]


@virtual
async def test_a_call_with_an_older_number_than_was_published_is_judged_by_the_published_one(monkeypatch):
    source = FakeDataSource()
    pairs = [finished(0, versions=("4",)), finished(1, versions=("6",))]
    async with fed_by_hand(monkeypatch, *pairs, data_source=source, max_weight_staleness=0, rollout_batch_size=1) as fn:
        fn.on_weight_version(6)
        output = await fn(train(weight_version=4))
    assert group_indexes(output.samples) == [1]


# ---- admission


@pytest.mark.parametrize("limit", [0, 1, 2])
@pytest.mark.parametrize("interval", [1, 2, 3])
@virtual
async def test_no_group_is_born_too_old_and_none_is_wasted(monkeypatch, limit, interval):
    """A trainer slower than generation: without admission most of the queue would grow stale."""
    engines, source = Engines(), FakeDataSource()
    async with running(
        monkeypatch,
        engines,
        source,
        rollout_batch_size=4,
        max_weight_staleness=limit,
        update_weights_interval=interval,
        async_max_concurrent_samples=24,
    ) as fn:
        fn.on_weight_version(1)
        for step in range(12):
            output = await fn(train(step))
            assert output.metrics[PREFIX + "trained_max_staleness"] <= limit
            await asyncio.sleep(10)
            fn.acknowledge(step)
            open_or_used = fn.ledger.in_flight + fn.ledger.queued + (step % interval + 1) * 4
            assert open_or_used <= (limit + 1) * interval * 4
            if (step + 1) % interval == 0:
                engines.version = int(engines.version) + 1
                fn.on_weight_version(engines.version)
        assert source.added == []
        assert fn.ledger.dropped == 0


@virtual
async def test_limit_zero_behaves_like_synchronous_training(monkeypatch):
    engines = Engines()
    async with running(monkeypatch, engines, rollout_batch_size=3, max_weight_staleness=0) as fn:
        fn.on_weight_version(1)
        for step in range(4):
            assert len(engines.born) == 3 * step  # nothing is generated while the trainer is busy
            await fn(train(step))
            await asyncio.sleep(50)
            fn.acknowledge(step)
            engines.version += 1
            fn.on_weight_version(engines.version)
        assert [version for _, version in engines.born[:12]] == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3


@virtual
async def test_a_new_version_alone_lets_generation_go_on(monkeypatch):
    engines = Engines()
    async with running(monkeypatch, engines, rollout_batch_size=3, max_weight_staleness=0) as fn:
        fn.on_weight_version(1)
        await fn(train(0))
        await asyncio.sleep(5)
        assert len(engines.born) == 3
        fn.on_weight_version(2)
        await settle()
        assert len(engines.born) == 6


@pytest.mark.parametrize("tell", ["publish", "call", "never"])
@pytest.mark.parametrize("acknowledge", [True, False])
@pytest.mark.parametrize("moves", [True, False])
@virtual
async def test_limit_zero_never_hangs(monkeypatch, tell, acknowledge, moves):
    """Whoever tells the version, whether it changes or not, whether batches are acknowledged or not, with filters that
    drop nearly everything and groups that are aborted."""
    engines, count = Engines(), 0

    async def generate(state: Any, group: list[Sample], **keywords: Any) -> list[Sample]:
        group = await engines(state, group, **keywords)
        if len(engines.born) % 5 == 0:
            group[0].status = Sample.Status.ABORTED
        return group

    class Version:
        async def get(self, args: Any) -> int:
            return engines.version

    def keep_every_fourth(args: Any, group: Any) -> bool:
        nonlocal count
        count += 1
        return count % 4 == 0

    async with running(
        monkeypatch, generate, rollout_batch_size=3, max_weight_staleness=0, async_max_group_retries=10**6
    ) as fn:
        fn._weight_version = Version()
        fn._dynamic_filter = keep_every_fourth
        for step in range(6):
            if tell == "publish":
                fn.on_weight_version(engines.version)
            output = await asyncio.wait_for(fn(train(step, engines.version if tell == "call" else None)), 1000)
            assert len(output.samples) == 3
            if acknowledge:
                fn.acknowledge(step)
            engines.version += moves


@pytest.mark.parametrize("new_version", [True, False], ids=["next version", "same version"])
@pytest.mark.parametrize(("interval", "steps"), [(1, 1), (1, 2), (2, 1), (2, 2), (2, 3)])
@virtual
async def test_limit_zero_is_strict_and_never_hangs_after_a_resume(monkeypatch, interval, steps, new_version):
    """Saved between two updates, too, with finished groups in the queue and others in flight."""
    engines = Engines()
    flags: dict[str, Any] = {"rollout_batch_size": 3, "max_weight_staleness": 0, "update_weights_interval": interval}

    async def go_on(fn: Any, first: int, last: int) -> None:
        for step in range(first, last):
            output = await asyncio.wait_for(fn(train(step)), 10)
            assert {version for s in output.samples for m in s for version in m.weight_versions} == {
                str(engines.version)
            }
            await asyncio.sleep(0.5)  # within it groups may start; they are saved in flight
            fn.acknowledge(step)
            if (step + 1) % interval == 0:
                engines.version += 1
                fn.on_weight_version(engines.version)

    async with running(monkeypatch, engines, **flags) as fn:
        fn.on_weight_version(1)
        await go_on(fn, 0, steps)
        await asyncio.sleep(1.2 if steps % 2 else 0)
        state = json.loads(json.dumps(fn.snapshot()))
    async with running(monkeypatch, engines, **flags) as fn:
        fn.restore(state)
        engines.version += new_version
        fn.on_weight_version(engines.version)
        await go_on(fn, steps, steps + 5)
        fn.ledger.check()


@virtual
async def test_a_batch_given_back_is_trained_again_at_limit_zero(monkeypatch):
    engines = Engines()
    async with running(monkeypatch, engines, rollout_batch_size=3, max_weight_staleness=0) as fn:
        fn.on_weight_version(1)
        first = await fn(train(0))
        fn.give_back(0)
        again = await asyncio.wait_for(fn(train(0)), 10)
        assert group_indexes(first.samples) == group_indexes(again.samples)
        assert len(engines.born) == 3
        fn.acknowledge(0)
        engines.version = 2
        fn.on_weight_version(2)
        await asyncio.wait_for(fn(train(1)), 10)


@virtual
async def test_a_batch_given_back_does_not_count_twice_against_the_window(monkeypatch):
    engines = Engines()
    async with running(
        monkeypatch, engines, rollout_batch_size=3, max_weight_staleness=0, update_weights_interval=2
    ) as fn:
        fn.on_weight_version(1)
        await fn(train(0))
        fn.give_back(0)
        for step in range(2):
            await fn(train(step))
            await asyncio.sleep(10)
            fn.acknowledge(step)
        assert len(engines.born) == 6  # two batches for version 1, and nothing that would be too old for version 2


@virtual
async def test_without_the_trainers_version_nothing_is_held_back(monkeypatch):
    engines = Engines()
    async with running(
        monkeypatch, engines, rollout_batch_size=1, max_weight_staleness=0, async_max_concurrent_samples=8
    ) as fn:

        class Version:
            async def get(self, args: Any) -> int:
                return 1

        fn._weight_version = Version()
        await fn(train())
        await asyncio.sleep(5)
        assert len(engines.born) > 8


def test_the_window_is_what_its_derivation_says():
    """Group number p counted from the publication of V is trained at V + p // (k * B): by brute force."""
    for limit in range(3):
        for interval in range(1, 4):
            for batch in range(1, 5):
                admission = Admission(limit=limit, update_interval=interval, batch_size=batch)
                for handed in range(0, interval * batch + 1, batch):
                    admission.handed = handed
                    for held in range(40):
                        trained_at = [(handed + held + more) // (interval * batch) for more in range(5)]
                        assert admission.admits(held, 5) == sum(version <= limit for version in trained_at)


def test_admission_forgets_an_update_that_did_not_come():
    admission = Admission(limit=0, update_interval=2, batch_size=3)
    admission.handed = 6
    assert admission.admits(0, 9) == 0
    admission.call_begins()
    assert admission.admits(0, 9) == 6


# ---- the bound in flight


@pytest.mark.parametrize(
    ("flags", "bound"),
    [
        ({"async_data_buffer_capacity_factor": 1.0}, 2),
        ({"async_data_buffer_capacity_factor": 1.0, "async_max_concurrent_samples": 24 * 16}, 3),
        ({"async_data_buffer_capacity_factor": 0.25, "async_max_concurrent_samples": 24 * 16}, 2),
        ({"async_data_buffer_capacity_factor": 1.0, "update_weights_interval": 2}, 1),
        ({"async_data_buffer_capacity_factor": 4.0, "max_weight_staleness": 2}, 2),
        ({}, math.ceil((16 + 1000) / 16)),
        ({"async_data_buffer_capacity_factor": 1.0, "rollout_submission_granularity": "sample"}, 18),
    ],
)
def test_bound_in_flight(monkeypatch, flags, bound):
    fn = build(monkeypatch, rollout_batch_size=16, n_samples_per_prompt=16, **flags)
    assert fn.staleness_bound_in_flight == bound


@virtual
async def test_bound_in_flight_holds_and_is_reached(monkeypatch):
    engines = Engines()
    ages = []
    async with running(
        monkeypatch, engines, rollout_batch_size=2, async_max_concurrent_samples=6, async_data_buffer_capacity_factor=1
    ) as fn:
        for step in range(10):
            fn.on_weight_version(engines.version)
            ages.append((await fn(train(step))).metrics[PREFIX + "trained_max_staleness"])
            await asyncio.sleep(10)
            engines.version += 1
        assert max(ages) == fn.staleness_bound_in_flight == 3


# ---- versions


def test_numbers_and_texts_of_digits_compare_by_value():
    versions = WeightVersions()
    versions.publish("9")
    assert versions.publish(10) and not versions.publish("10")
    assert [versions.age(label) for label in (10, "10", "9", 2, "11", "default", "", None)] == [
        0, 0, 1, 8, 0, None, None, None
    ]  # fmt: skip
    assert [version_number(label) for label in ("007", "-1", "٣", True, 1.0)] == [7, None, None, None, None]


def test_other_labels_are_ordered_by_their_publication():
    versions = WeightVersions()
    for label in ("default", "a3f", "99e"):
        versions.publish(label)
    assert [versions.age(label) for label in ("default", "a3f", "99e", "b00", "3")] == [2, 1, 0, None, None]
    versions.publish("a3f")  # rolled back
    resumed = WeightVersions()
    resumed.load_state_dict(versions.state_dict())
    for either in (versions, resumed):
        either.publish("next")
        assert [either.age(label) for label in ("a3f", "99e")] == [1, 2]


def test_versions_are_saved_and_forgotten_after_some_thousands():
    versions = WeightVersions()
    for i in range(10_000):
        versions.publish(f"v{i}")
    resumed = WeightVersions()
    resumed.load_state_dict(versions.state_dict())
    for either in (versions, resumed):
        assert [either.age(f"v{i}") for i in (9_999, 9_990, 0)] == [0, 9, None]
        either.publish("next")
        assert either.age("v9999") == 1


@virtual
async def test_labels_published_by_the_trainer_bound_staleness(monkeypatch):
    source = FakeDataSource()
    pairs = [finished(0, versions=("default",)), finished(1, versions=("a1", "b2")), finished(2, versions=("c3",))]
    async with fed_by_hand(monkeypatch, *pairs, data_source=source, max_weight_staleness=2) as fn:
        for label in ("default", "a1", "b2", "c3"):
            fn.on_weight_version(label)
        output = await fn(train())
    assert group_indexes(output.samples) == [1, 2]
    assert group_indexes(source.added) == [0]
    assert output.metrics[PREFIX + "trained_max_staleness"] == 2


@pytest.mark.parametrize(
    ("labels", "message"),
    [(("nightly",), "sample 3 of group 1 .* versions \\['nightly'\\]"), ((), "sample 3 of group 1 .* versions \\[\\]")],
)
@virtual
async def test_unknown_or_missing_versions_are_counted_and_with_the_flag_an_error(monkeypatch, labels, message):
    pair = finished(1, versions=("2",))
    pair[1][1].weight_versions = list(labels)
    flags: dict[str, Any] = {"max_weight_staleness": 1, "rollout_batch_size": 1}
    async with fed_by_hand(monkeypatch, pair, **flags) as fn:
        output = await fn(train(weight_version=2))
    assert output.metrics[PREFIX + "unknown_version_samples"] == 1
    assert output.metrics[PREFIX + "unknown_version_groups"] == 0
    async with fed_by_hand(monkeypatch, pair, strict_weight_versions=True, **flags) as fn:
        with pytest.raises(ValueError, match=message):
            await fn(train(weight_version=2))
        assert fn.queue_size == 1


# ---- the store


def long_answer(tokens: int) -> Any:
    def make(group: list[Sample]) -> list[Sample]:
        for sample in answer(group):
            sample.tokens = [1] * (2 + tokens)
            sample.response_length = tokens
        return group

    return make


@virtual
async def test_a_queue_full_of_bytes_pauses_submission(monkeypatch):
    async def generate(state: Any, group: list[Sample], **keywords: Any) -> list[Sample]:
        return long_answer(10_000)(group)

    size = 2 * (2048 + 2 * 48) + 2 * 80 * 10_000
    async with running(
        monkeypatch, generate, rollout_batch_size=2, async_data_buffer_max_bytes=3 * size + size // 2
    ) as fn:
        await fn(train(0))
        await settle(50)
        assert fn.queue_size == 3
        assert fn.ledger.in_flight == 2  # finished, and waiting for room
        output = await fn(train(1))
        await settle(50)
        assert fn.queue_size == 3
        assert output.metrics[PREFIX + "queue_bytes"] <= 3 * size


@virtual
async def test_a_batch_that_was_given_back_takes_up_its_bytes(monkeypatch):
    async def generate(state: Any, group: list[Sample], **keywords: Any) -> list[Sample]:
        return long_answer(100)(group)

    size = 2 * (2048 + 2 * 48) + 2 * 80 * 100
    async with running(monkeypatch, generate, rollout_batch_size=2, async_data_buffer_max_bytes=4 * size) as fn:
        await fn(train(0))
        await settle(50)
        assert fn.queue_size == 4
        assert fn.give_back(0) == 2
        assert fn._finished.size_bytes == 6 * size
        sizes = []
        for step in range(1, 4):
            output = await fn(train(step))
            sizes.append(output.metrics[PREFIX + "queue_bytes"])
            await settle(50)
            assert fn._finished.size_bytes == 4 * size
        assert sizes == [4 * size, 4 * size, 4 * size]


@virtual
async def test_small_groups_behind_a_cancelled_large_one_are_let_in(monkeypatch):
    async with fed_by_hand(monkeypatch, async_data_buffer_max_bytes=100) as fn:
        fn._ensure_started()
        keys = [fn.ledger.pull(prompt_group(i)) for i in range(3)]
        for key, size in zip(keys, (60, 90, 30), strict=True):
            key.size_bytes = size
        assert fn._finished.put_at_once(keys[0])
        assert not fn._finished.put_at_once(keys[1])
        large = asyncio.create_task(fn._finished.put(keys[1]))
        await settle()
        assert not fn._finished.put_at_once(keys[2]), "the large one comes first"
        small = asyncio.create_task(fn._finished.put(keys[2]))
        await settle()
        assert (fn._finished.size_bytes, fn._finished.waiting_puts) == (60, 2)
        large.cancel()
        await settle()
        assert small.done()
        assert (fn._finished.size_bytes, fn._finished.waiting_puts) == (90, 0)


@virtual
async def test_small_groups_do_not_pass_a_large_one_that_waits_for_bytes(monkeypatch):
    generate = GatedGeneration()
    small = 2 * (2048 + 2 * 48) + 2 * 80 * 10
    async with running(
        monkeypatch,
        generate,
        rollout_batch_size=1,
        async_max_concurrent_samples=12,
        async_data_buffer_max_bytes=3 * small,
    ) as fn:
        call = asyncio.create_task(fn(train(0)))
        await settle()
        for group_index in range(4):
            generate.finish(group_index, make=long_answer(10))
        await call
        generate.finish(4, make=long_answer(20))
        await settle()
        generate.finish(5, 6, make=long_answer(10))
        await settle()
        order = []
        for step in range(1, 7):
            order += group_indexes((await fn(train(step))).samples)
            await settle()
        assert order == [1, 2, 3, 4, 5, 6]


@virtual
async def test_a_group_larger_than_the_whole_queue_is_let_in_alone(monkeypatch):
    generate = GatedGeneration()
    async with running(monkeypatch, generate, async_data_buffer_max_bytes=1) as fn:
        call = asyncio.create_task(fn(train()))
        await settle()
        generate.finish(0, 1, make=long_answer(50))
        output = await asyncio.wait_for(call, 1)
        assert group_indexes(output.samples) == [0, 1]
        assert fn._finished.size_bytes == 0


@virtual
async def test_a_cancelled_put_takes_its_bytes_with_it(monkeypatch):
    async with fed_by_hand(monkeypatch, *(finished(i) for i in range(3))) as fn:
        fn._output = asyncio.Queue(maxsize=1)
        key = fn.ledger.pull(prompt_group(0))
        key.size_bytes = 10
        store = fn._finished.store
        await store.put(DataBufferInput([], [], key))
        waiting = asyncio.create_task(store.put(DataBufferInput([], [], key)))
        await settle()
        waiting.cancel()
        await asyncio.wait({waiting})
        assert store.size_bytes == 10
        await store.get()
        assert store.size_bytes == 0


class Stack:
    """A custom store: last in, first out; refuses groups without a reward, drops those with a negative one."""

    def __init__(self, input: Any) -> None:
        self.input = input
        self.items: list[Any] = []
        self.filled = asyncio.Event()
        self.versions: list[Any] = []

    async def put(self, item: Any) -> None:
        reward = item.group[0].reward
        if reward is None:
            self.input.unused_handler_fn(item.prompt_group)
        elif reward < 0:
            self.input.drop_fn(item.prompt_group)
        else:
            self.items.append(item)
            self.filled.set()
            await asyncio.sleep(0)

    async def get(self, **context: Any) -> Any:
        self.versions.append(context["current_version"])
        while not self.items:
            self.filled.clear()
            await self.filled.wait()
        prompt_group, group = self.items.pop()
        return prompt_group, group

    def get_metrics(self) -> dict[str, Any]:
        return {"rollout/stack": len(self.items)}


@virtual
async def test_a_custom_store_replaces_the_queue(monkeypatch):
    generate = GatedGeneration()
    with function_registry.temporary("stack", Stack):
        async with running(
            monkeypatch,
            generate,
            custom_async_data_buffer_path="stack",
            rollout_batch_size=1,
            async_max_concurrent_samples=8,
            async_data_buffer_capacity_factor=3,
        ) as fn:
            call = asyncio.create_task(fn(train(0, weight_version=4)))
            await settle()
            generate.finish(0, make=lambda group: answer(group, reward=None))
            generate.finish(1, make=lambda group: answer(group, reward=-1.0))
            generate.finish(2)
            generate.finish(3)
            output = await call
            await settle()
            assert fn._finished.store.input.capacity_groups == 3
            assert fn._finished.store.versions == [4]
            assert output.metrics["rollout/stack"] in (0, 1)
            assert group_indexes(fn.data_source.added) == [0]
            assert fn.ledger.dropped == 1
            assert fn.ledger.recycled_by[next(r for r in fn.ledger.recycled_by if r.value == "unused")] == 1
            assert group_indexes((await fn(train(1))).samples + output.samples) in ([2, 3], [3, 2])
            assert fn.ledger.in_flight == 4 and fn.ledger.queued == 0


class Hesitant(Stack):
    """Thinks about group 0, its last one, for a second before it refuses it, once."""

    refuse = "unused_handler_fn"
    refused = 0

    async def get(self, **context: Any) -> Any:
        while True:
            prompt_group, group = await super().get(**context)
            if self.refused or prompt_group[0].group_index != 0:
                return prompt_group, group
            self.refused += 1
            await asyncio.sleep(1)
            getattr(self.input, self.refuse)(prompt_group)


@pytest.mark.parametrize(("refuse", "batch"), [("unused_handler_fn", [0, 1]), ("drop_fn", [1])])
@virtual
async def test_a_group_that_a_store_refuses_after_all_others_are_done_is_noticed(monkeypatch, refuse, batch):
    """The worker sleeps, because the data has ended, and the call waits in the store: who tells them?"""

    class TwoGroups(FakeDataSource):
        def get_samples(self, num_samples: int) -> list[list[Sample]]:
            return super().get_samples(num_samples) if self.buffer or self._next_index < 2 else []

    monkeypatch.setattr(Hesitant, "refuse", refuse)
    with function_registry.temporary("hesitant", Hesitant):
        async with running(
            monkeypatch, data_source=TwoGroups(), rollout_batch_size=2, custom_async_data_buffer_path="hesitant"
        ) as fn:
            output = await asyncio.wait_for(fn(train()), 10)
            assert group_indexes(output.samples) == batch
            assert fn._finished.store.refused == 1
            assert asyncio.get_running_loop().time() < 3


# ---- flags


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ({"async_data_buffer_max_bytes": 0}, "--async-data-buffer-max-bytes must be at least 1, got 0"),
        ({"async_max_group_retries": -1}, "--async-max-group-retries must be at least 0, got -1"),
        ({"async_unused_samples_handler": "keep"}, "--async-unused-samples-handler must be one of retry, drop"),
        ({"rollout_submission_granularity": "token"}, "--rollout-submission-granularity must be one of sample, group"),
        ({"no_progress_timeout": 0.0}, "--no-progress-timeout must be above 0, got 0.0"),
        ({"max_empty_batches": 0}, "--max-empty-batches must be at least 1, got 0"),
        ({"update_weights_interval": 0}, "--update-weights-interval must be at least 1, got 0"),
    ],
)
def test_bad_flags_are_named(monkeypatch, flag, message):
    with pytest.raises(ValueError, match=message):
        build(monkeypatch, **flag)


def test_a_bare_namespace_means_groups_and_retries(monkeypatch):
    config = build(monkeypatch).config
    assert config == FullyAsyncConfig(rollout_batch_size=2, n_samples_per_prompt=2)
    assert (config.rollout_submission_granularity, config.async_unused_samples_handler) == ("group", "retry")
    assert prompt_group(0)
