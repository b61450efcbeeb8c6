"""Deadlines of samples and groups, in loop time."""

from __future__ import annotations

import asyncio
from argparse import Namespace

import pytest

from miles.rollout.base_types import GenerateFnOutput
from miles.rollout.generate_utils.request_ids import request_ids, with_request_id
from miles.rollout.inference_rollout import engine_aborts, sample_run
from miles.rollout.inference_rollout.deadlines import DeadlineConfig, GroupClock
from miles.rollout.inference_rollout.engine_aborts import abort_requests
from miles.rollout.inference_rollout.inference_rollout_common import (
    GenerateState,
    generate_and_rm,
    generate_and_rm_group,
)
from miles.utils.http_utils import HttpConnectionError
from miles.utils.misc import function_registry
from miles.utils.types import Sample
from tests.fast.rollout.engine_stub import CharTokenizer, EngineStub, make_args, response
from tests.fast.virtual_time import virtual

COMPLETED, ABORTED = Sample.Status.COMPLETED, Sample.Status.ABORTED
PARAMS = {"max_new_tokens": 8}


class Durations:
    """A generate function whose attempts at sample i take `seconds[i]`, one entry after the other, then none.

    `attempts`: (index, started, ended) in loop time.
    """

    def __init__(self, seconds: dict[int, list[float]]) -> None:
        self.seconds = seconds
        self.attempts: list[tuple[int, float, float]] = []

    async def __call__(self, input):
        loop, sample = asyncio.get_running_loop(), input.sample
        started = loop.time()
        with_request_id({})
        left = self.seconds.get(sample.index)
        try:
            await asyncio.sleep(left.pop(0) if left else 0)
        finally:
            self.attempts.append((sample.index, started, loop.time()))
        sample.status = COMPLETED
        return GenerateFnOutput(sample)


@pytest.fixture
def aborted(monkeypatch):
    """The numbers of request ids that were aborted, in place of requests to engines."""
    calls = []

    async def record(args, ids):
        assert all(len(rid) == 32 for rid in ids)
        calls.append(len(ids))

    monkeypatch.setattr(sample_run, "abort_requests", record)
    return calls


def state_with(generate, **overrides) -> GenerateState:
    state = GenerateState(make_args(custom_rm_path="test:reward", **{"sample_max_retries": 3, **overrides}))
    state.generate_function = generate
    return state


@pytest.fixture(autouse=True)
def reward():
    with function_registry.temporary("test:reward", lambda args, sample: 1.0):
        yield


def make_group(n: int = 2) -> list[Sample]:
    return [Sample(group_index=7, index=i, prompt="q") for i in range(n)]


@virtual
async def test_a_sample_past_its_deadline_is_ended_on_its_engine_and_replaced_alone(aborted):
    generate = Durations({1: [1e9, 1e9, 4]})
    state = state_with(generate, sample_timeout_secs=10.0)
    result = await generate_and_rm_group(state, make_group(), PARAMS)
    assert [(s.status, s.reward) for s in result] == [(COMPLETED, 1.0)] * 2
    assert generate.attempts == [(0, 0, 0), (1, 0, 10), (1, 10, 20), (1, 20, 24)]
    assert aborted == [1, 1]
    assert (state.sample_retries, state.sample_timeouts) == (2, 2)


@virtual
async def test_waiting_for_a_slot_does_not_count(aborted):
    generate = Durations({i: [8] for i in range(3)})
    state = state_with(generate, sample_timeout_secs=10.0, sglang_server_concurrency=1)
    await generate_and_rm_group(state, make_group(3), PARAMS)
    assert asyncio.get_running_loop().time() == 24
    assert aborted == []


@virtual
async def test_what_never_ends_comes_back_aborted(aborted):
    for retries, attempts in ((3, 4), (0, 1)):
        generate = Durations({0: [1e9] * 9})
        state = state_with(generate, sample_timeout_secs=10.0, sample_max_retries=retries)
        [sample] = await generate_and_rm_group(state, make_group(1), PARAMS)
        assert (sample.status, sample.reward) == (ABORTED, None)
        assert len(generate.attempts) == attempts == state.sample_timeouts


@virtual
async def test_a_group_past_its_deadline_replaces_what_is_unfinished_and_these_share_the_next_one(aborted):
    generate = Durations({0: [10], 1: [1e9, 15], 2: [1e9, 1e9, 1]})
    state = state_with(generate, group_timeout_secs=20.0)
    result = await generate_and_rm_group(state, make_group(3), PARAMS)
    assert [s.status for s in result] == [COMPLETED] * 3
    assert sorted(generate.attempts) == [
        (0, 0, 10), (1, 0, 20), (1, 20, 35), (2, 0, 20), (2, 20, 40), (2, 40, 41)
    ]  # fmt: skip
    assert state.sample_timeouts == 3


