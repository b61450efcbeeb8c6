"""Plug-ins of every accepted shape, called the one way that the library calls them."""

from __future__ import annotations

import asyncio

import pytest

from miles.rollout.base_types import (
    GenerateFnInput,
    GenerateFnOutput,
    RolloutFnConstructorInput,
    RolloutFnEvalInput,
    RolloutFnEvalOutput,
    RolloutFnTrainInput,
    RolloutFnTrainOutput,
)
from miles.rollout.inference_rollout.compatibility import (
    LegacyRolloutFnAdapter,
    call_generate_function,
    call_rollout_function,
    load_generate_function,
    load_rollout_function,
)
from miles.rollout.inference_rollout.inference_rollout_common import GenerateState
from miles.utils.async_utils import close_async_loop
from miles.utils.misc import function_registry
from miles.utils.types import Sample
from tests.fast.rollout.engine_stub import make_args


@pytest.fixture(autouse=True)
def _close_shared_loop():
    yield
    close_async_loop()


CONSTRUCTOR_INPUT = RolloutFnConstructorInput(args=make_args(), data_source="the data source")
GROUPS = [[Sample(index=0)]]
EVAL_DATA = {"set": {"rewards": [1.0], "truncated": [False], "samples": []}}


def raw(args, rollout_id, data_source, evaluation=False):
    assert (args, rollout_id, data_source) == (CONSTRUCTOR_INPUT.args, 5, "the data source")
    return EVAL_DATA if evaluation else GROUPS


def typed(args, rollout_id, data_source, evaluation=False):
    return RolloutFnEvalOutput(EVAL_DATA) if evaluation else RolloutFnTrainOutput(GROUPS, metrics={"m": 1})


async def raw_async(args, rollout_id, data_source, evaluation=False):
    await asyncio.sleep(0)
    return EVAL_DATA if evaluation else GROUPS


class Sync:
    def __init__(self, input):
        assert input is CONSTRUCTOR_INPUT

    def __call__(self, input):
        return RolloutFnEvalOutput(EVAL_DATA) if input.evaluation else RolloutFnTrainOutput(GROUPS)


class Async(Sync):
    async def __call__(self, input):
        await asyncio.sleep(0)
        return super().__call__(input)


@pytest.mark.parametrize("plugin", [raw, typed, raw_async, Sync, Async], ids=lambda p: p.__name__)
@pytest.mark.parametrize("evaluation", [False, True], ids=["train", "eval"])
def test_every_shape_of_rollout_function_gives_typed_output(plugin, evaluation):
    with function_registry.temporary("plugin", plugin):
        fn = load_rollout_function(CONSTRUCTOR_INPUT, "plugin")
    output = call_rollout_function(fn, RolloutFnEvalInput(5) if evaluation else RolloutFnTrainInput(5))
    if evaluation:
        assert isinstance(output, RolloutFnEvalOutput)
        assert output.data is EVAL_DATA
    else:
        assert isinstance(output, RolloutFnTrainOutput)
        assert output.samples is GROUPS
    assert isinstance(fn, LegacyRolloutFnAdapter) == (not isinstance(plugin, type))


def test_a_rollout_class_with_the_wrong_return_is_named_with_the_value():
    class Forgetful:
        def __init__(self, input):
            pass

        def __call__(self, input):
            return None

    with pytest.raises(ValueError, match=r"Forgetful must return RolloutFnTrainOutput .*, got NoneType: None"):
        call_rollout_function(Forgetful(CONSTRUCTOR_INPUT), RolloutFnTrainInput(0))
    with pytest.raises(ValueError, match=r"must return RolloutFnEvalOutput for evaluation"):
        call_rollout_function(lambda input: RolloutFnTrainOutput([]), RolloutFnEvalInput(0))


def test_an_empty_or_uncallable_rollout_function_path_is_refused():
    with pytest.raises(ValueError, match="the path is empty"):
        load_rollout_function(CONSTRUCTOR_INPUT, "")
    with function_registry.temporary("plugin", 3), pytest.raises(ValueError, match="'plugin' is not a rollout"):
        load_rollout_function(CONSTRUCTOR_INPUT, "plugin")


