"""Training batches through the standard rollout function, over HTTP to a protocol stub."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from miles.rollout.base_types import EndOfData, GenerateFnOutput, RolloutFnConstructorInput, RolloutFnTrainInput
from miles.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from miles.rollout.filter_hub.base_types import DynamicFilterOutput
from miles.rollout.inference_rollout import inference_rollout_train
from miles.rollout.inference_rollout.inference_rollout_common import InferenceRolloutFn
from miles.rollout.inference_rollout.inference_rollout_train import get_worker_urls
from miles.utils.misc import function_registry
from miles.utils.types import Sample
from tests.fast.rollout.engine_stub import CharTokenizer, EngineStub, response

ABORTED, COMPLETED = Sample.Status.ABORTED, Sample.Status.COMPLETED


class NumberedSource(RolloutDataSourceWithBuffer):
    """Each prompt is the character of its group index, so that the engine can tell groups apart."""

    def get_samples(self, num_samples):
        groups = super().get_samples(num_samples)
        for group in groups:
            for sample in group:
                sample.prompt = chr(65 + sample.group_index)
        return groups


def group_of(payload) -> int:
    return payload["input_ids"][0] - 65


async def reward_one(args, sample, **kwargs):
    return 1.0


@pytest.fixture
async def engine():
    async with EngineStub() as stub:
        yield stub


@pytest.fixture
def register():
    with ExitStack() as stack:
        stack.enter_context(function_registry.temporary("test:one", reward_one))
        yield lambda name, fn: stack.enter_context(function_registry.temporary(name, fn))


def rollout_fn(engine, source=NumberedSource, **overrides) -> InferenceRolloutFn:
    args = engine.args(custom_rm_path="test:one", **overrides)
    fn = InferenceRolloutFn(RolloutFnConstructorInput(args, source(args)))
    fn.state.tokenizer, fn.state.processor = CharTokenizer(), None
    return fn


def indices(groups) -> list[int]:
    return [group[0].group_index for group in groups]


async def test_a_batch_is_complete_sorted_and_rewarded(engine, register):
    late = asyncio.Event()

    async def generate(args, sample, sampling_params):
        if sample.group_index == 0:
            await late.wait()
        else:
            late.set()
        sample.status = COMPLETED
        return sample

    register("test:generate", generate)
    fn = rollout_fn(engine, custom_generate_function_path="test:generate", rollout_batch_size=3)
    output = await fn(RolloutFnTrainInput(0))
    assert indices(output.samples) == [0, 1, 2]
    assert [len(group) for group in output.samples] == [2, 2, 2]
    assert all(s.reward == 1.0 for group in output.samples for s in group)
    assert output.metrics == {}
    assert fn.data_source.get_buffer_length() == 0


async def test_over_sampling_aborts_the_rest_and_gives_their_prompts_back_to_start_over(engine, register):
    engine.holds, engine.expected_held = lambda payload: group_of(payload) in (0, 3), 4
    fn = rollout_fn(engine, over_sampling_batch_size=4)
    output = await fn(RolloutFnTrainInput(0))

    assert indices(output.samples) == [1, 2]
    assert engine.aborts
    assert set(map(str, engine.aborts)) == {"{'abort_all': True}"}
    assert not fn.state.aborted
    assert sorted(indices(fn.data_source.buffer)) == [0, 3]
    for sample in (s for group in fn.data_source.buffer for s in group):
        assert (sample.status, sample.response, sample.tokens) == (ABORTED, "", [])
        assert "start_rollout_id" not in sample.metadata

    engine.holds = lambda payload: False
    again = await fn(RolloutFnTrainInput(1))
    assert indices(again.samples) == [0, 3]


async def test_partial_rollout_keeps_what_was_generated_and_goes_on_from_it(engine, register):
    engine.holds, engine.expected_held = lambda payload: group_of(payload) == 0, 2
    fn = rollout_fn(engine, over_sampling_batch_size=3, partial_rollout=True, mask_offpolicy_in_partial_rollout=True)
    await fn(RolloutFnTrainInput(7))
    (group,) = fn.data_source.buffer
    assert [(s.status, s.response, s.metadata) for s in group] == [(ABORTED, "pa", {"start_rollout_id": 7})] * 2

    engine.holds = lambda payload: False
    engine.requests.clear()
    output = await fn(RolloutFnTrainInput(8))
    resumed = output.samples[0][0]
    assert (resumed.response, resumed.loss_mask, resumed.reward) == ("paok", [0, 0, 1, 1], 1.0)
    assert resumed.metadata == {"start_rollout_id": 7}
    first = next(r for r in engine.requests if group_of(r) == 0)
    assert first["input_ids"] == [ord(c) for c in "Apa"]
    assert first["sampling_params"]["max_new_tokens"] == fn.args.rollout_max_response_len - 2


async def test_groups_finished_beyond_the_batch_go_back_as_fresh_prompts(engine, register):
    async def generate(input):
        input.sample.status, input.sample.response = COMPLETED, "x"
        return GenerateFnOutput(input.sample)

    register("test:generate", generate)
    fn = rollout_fn(engine, custom_generate_function_path="test:generate", over_sampling_batch_size=5)
    output = await fn(RolloutFnTrainInput(0))
    kept, back = indices(output.samples), indices(fn.data_source.buffer)
    assert sorted(kept + back) == [0, 1, 2, 3, 4]
    assert len(kept) == 2
    assert all(s.response == "" and s.reward is None for group in fn.data_source.buffer for s in group)


@pytest.mark.parametrize("reason", ["even", None])
async def test_dynamic_filter_drops_groups_and_refills(engine, register, reason):
    def only_odd(args, group, **kwargs):
        odd = group[0].group_index % 2 == 1
        return odd if reason is None else DynamicFilterOutput(odd, reason)

    register("test:filter", only_odd)
    fn = rollout_fn(engine, dynamic_sampling_filter_path="test:filter")
    output = await fn(RolloutFnTrainInput(0))
    assert indices(output.samples) == [1, 3]
    assert output.metrics == {f"rollout/dynamic_filter/drop_{reason or 'unspecified'}": 2}
    assert fn.data_source.get_buffer_length() == 0


async def test_sample_filter_and_all_samples_hook_see_the_sorted_groups(engine, register):
    seen = {}

    def sample_filter(args, data):
        for group in data:
            group[0].remove_sample = True

    def hook(args, groups, get_samples):
        seen["groups"], seen["more"] = indices(groups), get_samples(1)[0][0].group_index

    register("test:sample_filter", sample_filter)
    register("test:hook", hook)
    register("test:filter", lambda args, group: group[0].group_index > 0)
    fn = rollout_fn(
        engine,
        dynamic_sampling_filter_path="test:filter",
        rollout_sample_filter_path="test:sample_filter",
        rollout_all_samples_process_path="test:hook",
        over_sampling_batch_size=1,
    )
    output = await fn(RolloutFnTrainInput(0))
    assert [s.remove_sample for group in output.samples for s in group] == [True, False] * 2
    assert seen == {"groups": [0, 1, 2], "more": 3}


async def test_a_raising_plugin_fails_the_step_after_everything_else_has_settled(engine, register):
    started, settled = asyncio.Event(), []
    error = LookupError("plug-in")

    async def generate(input):
        if input.sample.index == 3:
            await started.wait()
            raise error
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            settled.append(input.sample.index)

    register("test:generate", generate)
    fn = rollout_fn(engine, custom_generate_function_path="test:generate")
    with pytest.raises(LookupError) as raised:
        await fn(RolloutFnTrainInput(0))
    assert raised.value is error
    assert sorted(settled) == [0, 1, 2]
    assert not fn.state.aborted
    assert asyncio.all_tasks() - {asyncio.current_task()} == engine_tasks()


def engine_tasks() -> set[asyncio.Task]:
    """Tasks of the stub's own connections."""
    return {t for t in asyncio.all_tasks() if "aiohttp" in repr(t.get_coro())}


