"""What the trace learns of each group: its phases, their times, and how it ended."""

from __future__ import annotations

from typing import Any

from miles.rollout._fully_async_groups import take_stock
from miles.rollout._fully_async_ledger import DropReason, GroupLedger, RecycleReason
from miles.rollout._fully_async_trace import GroupPhases, observe_groups
from tests.fast.fakes import answer, prompt_group

EPOCH = 1000.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def books(limit: int = 100) -> tuple[GroupLedger, Clock, GroupPhases]:
    clock = Clock()
    ledger = GroupLedger(clock)
    phases = GroupPhases(limit, lambda loop_time: EPOCH + loop_time)
    ledger.observers.append(phases)
    return ledger, clock, phases


def told(phases: GroupPhases) -> list[tuple[Any, ...]]:
    return [(p.pull, p.phase, p.start - EPOCH, p.end - EPOCH, p.outcome) for p in phases.take()]


def test_a_group_from_its_pull_to_its_training() -> None:
    ledger, clock, phases = books()
    group = prompt_group(5)
    key = ledger.pull(group)
    clock.now = 4
    take_stock(key, answer(group))
    ledger.finish(key)
    ledger.queue(key)
    clock.now = 6
    ledger.drain(key, rollout_id=0)
    clock.now = 9
    ledger.train(key)
    (first, *_) = taken = phases.take()
    assert (first.group_index, first.tokens) == (5, 2)
    assert [(p.phase, p.start - EPOCH, p.end - EPOCH, p.outcome) for p in taken] == [
        ("in flight", 0, 4, "queued"),
        ("queued", 4, 6, "drained"),
        ("with the trainer", 6, 9, "trained"),
    ]
    assert phases.take() == []


def test_the_wait_for_room_is_a_phase_of_its_own() -> None:
    ledger, clock, phases = books()
    key = ledger.pull(prompt_group(0))
    clock.now = 1
    ledger.finish(key)
    clock.now = 3
    ledger.queue(key)
    assert told(phases) == [(0, "in flight", 0, 1, "waits for room"), (0, "waits for room", 1, 3, "queued")]


def test_how_a_group_ends_is_told_with_the_reason() -> None:
    ledger, clock, phases = books()
    recycled, dropped = ledger.pull(prompt_group(0)), ledger.pull(prompt_group(1))
    clock.now = 2
    ledger.recycle(recycled, RecycleReason.STALE)
    ledger.drop(dropped, DropReason.FILTERED)
    assert told(phases) == [(0, "in flight", 0, 2, "recycled: stale"), (1, "in flight", 0, 2, "dropped: filtered")]


def test_a_batch_that_is_given_back_is_queued_again() -> None:
    ledger, clock, phases = books()
    key = ledger.enter(prompt_group(0))
    for when, transition in ((1, lambda: ledger.drain(key, 0)), (2, lambda: ledger.queue(key))):
        clock.now = when
        transition()
    assert told(phases) == [(0, "queued", 0, 1, "drained"), (0, "with the trainer", 1, 2, "queued")]


def test_past_its_limit_it_keeps_nothing() -> None:
    ledger, _, phases = books(limit=2)
    for _ in range(5):
        key = ledger.pull(prompt_group(0))
        ledger.drop(key, DropReason.FILTERED)
    assert len(phases.take()) == 2 and phases._since == {}


def test_only_a_rollout_function_with_a_ledger_is_observed() -> None:
    class Rollout:
        observers: list[Any]

        def __init__(self) -> None:
            self.observers = []

    assert observe_groups(object(), 100) is None
    assert observe_groups(Rollout(), 0) is None
    rollout = Rollout()
    assert rollout.observers == [] and observe_groups(rollout, 100) is rollout.observers[0]
