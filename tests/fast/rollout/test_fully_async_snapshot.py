"""Saving and going on: what is pulled and not trained is neither lost nor trained twice."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from miles.rollout._fully_async_ledger import RecycleReason
from miles.rollout._fully_async_prompts import retries_of
from miles.rollout.sample_codec import SampleCodecError
from miles.utils.misc import function_registry
from miles.utils.types import Sample
from tests.fast.fakes import FakeDataSource, GatedGeneration, answer, finished, group_indexes, prompt_group
from tests.fast.rollout.fully_async_setup import build, fed_by_hand, running, train
from tests.fast.virtual_time import settle, virtual

ABORTED = Sample.Status.ABORTED
PREFIX = "rollout/fully_async/"


class SavedSource(FakeDataSource):
    """With a state, as the built-in data source has it."""

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next_index, "buffer": group_indexes(self.buffer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next_index = state["next"]
        self.buffer = [prompt_group(index) for index in state["buffer"]]


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(state))


@virtual
async def test_everything_pulled_and_not_trained_is_in_the_snapshot_once(monkeypatch):
    generate = GatedGeneration()
    async with running(
        monkeypatch, generate, SavedSource(), rollout_batch_size=2, async_max_concurrent_samples=8
    ) as fn:
        call = asyncio.create_task(fn(train(0)))
        await settle()
        generate.finish(0, 1)
        await call
        fn.acknowledge(0)  # 0 and 1 are trained
        call = asyncio.create_task(fn(train(1)))
        await settle()
        generate.finish(2, 3)
        await call  # 2 and 3 are with the trainer
        call = asyncio.create_task(fn(train(2)))
        await settle()
        generate.finish(4, make=lambda group: answer(group, status=ABORTED))  # recycled, and issued again
        generate.finish(5)  # drained by the call that waits
        await settle(40)
        before = fn.ledger.counts()
        state = through_json(fn.snapshot())
        assert fn.ledger.counts() == before
        call.cancel()
        await asyncio.wait({call})

    assert [group["group"][0]["group_index"] for group in state["finished"]] == [2, 3, 5]
    in_flight = [group[0]["group_index"] for group in state["prompts"]]
    assert sorted(in_flight + state["data_source"]["buffer"]) == [4, 6, 7, 8, 9]
    assert state["ledger"]["pulled"] == state["data_source"]["next"] + (4 in in_flight)
    assert all("response" not in sample or sample["response"] == "" for g in state["prompts"] for sample in g)


@virtual
async def test_a_restored_run_uses_finished_groups_and_issues_the_others_first(monkeypatch):
    generate = GatedGeneration()
    async with running(monkeypatch, generate, SavedSource(), rollout_batch_size=2) as fn:
        fn.on_weight_version(7)
        call = asyncio.create_task(fn(train(0)))
        await settle()
        generate.finish(0, 1, make=lambda group: answer(group, versions=("7",)))
        await call
        await settle()
        state = through_json(fn.snapshot())

    generate, source = GatedGeneration(), SavedSource()
    async with running(monkeypatch, generate, source, rollout_batch_size=2) as fn:
        fn.restore(state)
        again = through_json(fn.snapshot())  # saved again before anything has happened
        assert [again[part] for part in ("finished", "prompts", "versions", "data_source")] == [
            state[part] for part in ("finished", "prompts", "versions", "data_source")
        ]
        assert fn.ledger.counts() == {
            "pulled": 4, "in_flight": 0, "queued": 2, "drained": 0, "trained": 0, "recycled": 2, "dropped": 0
        }  # fmt: skip
        fn.on_weight_version(7)
        output = await fn(train(1))
        assert group_indexes(output.samples) == [0, 1]
        assert output.samples[0][0].response == "yes"
        assert output.metrics[PREFIX + "trained_max_staleness"] == 0
        fn.acknowledge(1)
        call = asyncio.create_task(fn(train(2)))
        await settle()
        assert generate.started == [2, 3]
        assert source.pulled == []
        generate.finish(2, 3)
        await call
        assert fn.acknowledge(2) == 2
        await settle()
        assert generate.started == [2, 3, 4, 5]
        assert group_indexes(source.pulled) == [4, 5]
        assert fn.ledger.pulled == 8


@virtual
async def test_restored_groups_count_against_the_queues_capacity(monkeypatch):
    flags: dict[str, Any] = {"rollout_batch_size": 2, "async_data_buffer_capacity_factor": 2}
    async with running(monkeypatch, data_source=SavedSource(), **flags) as fn:
        await fn(train(0))
        await settle(50)
        state = through_json(fn.snapshot())
    async with running(monkeypatch, data_source=SavedSource(), **flags) as fn:
        fn.restore(state)
        assert fn.queue_size == 6  # the trainer had two of them
        sizes = []
        for step in range(1, 5):
            await fn(train(step))
            fn.acknowledge(step)
            await settle(50)
            sizes.append(fn.queue_size)
        assert sizes == [4, 4, 4, 4]


@virtual
async def test_restored_groups_that_are_too_old_are_generated_again(monkeypatch):
    async with fed_by_hand(
        monkeypatch, finished(0, versions=("3",)), finished(1, versions=("5",)), data_source=SavedSource()
    ) as fn:
        fn.on_weight_version(5)
        await fn(train())
        state = through_json(fn.snapshot())

    source = SavedSource()
    async with running(monkeypatch, data_source=source, rollout_batch_size=1, max_weight_staleness=1) as fn:
        fn.restore(state)
        fn.on_weight_version(6)
        output = await fn(train())
        assert group_indexes(output.samples) == [1]
        assert group_indexes(source.added) == [0]
        assert source.added[0][0].response == ""


@virtual
async def test_versions_go_on_from_where_they_were(monkeypatch):
    async with fed_by_hand(monkeypatch, finished(0, versions=("default",)), rollout_batch_size=1) as fn:
        for label in ("default", "a", "b"):
            fn.on_weight_version(label)
        await fn(train())
        state = through_json(fn.snapshot())
    async with running(monkeypatch, rollout_batch_size=1, max_weight_staleness=2) as fn:
        fn.restore(state)
        fn.on_weight_version("b")
        assert (await fn(train())).metrics[PREFIX + "trained_max_staleness"] == 2


@virtual
async def test_retries_are_saved(monkeypatch):
    source = SavedSource()
    generate = GatedGeneration()
    async with running(monkeypatch, generate, source, rollout_batch_size=1) as fn:
        call = asyncio.create_task(fn(train()))
        for _ in range(3):
            await settle()
            for index in list(generate.running):
                generate.finish(index, make=lambda group: answer(group, status=ABORTED))
        await settle()
        again = [key.prompt_group for key in fn.ledger.open.values()]
        state = through_json(fn.snapshot())
        call.cancel()
        await asyncio.wait({call})
    fn = build(monkeypatch, data_source=SavedSource())
    fn.restore(state)
    assert [retries_of(group) for group in fn._prompts.waiting] == [retries_of(group) for group in again] != [0]


@virtual
async def test_nested_groups_survive(monkeypatch):
    flat = prompt_group(0)
    pair = (flat, [[answer([Sample(index=0)])[0], answer([Sample(index=0)])[0]], answer([flat[1]])[0]])
    async with fed_by_hand(monkeypatch, pair, rollout_batch_size=1) as fn:
        await fn(train())
        state = through_json(fn.snapshot())
    async with running(monkeypatch, rollout_batch_size=1) as fn:
        fn.restore(state)
        [group] = (await fn(train())).samples
        assert [len(group[0]), group[1].index] == [2, 1]


@virtual
async def test_a_source_without_a_state_has_none_in_the_snapshot(monkeypatch):
    async with running(monkeypatch) as fn:
        await fn(train())
        assert fn.snapshot()["data_source"] is None
        state = fn.snapshot()
    fn = build(monkeypatch)
    fn.restore(state)
    again = build(monkeypatch)
    again.restore(fn.snapshot())
    assert len(again._prompts.waiting) == len(state["prompts"])
    assert again.ledger.counts() == fn.ledger.counts()


@virtual
async def test_restore_is_refused_after_the_first_call_and_for_what_it_does_not_understand(monkeypatch):
    async with running(monkeypatch) as fn:
        state = fn.snapshot()
        with pytest.raises(ValueError, match="format 'x', expected 1"):
            fn.restore({**state, "format": "x"})
        await fn(train())
        with pytest.raises(RuntimeError, match="before the first call"):
            fn.restore(state)


@virtual
async def test_finished_samples_may_wait_for_a_retried_one_as_long_as_they_are_fresh(monkeypatch):
    from miles.rollout import fully_async_rollout as module
    from tests.fast.fakes import FakeGenerateState

    class State(FakeGenerateState):
        def still_usable(self, samples: Any) -> bool:
            raise AssertionError("the rollout function has its own")

    fn = build(monkeypatch, max_weight_staleness=1)
    monkeypatch.setattr(module, "GenerateState", State)
    from miles.rollout.base_types import RolloutFnConstructorInput

    fn = module.FullyAsyncRolloutFn(RolloutFnConstructorInput(fn.args, fn.data_source))
    samples = answer(prompt_group(0), versions=("4",))
    assert fn.state.still_usable(samples)
    fn.on_weight_version(5)
    assert fn.state.still_usable(samples)
    fn.on_weight_version(6)
    assert not fn.state.still_usable(samples)


# ---- what cannot be saved


class Handle:
    """Something that no file can hold."""


@virtual
async def test_a_finished_group_that_cannot_be_saved_is_generated_again_by_the_resumed_run(monkeypatch, caplog):
    generate = GatedGeneration()
    async with running(
        monkeypatch, generate, SavedSource(), rollout_batch_size=2, async_max_concurrent_samples=10
    ) as fn:
        call = asyncio.create_task(fn(train(0)))
        await settle()
        generate.finish(0, 1, 2)
        await call  # 0 and 1 are with the trainer, 2 is queued, the others are in flight
        await settle()
        fn.ledger.open[1].group[1].metadata["env"] = Handle()
        fn.ledger.open[2].group[0].handle = Handle()
        fn.ledger.open[3].prompt_group[0].metadata["env"] = Handle()
        state = through_json(fn.snapshot())

    assert [group["group"][0]["group_index"] for group in state["finished"]] == [0]
    assert sorted(group[0]["group_index"] for group in state["prompts"])[:3] == [1, 2, 3]
    [first, second] = [record.getMessage() for record in caplog.records if "saved" in record.getMessage()]
    assert first.startswith("2 finished groups are saved as prompts, to be generated again")
    assert "sample 3: metadata.env is a " in first and "Handle, which is not saved" in first
    assert second.startswith("3 values that were put on samples are not saved with their prompts")

    generate = GatedGeneration()
    async with running(monkeypatch, generate, SavedSource(), rollout_batch_size=2) as fn:
        fn.restore(state)
        assert (fn.ledger.queued, fn.ledger.recycled) == (1, len(state["prompts"]))
        call = asyncio.create_task(fn(train(1)))
        await settle()
        assert generate.started == [1, 2]
        fn.ledger.check()
        call.cancel()
        await asyncio.wait({call})


@pytest.mark.parametrize("status", [ABORTED, Sample.Status.FAILED])
@virtual
async def test_a_finished_group_without_all_its_answers_is_saved_as_its_prompt(monkeypatch, status):
    generate = GatedGeneration()
    async with running(
        monkeypatch, generate, SavedSource(), rollout_batch_size=1, async_max_concurrent_samples=6
    ) as fn:
        call = asyncio.create_task(fn(train(0)))
        await settle()
        generate.finish(0)
        await call
        generate.finish(1, make=lambda group: answer(group, status=status))
        generate.finish(2)
        await settle()
        assert fn.queue_size == 2 and fn.ledger.in_flight == 3
        state = through_json(fn.snapshot())
        assert fn.ledger.queued == 2, "a snapshot changes nothing"

    assert [group["group"][0]["group_index"] for group in state["finished"]] == [0, 2]
    assert [group[0]["group_index"] for group in state["prompts"]] == [1, 3, 4, 5]
    assert state["prompts"][0][0].get("response", "") == ""
    assert [state["ledger"][owner] for owner in ("pulled", "in_flight", "queued", "drained")] == [6, 4, 1, 1]

    generate = GatedGeneration()
    async with running(monkeypatch, generate, SavedSource(), rollout_batch_size=3, max_empty_batches=1) as fn:
        fn.restore(state)
        assert (fn.ledger.queued, fn.ledger.recycled) == (2, 4)
        call = asyncio.create_task(fn(train(1)))
        await settle()
        assert generate.started == [1, 3, 4]
        generate.finish(1)
        assert group_indexes((await call).samples) == [0, 1, 2]
        fn.ledger.check()


@virtual
async def test_what_is_restored_and_turned_down_does_not_use_up_the_budget(monkeypatch):
    """Else each process that starts from there would end at once."""
    flags: dict[str, Any] = {"rollout_batch_size": 2, "max_weight_staleness": 1, "max_empty_batches": 1}
    pairs = [finished(i, versions=("3",)) for i in range(3)]
    async with fed_by_hand(monkeypatch, *pairs, data_source=SavedSource(), rollout_batch_size=3) as fn:
        fn.on_weight_version(3)
        await fn(train())
        state = through_json(fn.snapshot())

    async with running(monkeypatch, data_source=SavedSource(), **flags) as fn:
        fn.restore(state)
        fn.on_weight_version(9)
        assert len((await fn(train(1))).samples) == 2
        assert fn.ledger.recycled_by[RecycleReason.STALE] == 3


class Queue:
    """A store of one's own: first in, first out, of any size."""

    def __init__(self, input: Any) -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue()

    async def put(self, item: Any) -> None:
        await self.queue.put(item)

    async def get(self, **context: Any) -> Any:
        return await self.queue.get()

    def get_metrics(self) -> dict[str, Any]:
        return {}