@virtual
async def test_the_earlier_deadline_counts(aborted):
    generate = Durations({0: [1e9, 1e9, 1e9]})
    state = state_with(generate, sample_timeout_secs=15.0, group_timeout_secs=20.0)
    await generate_and_rm_group(state, make_group(1), PARAMS)
    assert [ended for _, _, ended in generate.attempts] == [15, 20, 35, 35]


@virtual
async def test_a_reward_that_never_comes_gives_the_group_back(aborted):
    async def never(args, samples):
        await asyncio.Event().wait()

    for group_rm in (False, True):
        with function_registry.temporary("test:never", never):
            state = state_with(Durations({}), group_timeout_secs=20.0, group_rm=group_rm)
            state.args.custom_rm_path = "test:never"
            group = await generate_and_rm_group(state, make_group(), PARAMS)
        assert [s.status for s in group] == [ABORTED] * 2
        assert state.sample_retries == 0


@virtual
async def test_an_evaluation_has_no_deadline(aborted):
    generate = Durations({0: [100]})
    state = state_with(generate, sample_timeout_secs=10.0, group_timeout_secs=10.0)
    assert (await generate_and_rm(state, make_group()[0], PARAMS, evaluation=True)).status is COMPLETED


@virtual
async def test_a_function_that_turns_the_cancellation_into_something_else_is_past_its_deadline_all_the_same(aborted):
    tries = 0

    async def generate(input):
        nonlocal tries
        tries += 1
        try:
            await asyncio.sleep(1e9 if tries == 1 else 0)
        except asyncio.CancelledError:
            raise RuntimeError("interrupted") from None
        input.sample.status = COMPLETED
        return GenerateFnOutput(input.sample)

    state = state_with(generate, sample_timeout_secs=10.0)
    assert (await generate_and_rm(state, Sample(), PARAMS)).status is COMPLETED
    assert state.sample_timeouts == 1


@virtual
async def test_a_time_out_of_user_code_is_user_code(aborted):
    async def generate(input):
        async with asyncio.timeout(5):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await generate_and_rm(state_with(generate, sample_timeout_secs=10.0), Sample(), PARAMS)
    assert aborted == []


@virtual
async def test_a_group_that_is_cancelled_at_its_deadline_is_cancelled(aborted):
    state = state_with(Durations({0: [1e9], 1: [1e9]}), sample_timeout_secs=10.0)
    call = asyncio.ensure_future(generate_and_rm_group(state, make_group(), PARAMS))
    asyncio.get_running_loop().call_at(10.0, call.cancel)
    await asyncio.wait({call})
    assert call.cancelled()


@virtual
async def test_without_flags_there_is_no_clock():
    assert GroupClock(DeadlineConfig.from_args(Namespace())).begin_attempt() is None
    for name in ("sample_timeout_secs", "group_timeout_secs"):
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} must be greater than 0, got 0"):
            DeadlineConfig.from_args(Namespace(**{name: 0}))


# Requests and engines


def test_payloads_get_an_id_each_only_where_somebody_collects_them():
    payload = {"input_ids": [1]}
    assert with_request_id(payload) is payload
    with request_ids() as ids:
        first, second = with_request_id(payload), with_request_id(payload)
    assert [first["rid"], second["rid"]] == ids and len(set(ids)) == 2
    assert "rid" not in payload
    assert with_request_id(payload) is payload


async def test_the_hung_request_is_aborted_on_the_engine_by_its_id():
    async with EngineStub() as engine:
        engine.holds = lambda payload: len(engine.requests) == 1
        engine.respond = lambda payload: response()
        state = GenerateState(engine.args(custom_rm_path="test:reward", sample_max_retries=1, sample_timeout_secs=0.2))
        state.tokenizer, state.processor = CharTokenizer(), None
        sample = await generate_and_rm(state, Sample(prompt="q"), state.sampling_params)
    assert (sample.status, sample.response) == (COMPLETED, "ok")
    rids = [request["rid"] for request in engine.requests]
    assert len(set(rids)) == 2
    assert engine.aborts == [{"rid": rids[0]}]


async def test_aborts_are_best_effort_and_bounded(monkeypatch, caplog):
    async with EngineStub() as engine:
        engine.unlisted = 1
        await abort_requests(engine.args(), ["r"])
        assert "the router did not list its engines" in caplog.text
        await abort_requests(engine.args(), [])
        assert engine.aborts == []

        async def refuse(url, payload, **keywords):
            raise HttpConnectionError(url=url, method="POST", attempts=1, elapsed=0.0, reason="gone")

        monkeypatch.setattr(engine_aborts, "post", refuse)
        await abort_requests(engine.args(), ["r"])
        assert "an engine did not take an abort request" in caplog.text

        async def hang(url, payload, **keywords):
            await asyncio.Event().wait()

        monkeypatch.setattr(engine_aborts, "post", hang)
        monkeypatch.setattr(engine_aborts, "ABORT_TIMEOUT_SECS", 0.01)
        await abort_requests(engine.args(), ["r"])
        assert "did not take an abort request within 0.01 s" in caplog.text
