"""Evaluation on shared engines: nothing new is submitted while it runs, and submission always goes on after it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from miles.rollout._submission_gate import PausableSubmission, SubmissionGate, submission_paused_from_outside
from miles.utils.async_utils import run, use_async_loop
from tests.fast.fakes import generate_at_once
from tests.fast.rollout.fully_async_setup import running, train
from tests.fast.virtual_time import settle, virtual

if TYPE_CHECKING:
    from collections.abc import Iterator


class Rollout(PausableSubmission):
    def __init__(self) -> None:
        self.submission_gate = SubmissionGate()


async def worker(gate: SubmissionGate, submitted: list[int]) -> None:
    while True:
        await gate.wait_open()
        submitted.append(len(submitted))
        await asyncio.sleep(1)


@virtual
async def test_a_closed_gate_holds_the_worker_and_an_open_one_lets_it_go_on() -> None:
    gate, submitted = SubmissionGate(), []
    task = asyncio.create_task(worker(gate, submitted))
    await asyncio.sleep(2.5)
    gate.pause()
    await asyncio.sleep(100)
    assert submitted == [0, 1, 2] and not gate.is_open
    gate.resume()
    await asyncio.sleep(1.5)
    assert submitted == [0, 1, 2, 3, 4]
    task.cancel()
    await asyncio.wait({task})


@virtual
async def test_the_gate_is_open_again_when_the_last_holder_has_left() -> None:
    fn = Rollout()
    async with fn.submission_paused():
        async with fn.submission_paused():
            pass
        assert not fn.submission_gate.is_open
    assert fn.submission_gate.is_open


@virtual
async def test_a_waiter_that_is_woken_and_finds_the_gate_closed_again_goes_on_waiting() -> None:
    gate, submitted = SubmissionGate(), []
    gate.pause()
    task = asyncio.create_task(worker(gate, submitted))
    await settle()
    gate.resume()
    gate.pause()
    await settle()
    assert submitted == []
    task.cancel()
    await asyncio.wait({task})


@virtual
async def test_an_evaluation_that_raises_or_is_cancelled_opens_the_gate() -> None:
    fn = Rollout()
    with pytest.raises(KeyError):
        async with fn.submission_paused():
            raise KeyError("reward")

    async def evaluate() -> None:
        async with fn.submission_paused():
            await asyncio.Event().wait()

    task = asyncio.create_task(evaluate())
    await settle()
    assert not fn.submission_gate.is_open
    task.cancel()
    await asyncio.wait({task})
    assert fn.submission_gate.is_open


@virtual
async def test_resuming_what_nobody_paused_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="more often than it was paused"):
        SubmissionGate().resume()


@virtual
async def test_fully_async_rollout_submits_nothing_new_while_paused_and_aborts_nothing() -> None:
    release = asyncio.Event()
    started: list[int] = []

    async def generate(state: Any, group: list[Any], **kwargs: Any) -> list[Any]:
        started.append(group[0].group_index)
        await release.wait()
        return await generate_at_once(state, group, **kwargs)

    with pytest.MonkeyPatch.context() as monkeypatch:
        async with running(monkeypatch, generate, rollout_batch_size=2) as fn:
            batch = asyncio.create_task(fn(train()))
            await settle()
            assert len(started) == fn.max_in_flight_groups
            async with fn.submission_paused():
                release.set()
                output = await batch  # what was in flight finishes, and is used
                await asyncio.sleep(60)
                assert len(started) == fn.max_in_flight_groups
            await settle()
            assert len(started) > fn.max_in_flight_groups
            assert len(output.samples) == 2
            assert output.metrics["rollout/fully_async/aborted_groups_recycled"] == 0


@pytest.fixture
def rollout_loop() -> Iterator[None]:
    with use_async_loop():
        yield


async def _is_open(fn: Rollout) -> bool:
    return fn.submission_gate.is_open


@pytest.mark.usefixtures("rollout_loop")
def test_a_thread_outside_the_loop_pauses_and_always_resumes() -> None:
    fn = Rollout()
    with pytest.raises(KeyError), submission_paused_from_outside(fn):
        assert not run(_is_open(fn))
        raise KeyError("reward")
    assert run(_is_open(fn))


def test_a_function_that_cannot_pause_is_left_alone() -> None:
    with submission_paused_from_outside(object()):
        pass