@virtual
async def test_restored_groups_beside_a_custom_store_count_in_its_capacity(monkeypatch):
    flags: dict[str, Any] = {"rollout_batch_size": 2, "async_data_buffer_capacity_factor": 2}
    async with running(monkeypatch, data_source=SavedSource(), **flags) as fn:
        await fn(train(0))
        await settle(50)
        state = through_json(fn.snapshot())
    with function_registry.temporary("queue", Queue):
        async with running(
            monkeypatch, data_source=SavedSource(), custom_async_data_buffer_path="queue", **flags
        ) as fn:
            fn.restore(state)
            sizes = [fn.queue_size]
            for step in range(1, 3):
                await fn(train(step))
                fn.acknowledge(step)
                await settle(50)
                sizes.append(fn.queue_size)
            assert sizes == [6, 4, 4]
            fn._finished.put_back([])
            await fn(train(3))  # nothing is left of what was restored: the store decides for itself
            await settle(50)
            assert not fn._finished.returned and not fn._finished._line


@pytest.mark.parametrize("place", ["metadata", "attribute", "label"])
@virtual
async def test_a_prompt_that_its_source_made_so_cannot_be_saved_at_all(monkeypatch, place):
    class Source(SavedSource):
        def get_samples(self, num_samples: int) -> list[list[Sample]]:
            groups = super().get_samples(num_samples)
            for sample in (sample for group in groups for sample in group):
                if place == "metadata":
                    sample.metadata["env"] = Handle()
                else:
                    setattr(sample, "env" if place == "attribute" else "label", Handle())
            return groups

    async with running(monkeypatch, data_source=Source(), rollout_batch_size=1) as fn:
        await fn(train())
        with pytest.raises(SampleCodecError, match=r"sample \d+: (metadata\.env|env|label) is a .*Handle"):
            fn.snapshot()


