"""The books: legal transitions, balance after each, and what acknowledging and giving back do to them."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import pytest

from miles.rollout._fully_async_ledger import DropReason, GroupLedger, LedgerError, Owner, RecycleReason
from miles.utils.types import Sample
from tests.fast.fakes import FakeDataSource, FakeWeightVersion, GatedGeneration, finished, group_indexes, prompt_group
from tests.fast.rollout.fully_async_setup import fed_by_hand, running, train
from tests.fast.virtual_time import settle, virtual

ABORTED = Sample.Status.ABORTED


def new_ledger() -> GroupLedger:
    return GroupLedger(clock=lambda: 0.0)


# ---- the ledger alone


def test_a_group_from_pull_to_training():
    ledger = new_ledger()
    key = ledger.pull(prompt_group(3))
    ledger.queue(key)
    ledger.drain(key, rollout_id=7)
    assert (key.owner, key.rollout_id, key.group_index) == (Owner.DRAINED, 7, 3)
    ledger.train(key)
    assert ledger.counts() == {
        "pulled": 1, "in_flight": 0, "queued": 0, "drained": 0, "trained": 1, "recycled": 0, "dropped": 0
    }  # fmt: skip
    assert ledger.open == {}


TRANSITIONS = {
    "queue": lambda ledger, key: ledger.queue(key),
    "drain": lambda ledger, key: ledger.drain(key, 0),
    "train": lambda ledger, key: ledger.train(key),
    "recycle": lambda ledger, key: ledger.recycle(key, RecycleReason.STALE),
    "drop": lambda ledger, key: ledger.drop(key, DropReason.FILTERED),
}
LEGAL = {
    Owner.IN_FLIGHT: {"queue", "recycle", "drop"},
    Owner.QUEUED: {"drain", "recycle", "drop"},
    Owner.DRAINED: {"queue", "train", "recycle", "drop"},
    Owner.TRAINED: set(),
    Owner.RECYCLED: set(),
    Owner.DROPPED: set(),
}
PATHS = {
    Owner.IN_FLIGHT: [],
    Owner.QUEUED: ["queue"],
    Owner.DRAINED: ["queue", "drain"],
    Owner.TRAINED: ["queue", "drain", "train"],
    Owner.RECYCLED: ["recycle"],
    Owner.DROPPED: ["drop"],
}


@pytest.mark.parametrize("owner", Owner)
@pytest.mark.parametrize("transition", TRANSITIONS)
def test_each_owner_allows_its_transitions_and_no_others(owner, transition):
    ledger = new_ledger()
    key = ledger.pull(prompt_group(0))
    for step in PATHS[owner]:
        TRANSITIONS[step](ledger, key)
    if transition in LEGAL[owner]:
        TRANSITIONS[transition](ledger, key)
        return
    before = ledger.counts()
    with pytest.raises(LedgerError, match="group 0"):
        TRANSITIONS[transition](ledger, key)
    assert ledger.counts() == before


@pytest.mark.parametrize("count", ["pulled", "in_flight", "queued", "drained", "trained", "recycled", "dropped"])
@pytest.mark.parametrize("error", [-1, 1])
def test_any_wrong_count_is_noticed_at_the_next_transition(count, error):
    ledger = new_ledger()
    key = ledger.pull(prompt_group(0))
    setattr(ledger, count, getattr(ledger, count) + error)
    with pytest.raises(LedgerError, match="do not balance"):
        ledger.queue(key)


def test_a_lost_entry_is_noticed():
    ledger = new_ledger()
    key = ledger.pull(prompt_group(0))
    ledger.open.clear()
    with pytest.raises(LedgerError):
        ledger.queue(key)


def test_memory_does_not_grow_with_closed_groups():
    ledger, rng = new_ledger(), random.Random(0)
    held = []
    for i in range(3000):
        held.append(ledger.pull(prompt_group(i)))
        if len(held) > 5:
            key = held.pop(rng.randrange(len(held)))
            rng.choice([lambda k: ledger.drop(k, DropReason.STALE), lambda k: ledger.recycle(k, RecycleReason.STALE)])(
                key
            )
    assert len(ledger.open) == 5
    assert ledger.pulled == 3000


def test_state_goes_on_with_the_same_balance():
    ledger = new_ledger()
    keys = [ledger.pull(prompt_group(i)) for i in range(6)]
    for key in keys[:4]:
        ledger.queue(key)
    for key in keys[:2]:
        ledger.drain(key, 0)
    ledger.train(keys[0])
    ledger.drop(keys[3], DropReason.FILTERED)
    resumed = new_ledger()
    resumed.load_state_dict(ledger.state_dict())
    for _ in range(2):  # one queued, one drained
        resumed.enter(prompt_group(9))
    assert resumed.counts() == {
        "pulled": 6, "in_flight": 0, "queued": 2, "drained": 0, "trained": 1, "recycled": 2, "dropped": 1
    }  # fmt: skip
    assert resumed.recycled_by[RecycleReason.RESTORED] == 2
    with pytest.raises(LedgerError, match="before the first pull"):
        resumed.load_state_dict(ledger.state_dict())


# ---- acknowledge and give back


@virtual
async def test_groups_are_trained_when_they_are_acknowledged_and_not_before(monkeypatch):
    async with running(monkeypatch, rollout_batch_size=3) as fn:
        await fn(train(0))
        assert (fn.ledger.drained, fn.ledger.trained) == (3, 0)
        assert fn.acknowledge(0) == 3
        assert (fn.ledger.drained, fn.ledger.trained) == (0, 3)
        assert fn.acknowledge(0) == 0
        assert fn.acknowledge(99) == 0


@virtual
async def test_a_caller_that_never_acknowledges_has_each_batch_closed_at_its_next_call(monkeypatch):
    async with running(monkeypatch, rollout_batch_size=3) as fn:
        for step in range(4):
            output = await fn(train(step))
            assert (fn.ledger.drained, fn.ledger.trained) == (3, 3 * step)
        assert output.metrics["rollout/fully_async/groups_trained"] == 3


@virtual
async def test_given_back_groups_come_first_in_the_next_batch(monkeypatch):
    async with fed_by_hand(monkeypatch, *(finished(i) for i in range(4))) as fn:
        first = await fn(train(0))
        assert fn.give_back(0) == 2
        assert (fn.ledger.drained, fn.ledger.queued, fn.queue_size) == (0, 2, 4)
        again = await fn(train(1))
        assert group_indexes(again.samples) == group_indexes(first.samples) == [0, 1]
        assert fn.acknowledge(1) == 2
        assert fn.ledger.trained == 2


@virtual
async def test_an_acknowledged_batch_is_never_given_back_and_a_given_back_one_never_twice(monkeypatch):
    async with fed_by_hand(monkeypatch, *(finished(i) for i in range(6))) as fn:
        await fn(train(0))
        assert fn.acknowledge(0) == 2
        assert fn.give_back(0) == 0
        await fn(train(1))
        assert fn.give_back(1) == 2
        assert fn.give_back(1) == 0
        assert fn.acknowledge(1) == 0
        assert fn.ledger.trained == 2


@virtual
async def test_a_rollout_that_is_asked_for_again_gets_its_batch_again(monkeypatch):
    async with fed_by_hand(monkeypatch, *(finished(i) for i in range(6))) as fn:
        await fn(train(0))
        fn.acknowledge(0)
        await fn(train(1))  # and the step on it is never heard of
        again = await fn(train(1))
        assert group_indexes(again.samples) == [2, 3]
        assert fn.acknowledge(1) == 2


@virtual
async def test_given_back_groups_that_grew_too_old_meanwhile_are_recycled(monkeypatch):
    source = FakeDataSource()
    pairs = [finished(0, versions=("1",)), finished(1, versions=("2",)), finished(2, versions=("3",))]
    async with fed_by_hand(monkeypatch, *pairs, data_source=source, max_weight_staleness=1) as fn:
        await fn(train(0, weight_version=2))
        fn.give_back(0)
        fn.on_weight_version(3)
        output = await fn(train(1))
    assert group_indexes(output.samples) == [1, 2]
    assert group_indexes(source.added) == [0]


@virtual
async def test_a_pair_put_into_the_queue_by_hand_is_entered_when_it_is_seen(monkeypatch):
    async with fed_by_hand(monkeypatch, finished(0), finished(1), finished(2)) as fn:
        assert fn.ledger.pulled == 0
        await fn(train())
        assert fn.ledger.pulled == 2
        assert fn.ledger.drained == 2


# ---- reasons, handlers, retries


@virtual
async def test_reasons_are_counted_and_reported(monkeypatch):
    pairs = [
        finished(0, status=ABORTED),
        finished(1, versions=("1",)),
        finished(2, versions=("5",), reward=0.0),
        finished(3, versions=("5",)),
    ]
    async with fed_by_hand(monkeypatch, *pairs, max_weight_staleness=2, rollout_batch_size=1) as fn:
        fn._dynamic_filter = lambda args, group: group[0].reward != 0.0
        metrics = (await fn(train(weight_version=5))).metrics
    prefix = "rollout/fully_async/"
    assert metrics[prefix + "groups_pulled"] == 4
    assert metrics[prefix + "groups_recycled_aborted"] == 1
    assert metrics[prefix + "groups_recycled_stale"] == 1
    assert metrics[prefix + "groups_dropped_filtered"] == 1
    assert metrics[prefix + "tokens_wasted_filtered"] == 2


@pytest.mark.parametrize(("pair", "reason"), [({"status": ABORTED}, "aborted"), ({"versions": ("1",)}, "stale")])
@virtual
async def test_unused_samples_handler_drop_drops_them(monkeypatch, pair, reason):
    source = FakeDataSource()
    async with fed_by_hand(
        monkeypatch,
        finished(0, **pair),
        finished(1, versions=("5",)),
        data_source=source,
        max_weight_staleness=0,
        rollout_batch_size=1,
        async_unused_samples_handler="drop",
    ) as fn:
        fn._weight_version = FakeWeightVersion(5)
        output = await fn(train())
        assert source.added == []
        assert fn.ledger.dropped_by[DropReason(reason)] == 1
        assert output.metrics[f"rollout/fully_async/{reason}_groups_recycled"] == 0


@pytest.mark.parametrize("retries", [0, 1, 3])
@virtual
async def test_a_group_is_dropped_after_its_retries(monkeypatch, retries):
    tries: list[int] = []

    async def generate(state: Any, group: list[Sample], **keywords: Any) -> list[Sample]:
        tries.append(group[0].group_index)
        for sample in group:
            sample.status = ABORTED if sample.group_index == 0 else Sample.Status.COMPLETED
        return group

    async with running(
        monkeypatch, generate, rollout_batch_size=4, async_max_concurrent_samples=2, async_max_group_retries=retries
    ) as fn:
        output = await fn(train())
        while fn.ledger.dropped == 0:
            await fn(train(1))
        assert tries.count(0) == 1 + retries
        assert fn.ledger.dropped_by[DropReason.MAX_RETRIES] == 1
        assert fn.ledger.recycled == retries
    assert 0 not in group_indexes(output.samples)


@virtual
async def test_retried_groups_alternate_with_fresh_ones_where_the_source_can_tell_them_apart(monkeypatch):
    class Source(FakeDataSource):
        def get_fresh_samples(self, num_samples: int) -> list[list[Sample]]:
            kept, self.buffer = self.buffer, []
            try:
                return self.get_samples(num_samples)
            finally:
                self.buffer = kept

    started: list[int] = []

    async def generate(state: Any, group: list[Sample], **keywords: Any) -> list[Sample]:
        started.append(group[0].group_index)
        for sample in group:
            sample.status = ABORTED if sample.group_index < 4 else Sample.Status.COMPLETED
        return group

    async with running(monkeypatch, generate, Source(), rollout_batch_size=8, async_max_concurrent_samples=8) as fn:
        await fn(train())
    retried = [i for i, index in enumerate(started) if index in started[:i]]
    assert retried
    assert not any(b == a + 1 for a, b in itertools.pairwise(retried))


# ---- observers


@virtual
async def test_observers_see_every_transition_in_order(monkeypatch):
    seen = []

    class Observer:
        def on_transition(self, key, group_index, old, new, reason, now):
            seen.append((group_index, old, new, reason, now))

    generate = GatedGeneration()
    async with running(monkeypatch, generate, rollout_batch_size=1) as fn:
        fn.observers.append(Observer())
        call = asyncio.create_task(fn(train(0)))
        await asyncio.sleep(2)
        generate.finish(0, make=lambda group: [setattr(s, "status", ABORTED) or s for s in group])
        await settle()
        generate.finish(1)
        await call
        fn.acknowledge(0)
    assert [event for event in seen if event[0] == 0][:4] == [
        (0, None, Owner.IN_FLIGHT, None, 0.0),
        (0, Owner.IN_FLIGHT, Owner.QUEUED, None, 2.0),
        (0, Owner.QUEUED, Owner.DRAINED, None, 2.0),
        (0, Owner.DRAINED, Owner.RECYCLED, "aborted", 2.0),
    ]
    assert (1, Owner.DRAINED, Owner.TRAINED, None, 2.0) in seen