def test_errors_of_an_async_rollout_function_arrive_as_they_are():
    async def failing(args, rollout_id, data_source, evaluation=False):
        raise LookupError("inside")

    with pytest.raises(LookupError, match="inside"):
        call_rollout_function(LegacyRolloutFnAdapter(CONSTRUCTOR_INPUT, failing), RolloutFnTrainInput(0))


def answered(sample: Sample, text: str) -> Sample:
    sample.response, sample.status = text, Sample.Status.COMPLETED
    return sample


async def legacy(args, sample, sampling_params):
    assert sampling_params == {"max_new_tokens": 4}
    return answered(sample, "legacy")


async def legacy_with_evaluation(args, sample, sampling_params, evaluation=False):
    return answered(sample, f"legacy evaluation={evaluation}")


async def legacy_list(args, sample, sampling_params):
    return [answered(sample, "one"), answered(Sample(), "two")]


def legacy_sync(args, sample, sampling_params):
    return answered(sample, "sync")


async def modern(input: GenerateFnInput) -> GenerateFnOutput:
    return GenerateFnOutput(answered(input.sample, "modern"))


class Modern:
    async def __call__(self, input):
        return GenerateFnOutput([answered(input.sample, "class")])


@pytest.mark.parametrize(
    ("plugin", "texts"),
    [
        (legacy, "legacy"),
        (legacy_with_evaluation, "legacy evaluation=True"),
        (legacy_list, ["one", "two"]),
        (legacy_sync, "sync"),
        (modern, "modern"),
        (Modern, ["class"]),
    ],
    ids=lambda p: getattr(p, "__name__", ""),
)
async def test_every_shape_of_generate_function_gives_samples(plugin, texts):
    with function_registry.temporary("plugin", plugin):
        fn = load_generate_function("plugin")
    input = GenerateFnInput(GenerateState(make_args()), Sample(), {"max_new_tokens": 4}, True)
    samples = await call_generate_function(fn, input)
    assert ([s.response for s in samples] if isinstance(samples, list) else samples.response) == texts


async def generate_nothing(input):
    return GenerateFnOutput(None)


async def generate_bare_sample(input):
    return input.sample


async def generate_empty_list(args, sample, sampling_params):
    return []


@pytest.mark.parametrize("plugin", [generate_nothing, generate_bare_sample, generate_empty_list])
async def test_a_generate_function_with_the_wrong_return_is_named_with_the_value(plugin):
    with function_registry.temporary("plugin", plugin):
        fn = load_generate_function("plugin")
    input = GenerateFnInput(GenerateState(make_args()), Sample(), {}, False)
    with pytest.raises(ValueError, match=rf"{plugin.__name__} must return GenerateFnOutput .*, got "):
        await call_generate_function(fn, input)


def test_no_path_is_no_generate_function():
    assert load_generate_function(None) is None


async def called(generate) -> Sample:
    input = GenerateFnInput(GenerateState(make_args()), Sample(group_index=1, index=5), {}, False)
    return await call_generate_function(generate, input)


@pytest.mark.parametrize("status", ["aborted", "completed", None, 3])
@pytest.mark.parametrize("several", [False, True])
async def test_a_status_that_is_none_is_named_with_function_and_sample(status, several):
    def sloppy(input):
        input.sample.response, input.sample.status = "yes", status
        return GenerateFnOutput([input.sample] if several else input.sample)

    with pytest.raises(ValueError, match=rf"sloppy returned sample 5 of group 1 with .*{status!r} as its status"):
        await called(sloppy)


async def test_an_answer_that_is_still_pending_is_completed():
    def answers(input):
        input.sample.response = "yes"
        return GenerateFnOutput(input.sample)

    assert (await called(answers)).status is Sample.Status.COMPLETED


async def test_a_sample_that_comes_back_as_it_went_is_an_error():
    def forgets(input):
        return GenerateFnOutput(input.sample)

    with pytest.raises(ValueError, match=r"forgets returned sample 5 of group 1 without an answer, and still PENDING"):
        await called(forgets)
