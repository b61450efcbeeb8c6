"""What goes wrong with one sample concerns this sample alone; and each member is reported once, however it ends."""

from __future__ import annotations

import asyncio

import pytest

from miles.rollout.base_types import GenerateFnOutput
from miles.rollout.inference_rollout.inference_rollout_common import (
    GenerateState,
    generate_and_rm,
    generate_and_rm_group,
)
from miles.utils.http_errors import HttpConnectionError, HttpRequestError, HttpStatusError, HttpTimeoutError
from miles.utils.misc import function_registry
from miles.utils.types import Sample
from miles.utils.user_calls import UserFunctionError
from tests.fast.rollout.engine_stub import CharTokenizer, EngineStub, make_args, response
from tests.fast.virtual_time import settle, virtual

COMPLETED, ABORTED, FAILED = Sample.Status.COMPLETED, Sample.Status.ABORTED, Sample.Status.FAILED
PARAMS = {"max_new_tokens": 8}


def http_error(kind=HttpConnectionError, **fields):
    return kind(url="http://router", method="POST", attempts=9, elapsed=1.0, reason="gone", **fields)


class Script:
    """A generate function that plays one list of outcomes for each sample index, then completes.

    An outcome is a status, or an exception to raise. `tries`: (index, status at the start) of every attempt.
    """

    def __init__(self, outcomes: dict[int, list[object]]) -> None:
        self.outcomes = {index: list(of_sample) for index, of_sample in outcomes.items()}
        self.tries: list[tuple[int, Sample.Status]] = []

    async def __call__(self, input):
        sample = input.sample
        self.tries.append((sample.index, sample.status))
        await asyncio.sleep(0)
        left = self.outcomes.get(sample.index)
        outcome = left.pop(0) if left else COMPLETED
        if isinstance(outcome, BaseException):
            raise outcome
        sample.response, sample.tokens, sample.response_length, sample.status = "ok", [1, 2], 2, outcome
        return GenerateFnOutput(sample)

    def tries_of(self, index: int) -> int:
        return sum(i == index for i, _ in self.tries)


def state_with(script, retries: int | None = 3, **overrides) -> GenerateState:
    if retries is not None:
        overrides["sample_max_retries"] = retries
    state = GenerateState(make_args(custom_rm_path="test:reward", **overrides))
    state.generate_function = script
    return state


@pytest.fixture(autouse=True)
def reward():
    async def fn(args, samples, **kwargs):
        return [1.0] * len(samples) if isinstance(samples, list) else 1.0

    with function_registry.temporary("test:reward", fn):
        yield fn


def make_group(n: int = 3) -> list[Sample]:
    return [Sample(group_index=7, index=i, prompt="q") for i in range(n)]


TRANSPORT = [
    http_error(),
    http_error(HttpTimeoutError),
    http_error(HttpStatusError, status=500),
    http_error(HttpStatusError, status=503),
    http_error(HttpStatusError, status=429),
    http_error(HttpStatusError, status=400, body='{"message": "Duplicate request ID detected: 4"}'),
]


@pytest.mark.parametrize("outcome", [ABORTED, FAILED, *TRANSPORT], ids=repr)
async def test_a_sample_that_fails_for_no_fault_of_user_code_is_replaced_alone(outcome):
    script = Script({1: [outcome, outcome]})
    state, group = state_with(script), make_group()
    result = await generate_and_rm_group(state, group, PARAMS)
    assert [a is b for a, b in zip(result, group, strict=True)] == [True] * 3
    assert [(s.status, s.reward, s.response) for s in result] == [(COMPLETED, 1.0, "ok")] * 3
    assert [script.tries_of(i) for i in range(3)] == [1, 3, 1]
    assert [status for i, status in script.tries if i == 1][1:] == [ABORTED, ABORTED]
    assert state.sample_retries == 2
    assert state.busy.active == 0


async def test_a_replacement_starts_from_the_prompt():
    seen = []

    async def generate(input):
        sample = input.sample
        seen.append((list(sample.tokens), sample.response_length, list(sample.weight_versions), sample.label))
        sample.tokens, sample.response_length, sample.weight_versions = [1, 2], 2, ["3"]
        sample.status = COMPLETED if len(seen) > 1 else ABORTED
        return GenerateFnOutput(sample)

    await generate_and_rm(state_with(generate), Sample(label="l"), PARAMS)
    assert seen == [([], 0, [], "l")] * 2