# ---- one moment, encoded later


@virtual
async def test_nothing_that_happens_after_its_moment_gets_into_a_snapshot(monkeypatch):
    generate = GatedGeneration()
    async with running(
        monkeypatch, generate, SavedSource(), rollout_batch_size=2, async_max_concurrent_samples=8
    ) as fn:
        call = asyncio.create_task(fn(train(0)))
        await settle()
        generate.finish(0, 1)
        await call
        await settle()
        moment = fn.take_moment()
        at_once = through_json(moment.encode())
        fn.give_back(0)
        fn._dynamic_filter = lambda args, group: group[0].group_index != 1
        generate.finish(2, make=lambda group: answer(group, status=ABORTED))
        generate.finish(3)
        call = asyncio.create_task(fn(train(0)))
        await settle(40)
        assert group_indexes((await call).samples) == [0, 3]
        assert fn.ledger.dropped == 1
        for sample in fn.ledger.open[0].group:  # as one that starts over
            sample.reset_for_retry()
        assert through_json(moment.encode()) == at_once


def test_a_moment_of_a_thousand_long_groups_costs_the_loop_little(monkeypatch):
    """1,000 queued groups of 8 samples of 1,024 tokens."""
    fn = build(monkeypatch, n_samples_per_prompt=8)
    fn.ledger.clock = time.monotonic
    for index in range(1000):
        samples = answer(prompt_group(index, 8))
        for sample in samples:
            sample.tokens, sample.rollout_log_probs = list(range(1024)), [-0.5] * 1024
        fn.ledger.enter(samples).group = list(samples)
    costs, encoding = [], []
    for _ in range(3):
        began = time.thread_time()
        moment = fn.take_moment()
        taken = time.thread_time()
        assert len(moment.encode()["finished"]) == 1000
        costs.append(taken - began)
        encoding.append(time.thread_time() - taken)
    assert min(costs) < min(encoding) / 4, f"{costs} s on the loop, {encoding} s beside it"