async def test_a_plugin_that_raises_while_the_rest_is_aborted_fails_the_step_too(engine, register, monkeypatch):
    monkeypatch.setattr(inference_rollout_train, "ABORT_REPEAT_SECS", 0.01)
    waiting = asyncio.Event()

    async def generate(input):
        if input.sample.group_index == 2:
            waiting.set()
            await engine.wait_for_aborts(1)
            assert input.state.aborted
            raise LookupError("late")
        await waiting.wait()
        input.sample.status = COMPLETED
        return GenerateFnOutput(input.sample)

    register("test:generate", generate)
    fn = rollout_fn(engine, custom_generate_function_path="test:generate", over_sampling_batch_size=3)
    with pytest.raises(LookupError, match="late"):
        await fn(RolloutFnTrainInput(0))
    assert not fn.state.aborted


async def test_cancelling_the_step_settles_its_tasks(engine, register):
    engine.holds, engine.expected_held = lambda payload: True, 4
    fn = rollout_fn(engine)
    step = asyncio.ensure_future(fn(RolloutFnTrainInput(0)))
    await engine.all_held.wait()
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert fn.state.busy.active == 0


async def test_the_abort_is_repeated_until_every_group_has_ended(engine, register, monkeypatch):
    """A request that was on its way during the first round is caught by a later one."""
    monkeypatch.setattr(inference_rollout_train, "ABORT_REPEAT_SECS", 0.02)

    async def generate(args, sample, sampling_params):
        if sample.group_index == 2:
            await engine.wait_for_aborts(2)
            sample.status = ABORTED
            return sample
        sample.status = COMPLETED
        return sample

    register("test:generate", generate)
    fn = rollout_fn(engine, custom_generate_function_path="test:generate", over_sampling_batch_size=3)
    output = await fn(RolloutFnTrainInput(0))
    assert indices(output.samples) == [0, 1]
    assert indices(fn.data_source.buffer) == [2]


async def test_a_group_that_an_engine_aborted_is_replaced_and_given_back(engine, register):
    async def generate(args, sample, sampling_params):
        sample.status = ABORTED if sample.index == 1 else COMPLETED
        return sample

    register("test:generate", generate)
    fn = rollout_fn(engine, custom_generate_function_path="test:generate")
    output = await fn(RolloutFnTrainInput(0))
    assert 0 not in indices(output.samples)
    assert len(output.samples) == 2
    assert 0 in indices(fn.data_source.buffer)