async def test_an_aborted_answer_is_continued_with_partial_rollout():
    lengths = []

    async def generate(input):
        sample = input.sample
        lengths.append(sample.response_length)
        sample.response_length += 2
        sample.status = COMPLETED if len(lengths) > 1 else ABORTED
        return GenerateFnOutput(sample)

    await generate_and_rm(state_with(generate, partial_rollout=True), Sample(), PARAMS)
    assert lengths == [0, 2]


async def test_a_copy_that_came_back_aborted_is_replaced_by_its_prompt_sample():
    tries = 0

    async def generate(input):
        nonlocal tries
        tries += 1
        copies = [Sample(index=input.sample.index, status=s) for s in (COMPLETED, FAILED if tries == 1 else COMPLETED)]
        return GenerateFnOutput(copies)

    state = state_with(generate)
    [member] = await generate_and_rm_group(state, make_group(1), PARAMS)
    assert [s.reward for s in member] == [1.0, 1.0]
    assert (tries, state.sample_retries) == (2, 1)


@pytest.mark.parametrize("outcome", [ABORTED, FAILED, http_error()], ids=repr)
async def test_what_is_left_after_the_retries_comes_back_aborted_and_without_a_reward(outcome, caplog):
    script = Script({1: [outcome] * 9})
    state = state_with(script, retries=3)
    result = await generate_and_rm_group(state, make_group(), PARAMS)
    assert [(s.status, s.reward) for s in result] == [(COMPLETED, 1.0), (ABORTED, None), (COMPLETED, 1.0)]
    assert script.tries_of(1) == 4
    assert state.sample_retries == 3
    assert "sample 1 of group 7 is generated again" in caplog.text


@pytest.mark.parametrize("retries", [None, 0])
async def test_without_retries_everything_is_as_the_generate_function_left_it(retries):
    script = Script({0: [ABORTED], 1: [FAILED]})
    state = state_with(script, retries)
    result = await generate_and_rm_group(state, make_group(2), PARAMS)
    assert [s.status for s in result] == [ABORTED, FAILED]
    error = http_error()
    with pytest.raises(HttpConnectionError) as raised:
        await generate_and_rm_group(state_with(Script({1: [error]}), retries), make_group(), PARAMS)
    assert raised.value is error
    assert state.sample_retries == 0


@pytest.mark.parametrize(
    "error",
    [
        LookupError("mine"),
        ConnectionError("not the client's"),
        TimeoutError("not ours"),
        http_error(HttpStatusError, status=400),
        http_error(HttpRequestError),
    ],
    ids=repr,
)
async def test_anything_else_that_is_raised_is_fatal_and_names_function_and_sample(error):
    state = state_with(Script({1: [error]}))
    with pytest.raises(type(error)) as raised:
        await generate_and_rm_group(state, make_group(), PARAMS)
    assert raised.value is error
    [note] = error.__notes__
    assert "generate function" in note and "Script, called for sample 1 of group 7, raised this" in note
    assert state.sample_retries == 0


async def test_nothing_is_replaced_while_the_state_is_aborted():
    async def generate(input):
        input.state.aborted = True
        input.sample.status = ABORTED
        return GenerateFnOutput(input.sample)

    state = state_with(generate)
    result = await generate_and_rm_group(state, make_group(1), PARAMS)
    assert result[0].status is ABORTED
    assert state.sample_retries == 0


async def test_the_replacement_takes_a_slot_again_and_frees_it():
    script = Script({i: [ABORTED] for i in range(4)})
    state = state_with(script, sglang_server_concurrency=1)
    result = await generate_and_rm_group(state, make_group(4), PARAMS)
    assert [s.status for s in result] == [COMPLETED] * 4
    assert not state.generate_fn_semaphore.locked()


async def test_an_evaluation_replaces_too_but_raises_a_transport_failure_that_stays():
    script = Script({0: [http_error(), ABORTED]})
    state = state_with(script)
    assert (await generate_and_rm(state, make_group()[0], PARAMS, evaluation=True)).status is COMPLETED
    error = http_error()
    with pytest.raises(HttpConnectionError):
        await generate_and_rm(state_with(Script({0: [error] * 9})), make_group()[0], PARAMS, evaluation=True)


async def test_a_lost_reward_server_is_asked_again_and_the_answer_kept():
    failures = [http_error(), http_error(HttpStatusError, status=502)]

    async def lost(args, sample):
        if failures:
            raise failures.pop()
        return 0.5

    script = Script({})
    with function_registry.temporary("test:lost", lost):
        state = state_with(script)
        state.args.custom_rm_path = "test:lost"
        sample = await generate_and_rm(state, Sample(index=0), PARAMS)
        assert (sample.reward, script.tries_of(0)) == (0.5, 1)
        failures.extend([http_error()] * 9)
        with pytest.raises(HttpConnectionError):
            await generate_and_rm(state, Sample(index=0), PARAMS)


