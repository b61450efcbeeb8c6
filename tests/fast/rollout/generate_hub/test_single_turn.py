from __future__ import annotations

import pytest

from miles.rollout.base_types import GenerateFnInput
from miles.rollout.generate_hub import single_turn
from miles.rollout.inference_rollout.inference_rollout_common import GenerateState
from miles.utils.http_utils import HttpStatusError
from miles.utils.types import Sample
from tests.fast.rollout.engine_stub import CharTokenizer, EngineStub, response


@pytest.fixture
async def engine():
    async with EngineStub() as stub:
        yield stub


async def generate(engine, sample, *, evaluation=False, max_new_tokens=8, **overrides) -> Sample:
    state = GenerateState(engine.args(**overrides))
    state.tokenizer, state.processor = CharTokenizer(), None
    input = GenerateFnInput(state, sample, {"max_new_tokens": max_new_tokens, "temperature": 1.0}, evaluation)
    output = await single_turn.generate(input)
    assert output.samples is sample
    return sample


async def test_an_answer_fills_the_sample_with_the_engines_own_tokens(engine):
    engine.respond = lambda payload: response("yes", weight_version="4")
    sample = await generate(engine, Sample(prompt="q?"))
    sample.validate()
    assert sample.status is Sample.Status.COMPLETED
    assert sample.response == "yes"
    assert sample.tokens == [ord(c) for c in "q?yes"]
    assert (sample.response_length, sample.rollout_log_probs, sample.loss_mask) == (3, [-0.5] * 3, None)
    assert (sample.weight_versions, sample.oldest_weight_version) == (["4"], 4)
    assert engine.requests[0]["return_logprob"] is True


async def test_a_request_across_a_weight_update_records_each_version_once_oldest_first(engine):
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}]
    engine.respond = lambda payload: response("yes", weight_version="4", weight_versions=spans)
    sample = await generate(engine, Sample(prompt="q"))
    assert sample.weight_versions == ["3", "4"]
    assert sample.oldest_weight_version == 3


@pytest.mark.parametrize(
    ("reason", "status"),
    [("stop", Sample.Status.COMPLETED), ("length", Sample.Status.TRUNCATED), ("abort", Sample.Status.ABORTED)],
)
async def test_the_finish_reason_decides_the_status(engine, reason, status):
    engine.respond = lambda payload: response("a", reason=reason)
    assert (await generate(engine, Sample(prompt="q"))).status is status


async def test_an_aborted_answer_goes_on_from_its_tokens_with_what_is_left(engine):
    engine.respond = lambda payload: response("ab", reason="abort", weight_version="1")
    sample = await generate(engine, Sample(prompt="q"))
    engine.respond = lambda payload: response("cd", weight_version="2")
    await generate(engine, sample)
    assert engine.requests[1]["input_ids"] == [ord(c) for c in "qab"]
    assert engine.requests[1]["sampling_params"]["max_new_tokens"] == 6
    assert (sample.response, sample.response_length, sample.weight_versions) == ("abcd", 4, ["1", "2"])
    assert sample.status is Sample.Status.COMPLETED
    sample.validate()


async def test_tokens_without_text_count_as_a_part_of_the_answer(engine):
    engine.respond = lambda payload: {**response("ab", reason="abort"), "text": ""}
    sample = await generate(engine, Sample(prompt="q"))
    await generate(engine, sample)
    assert engine.requests[1]["input_ids"] == [ord(c) for c in "qab"]


async def test_a_used_up_budget_ends_truncated_without_a_request(engine):
    sample = Sample(prompt="q", tokens=[ord(c) for c in "qab"], response="ab", response_length=2)
    sample.status = Sample.Status.ABORTED
    await generate(engine, sample, max_new_tokens=2)
    assert sample.status is Sample.Status.TRUNCATED
    assert engine.requests == []


async def test_a_prompt_that_fills_the_context_ends_truncated_without_a_request(engine):
    sample = await generate(engine, Sample(prompt="long"), rollout_max_context_len=4)
    assert sample.status is Sample.Status.TRUNCATED
    assert (sample.tokens, sample.response_length) == ([ord(c) for c in "long"], 0)
    assert engine.requests == []


async def test_evaluation_may_have_a_context_of_its_own(engine):
    flags = {"rollout_max_context_len": 4, "eval_max_context_len": 6}
    await generate(engine, Sample(prompt="long"), evaluation=True, **flags)
    assert engine.requests[0]["sampling_params"]["max_new_tokens"] == 2


async def test_a_request_aborted_in_the_queue_adds_nothing(engine):
    engine.respond = lambda payload: {"text": "", "meta_info": {"finish_reason": {"type": "abort"}}}
    sample = await generate(engine, Sample(prompt="q"))
    assert (sample.status, sample.response_length, sample.rollout_log_probs) == (Sample.Status.ABORTED, 0, [])


async def test_a_finished_sample_is_refused(engine):
    with pytest.raises(ValueError, match="sample 3 cannot be generated"):
        await generate(engine, Sample(index=3, status=Sample.Status.COMPLETED))


async def test_the_routing_key_travels_as_a_header(engine):
    await generate(engine, Sample(prompt="q", routing_key="k1"), sglang_router_policy="manual")
    assert engine.headers[0]["X-SMG-Routing-Key"] == "k1"


async def test_an_engine_that_refuses_is_an_error(engine):
    def broken(payload):
        from aiohttp import web

        raise web.HTTPBadRequest(text="no")

    engine.respond = broken
    with pytest.raises(HttpStatusError, match="400"):
        await generate(engine, Sample(prompt="q"))