async def test_an_expanded_group_goes_back_as_its_flat_prompts(engine, register):
    async def generate(args, sample, sampling_params):
        sample.status = COMPLETED
        if sample.group_index:
            return sample
        return [Sample(index=sample.index, status=ABORTED, response_length=1), Sample(status=COMPLETED)]

    register("test:generate", generate)
    fn = rollout_fn(engine, custom_generate_function_path="test:generate", partial_rollout=True)
    await fn(RolloutFnTrainInput(0))
    group = next(g for g in fn.data_source.buffer if g[0].group_index == 0)
    assert [(s.index, s.status) for s in group] == [(0, ABORTED), (1, ABORTED)]


async def test_a_source_that_takes_nothing_back_does_not_fail_the_step(engine, register, caplog):
    class Plain(RolloutDataSource):
        pass

    async def generate(args, sample, sampling_params):
        sample.status = COMPLETED
        return sample

    register("test:generate", generate)
    fn = rollout_fn(engine, Plain, custom_generate_function_path="test:generate", over_sampling_batch_size=3)
    assert len((await fn(RolloutFnTrainInput(0))).samples) == 2
    assert "1 unused prompt groups are dropped: Plain takes none back" in caplog.text


class Finite(NumberedSource):
    """Ends after `groups` groups; those that were given back come again."""

    groups = 5

    def get_samples(self, num_samples):
        left = self.get_buffer_length() + self.groups - self.sample_group_index
        return super().get_samples(min(num_samples, left))


async def test_the_last_batch_is_what_is_left_and_the_call_after_it_says_that_the_data_has_ended(engine, register):
    fn = rollout_fn(engine, Finite, over_sampling_batch_size=4)
    outputs = [await fn(RolloutFnTrainInput(step)) for step in range(3)]
    assert [(len(output.samples), output.is_last) for output in outputs] == [(2, False), (2, False), (1, True)]
    assert sorted(index for output in outputs for index in indices(output.samples)) == [0, 1, 2, 3, 4]
    for step in (3, 4):
        with pytest.raises(EndOfData):
            await fn(RolloutFnTrainInput(step))


async def test_the_data_has_not_ended_while_an_aborted_group_may_start_again(engine, register):
    aborts = [4, 4]

    async def generate(args, sample, sampling_params):
        unlucky = sample.group_index in aborts
        if unlucky:
            aborts.remove(sample.group_index)
        sample.status = ABORTED if unlucky else COMPLETED
        return sample

    register("test:generate", generate)
    fn = rollout_fn(engine, Finite, rollout_batch_size=8, custom_generate_function_path="test:generate")
    output = await fn(RolloutFnTrainInput(0))
    assert (indices(output.samples), output.is_last) == ([0, 1, 2, 3, 4], True)


async def test_a_filter_that_wants_none_of_the_last_groups_ends_the_data(engine, register):
    register("test:none", lambda args, group, **_: False)
    fn = rollout_fn(engine, Finite, dynamic_sampling_filter_path="test:none")
    with pytest.raises(EndOfData):
        await fn(RolloutFnTrainInput(0))


@pytest.mark.parametrize("returned", [None, "groups"])
async def test_a_source_that_returns_no_groups_is_an_error_not_a_wait(engine, register, returned):
    fn = rollout_fn(engine)
    fn.data_source.get_samples = lambda n: returned
    with pytest.raises(ValueError, match="asked for 2 groups and returned"):
        await fn(RolloutFnTrainInput(3))


async def test_a_group_of_the_wrong_size_is_an_error(engine, register):
    fn = rollout_fn(engine)
    fn.data_source.get_samples = lambda n: [[Sample(prompt="A")]] * n
    with pytest.raises(ValueError, match="a group has 1 members, --n-samples-per-prompt is 2"):
        await fn(RolloutFnTrainInput(0))


async def test_worker_urls_are_the_engines_each_once(engine):
    assert await get_worker_urls(engine.args()) == [engine.url]


async def test_a_router_that_does_not_list_its_engines_at_first_is_asked_again(engine, register, monkeypatch, caplog):
    monkeypatch.setattr(inference_rollout_train, "ABORT_REPEAT_SECS", 0.01)
    engine.unlisted = 1
    engine.holds, engine.expected_held = lambda payload: group_of(payload) == 0, 2
    fn = rollout_fn(engine, over_sampling_batch_size=3)
    output = await fn(RolloutFnTrainInput(0))
    assert indices(output.samples) == [1, 2]
    assert "the router did not list its engines for the abort" in caplog.text


async def test_engines_that_abort_everything_end_the_rollout(engine, monkeypatch):
    monkeypatch.setattr(inference_rollout_train, "MAX_ABORTED_BATCHES", 2)
    engine.respond = lambda payload: response("", reason="abort")
    fn = rollout_fn(engine)
    with pytest.raises(RuntimeError, match="rollout 3: the last 5 groups all came back aborted, with 0 of 2 groups"):
        await fn(RolloutFnTrainInput(3))