# Siblings


@pytest.mark.parametrize(
    ("current", "limit", "retried"), [(4, 1, True), (5, 1, False), (5, None, True), (None, 1, True)]
)
async def test_finished_siblings_are_kept_only_as_long_as_their_versions_allow(current, limit, retried):
    first_done = asyncio.Event()

    async def generate(input):
        sample = input.sample
        if sample.index == 0:
            sample.weight_versions, sample.status = ["3"], COMPLETED
            first_done.set()
        else:
            await first_done.wait()
            await settle(5)
            sample.status = ABORTED if sample.label is None else COMPLETED
            sample.label = "seen"
        return GenerateFnOutput(sample)

    state = state_with(generate, max_weight_staleness=limit)
    state.weight_version = current
    result = await generate_and_rm_group(state, make_group(2), PARAMS)
    assert [s.status for s in result] == [COMPLETED, COMPLETED if retried else ABORTED]
    assert state.sample_retries == int(retried)


async def test_an_owner_may_judge_the_siblings_itself():
    state = state_with(Script({1: [ABORTED]}))
    judged = []
    state.still_usable = lambda samples: judged.append([s.index for s in samples]) or False
    result = await generate_and_rm_group(state, make_group(2), PARAMS)
    assert result[1].status is ABORTED
    assert judged == [[0]]


# The callback


class Done:
    def __init__(self, state):
        self.state, self.calls = state, 0

    def __call__(self):
        self.calls += 1


async def test_each_member_is_reported_once_when_it_has_freed_its_slot():
    gates = [asyncio.Event() for _ in range(3)]
    in_slot = set()

    async def generate(input):
        in_slot.add(input.sample.index)
        await gates[input.sample.index].wait()
        in_slot.remove(input.sample.index)
        input.sample.status = COMPLETED
        return GenerateFnOutput(input.sample)

    state = state_with(generate, sglang_server_concurrency=3)
    reports = []
    call = asyncio.ensure_future(
        generate_and_rm_group(
            state,
            make_group(),
            PARAMS,
            sample_done_callback=lambda: reports.append((len(in_slot), state.generate_fn_semaphore._value)),
        )
    )
    await settle()
    assert reports == []
    for i in (1, 0, 2):
        gates[i].set()
        await settle()
    assert reports == [(2, 1), (1, 2), (0, 3)]
    await call


async def test_the_report_comes_before_the_reward():
    gate = asyncio.Event()

    async def slow(args, sample):
        await gate.wait()
        return 1.0

    with function_registry.temporary("test:slow", slow):
        state = state_with(Script({}))
        state.args.custom_rm_path = "test:slow"
        done = Done(state)
        call = asyncio.ensure_future(generate_and_rm_group(state, make_group(), PARAMS, sample_done_callback=done))
        await settle()
        assert done.calls == 3 and not call.done()
        gate.set()
        await call
    assert done.calls == 3


async def test_a_replaced_sample_is_reported_once_and_last():
    done = Done(None)
    counts = []

    async def generate(input):
        await settle(5 * (input.sample.index + 1))
        counts.append((input.sample.index, done.calls))
        input.sample.status = ABORTED if len(counts) in (3, 4) else COMPLETED
        return GenerateFnOutput(input.sample)

    await generate_and_rm_group(state_with(generate), make_group(), PARAMS, sample_done_callback=done)
    assert counts == [(0, 0), (1, 1), (2, 2), (2, 2), (2, 2)]
    assert done.calls == 3


async def test_every_member_is_reported_when_one_fails_and_the_rest_are_cancelled():
    async def generate(input):
        if input.sample.index == 1:
            await settle()
            raise LookupError("mine")
        await asyncio.Event().wait()

    for concurrency in (1, 3):  # with one slot, the others wait for it and never begin
        state = state_with(generate, sglang_server_concurrency=concurrency)
        done = Done(state)
        group = make_group()
        group.insert(0, group.pop(1))  # the one that fails has the slot
        with pytest.raises(LookupError):
            await generate_and_rm_group(state, group, PARAMS, sample_done_callback=done)
        assert done.calls == 3


