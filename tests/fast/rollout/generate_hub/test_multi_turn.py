from __future__ import annotations

import argparse
from contextlib import ExitStack

import pytest

from miles.rollout.base_types import GenerateFnInput
from miles.rollout.generate_hub import multi_turn
from miles.rollout.inference_rollout.inference_rollout_common import GenerateState
from miles.utils.misc import function_registry
from miles.utils.types import Sample
from tests.fast.rollout.engine_stub import CharTokenizer, EngineStub, response

SPECS = [{"type": "function", "function": {"name": "add"}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
OBSERVATION = "<tool>3<assistant>"


async def execute(name, arguments):
    assert name == "add"
    return str(arguments["a"] + arguments["b"])


@pytest.fixture(autouse=True)
def _tools():
    with ExitStack() as stack:
        for name, value in (("t:specs", SPECS), ("t:execute", execute)):
            stack.enter_context(function_registry.temporary(name, value))
        yield


async def trajectory(answers, *, max_new_tokens=200, **overrides):
    flags = {"generate_tool_specs_path": "t:specs", "generate_execute_tool_function_path": "t:execute", **overrides}
    async with EngineStub() as engine:
        queue = list(answers)
        engine.respond = lambda payload: queue.pop(0)
        state = GenerateState(engine.args(**flags))
        state.tokenizer, state.processor = CharTokenizer(), None
        original = Sample(index=1, prompt=[{"role": "user", "content": "q"}])
        output = await multi_turn.generate(GenerateFnInput(state, original, {"max_new_tokens": max_new_tokens}, False))
    assert output.samples is not original
    assert original == Sample(index=1, prompt=original.prompt)
    output.samples.validate()
    return output.samples, engine.requests


async def test_tools_run_between_answers_and_their_results_are_masked():
    sample, requests = await trajectory([response(CALL, weight_version="1"), response("3!", weight_version="2")])
    assert sample.response == CALL + OBSERVATION + "3!"
    assert sample.loss_mask == [1] * len(CALL) + [0] * len(OBSERVATION) + [1, 1]
    assert sample.rollout_log_probs == [-0.5] * len(CALL) + [0.0] * len(OBSERVATION) + [-0.5] * 2
    assert (sample.status, sample.weight_versions) == (Sample.Status.COMPLETED, ["1", "2"])
    prompt = "[1 tools]<user>q<assistant>"
    assert requests[0]["input_ids"] == [ord(c) for c in prompt]
    assert requests[1]["input_ids"] == [ord(c) for c in prompt + CALL + OBSERVATION]
    assert requests[1]["sampling_params"]["max_new_tokens"] == 200 - len(CALL + OBSERVATION)


async def test_an_answer_without_calls_ends_the_trajectory():
    sample, requests = await trajectory([response("done")])
    assert (sample.response, sample.loss_mask, len(requests)) == ("done", [1] * 4, 1)


@pytest.mark.parametrize("reason", ["length", "abort"])
async def test_a_cut_answer_ends_the_trajectory_even_with_a_call_in_it(reason):
    sample, requests = await trajectory([response(CALL, reason=reason)])
    assert len(requests) == 1
    assert sample.status.value == {"length": "truncated", "abort": "aborted"}[reason]


async def test_turns_are_bounded():
    _, requests = await trajectory([response(CALL)] * 3, generate_max_turns=2)
    assert len(requests) == 2


async def test_a_used_up_budget_ends_truncated():
    sample, requests = await trajectory([response(CALL)], max_new_tokens=len(CALL))
    assert (sample.status, len(requests)) == (Sample.Status.TRUNCATED, 1)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"partial_rollout": True}, "--partial-rollout"),
        ({"generate_tool_specs_path": None}, "--generate-tool-specs-path is not set"),
        ({"generate_execute_tool_function_path": None}, "--generate-execute-tool-function-path is not set"),
        ({"generate_tool_call_parser": "morse"}, "'morse' is unknown; known: hermes, qwen"),
    ],
)
async def test_bad_flags_are_named(overrides, message):
    with pytest.raises(ValueError, match=message):
        await trajectory([response("x")], **overrides)


async def test_a_tool_that_returns_no_text_is_named():
    async def broken(name, arguments):
        return 3

    with (
        function_registry.temporary("t:broken", broken),
        pytest.raises(ValueError, match=r"broken must return text, got int: 3"),
    ):
        await trajectory([response(CALL)], generate_execute_tool_function_path="t:broken")


def test_the_flags_are_declared_by_the_function():
    parser = argparse.ArgumentParser()
    multi_turn.generate.add_arguments(parser)
    assert parser.parse_args([]).generate_max_turns == 16
