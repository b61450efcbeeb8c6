"""What the trace learns of each group: its phases, their times, and how it ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from miles.rollout._fully_async_groups import take_stock
from miles.rollout._fully_async_ledger import DropReason, GroupLedger, RecycleReason
from miles.rollout._fully_async_trace import GroupPhases, observe_rollout
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
        ("drained", 6, 9, "trained"),
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
    assert told(phases) == [(0, "queued", 0, 1, "drained"), (0, "drained", 1, 2, "queued")]


def test_past_its_limit_it_keeps_nothing() -> None:
    ledger, _, phases = books(limit=2)
    for _ in range(5):
        key = ledger.pull(prompt_group(0))
        ledger.drop(key, DropReason.FILTERED)
    assert len(phases.take()) == 2 and phases._open == {}


def test_what_goes_on_when_the_run_ends_ends_with_it() -> None:
    ledger, clock, phases = books()
    ledger.pull(prompt_group(0))
    clock.now = 3
    phases.end(5.0)
    (phase,) = phases.take()
    assert (phase.phase, phase.end - EPOCH, phase.outcome, phase.is_last) == ("in flight", 5, "the run ends", True)


def test_only_the_end_of_a_pull_is_its_last_phase() -> None:
    ledger, _, phases = books()
    key = ledger.enter(prompt_group(0))
    ledger.drain(key, 0)
    ledger.queue(key)
    ledger.drain(key, 1)
    ledger.train(key)
    assert [phase.is_last for phase in phases.take()] == [False, False, False, True]


class Rollout:
    """A rollout function with a ledger."""

    def __init__(self) -> None:
        self.observers: list[Any] = []
        self.state = SimpleNamespace(attempts=None)


def test_groups_are_noted_where_there_is_a_ledger_and_samples_where_there_is_a_state() -> None:
    assert observe_rollout((Rollout(),), 0) is None
    nothing = observe_rollout((object(), None), 100)
    assert nothing is not None and nothing.end() == []
    train, evaluation = Rollout(), Rollout()
    assert observe_rollout((train, evaluation), 100) is not None
    assert len(train.observers) == 1 and evaluation.observers == []
    assert train.state.attempts is evaluation.state.attempts is not None