@pytest.mark.parametrize("rounds", [0, 1, 2, 3, 10])
async def test_every_member_is_reported_when_the_group_is_cancelled_at_any_moment(rounds):
    async def generate(input):
        await asyncio.Event().wait()

    state = state_with(generate, sglang_server_concurrency=2)
    done = Done(state)
    call = asyncio.ensure_future(generate_and_rm_group(state, make_group(), PARAMS, sample_done_callback=done))
    await settle(rounds + 1)
    call.cancel()
    await asyncio.wait({call})
    assert call.cancelled()
    assert done.calls == 3
    assert state.generate_fn_semaphore._value == 2


async def test_members_that_need_no_generation_are_reported_too():
    state = state_with(Script({}))
    finished = Sample(status=COMPLETED, reward=1.0)
    done = Done(state)
    await generate_and_rm_group(state, [finished, *make_group(1)], PARAMS, sample_done_callback=done)
    assert done.calls == 2
    state.aborted = True
    await generate_and_rm_group(state, make_group(), PARAMS, sample_done_callback=done)
    assert done.calls == 5


# Cancellations that nobody asked for


async def leak(input):
    raise asyncio.CancelledError


async def cancel_myself(input):
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


async def cancel_somebody_else(input):
    other = asyncio.ensure_future(asyncio.sleep(60))
    other.cancel()
    await other


@pytest.mark.parametrize("generate", [leak, cancel_myself, cancel_somebody_else])
async def test_a_leaked_cancellation_is_an_error_that_names_the_sample(generate):
    with pytest.raises(UserFunctionError, match="sample 0 of group 7"):
        await generate_and_rm_group(state_with(generate), make_group(1), PARAMS)


@pytest.mark.parametrize("fn", [leak, cancel_somebody_else])
async def test_a_leaked_cancellation_names_generate_and_reward_functions(fn):
    with pytest.raises(UserFunctionError, match=rf"generate function .*{fn.__name__}, called for sample 0 of group 7"):
        await generate_and_rm_group(state_with(fn), make_group(1), PARAMS)

    async def reward(args, sample):
        await fn(None)

    with (
        function_registry.temporary("test:leak", reward),
        pytest.raises(UserFunctionError, match=r"reward function .*reward, called for sample 0 of group 7"),
    ):
        state = state_with(Script({}))
        state.args.custom_rm_path = "test:leak"
        await generate_and_rm_group(state, make_group(1), PARAMS)


@virtual
async def test_a_child_that_cancels_itself_ends_the_group_without_waiting_for_the_others():
    async def generate(input):
        if input.sample.index == 0:
            return await cancel_myself(input)
        await asyncio.Event().wait()

    with pytest.raises(UserFunctionError, match=r"sample 0 of group 7 was cancelled from within"):
        await generate_and_rm_group(state_with(generate), make_group(), PARAMS)


# Over HTTP


async def test_an_engine_that_aborts_one_request_costs_one_sample():
    async with EngineStub() as engine:
        answers = iter(["abort", "stop", "stop", "stop"])
        engine.respond = lambda payload: response(reason=next(answers))
        state = GenerateState(engine.args(custom_rm_path="test:reward", sample_max_retries=3))
        state.tokenizer, state.processor = CharTokenizer(), None
        group = await generate_and_rm_group(state, make_group(), state.sampling_params)
    assert [s.status for s in group] == [COMPLETED] * 3
    assert [s.tokens for s in group] == [[ord(c) for c in "qok"]] * 3
    assert [s.weight_version_spans for s in group] == [[[0, 2, "0"]]] * 3
    assert len(engine.requests) == 4
    assert all("rid" not in request for request in engine.requests)
    assert state.sample_retries == 1


# Missing rewards


@pytest.mark.parametrize("group_rm", [False, True])
async def test_samples_without_a_reward_are_counted(group_rm):
    def judge(args, samples):
        return [None, 1.0, None] if isinstance(samples, list) else (1.0 if samples.index == 1 else None)

    with function_registry.temporary("test:judge", judge):
        state = state_with(Script({}), missing_reward="remove", group_rm=group_rm)
        state.args.custom_rm_path = "test:judge"
        group = await generate_and_rm_group(state, make_group(), PARAMS)
        assert [(s.reward, s.remove_sample) for s in group] == [(0.0, True), (1.0, False), (0.0, True)]
        assert state.missing_rewards == 2
        if not group_rm:  # an evaluation says so, and does not take 0 for an answer
            assert (await generate_and_rm(state, make_group()[0], PARAMS, evaluation=True)).reward is None
