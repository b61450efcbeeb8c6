from __future__ import annotations

import json

import pytest

from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnEvalInput
from miles.rollout.inference_rollout.inference_rollout_common import InferenceRolloutFn
from miles.utils.eval_config import EvalDatasetConfig
from miles.utils.misc import function_registry
from miles.utils.types import Sample
from tests.fast.rollout.engine_stub import CharTokenizer, EngineStub, response


@pytest.fixture
async def engine():
    async with EngineStub() as stub:
        stub.respond = lambda payload: response(chr(payload["input_ids"][0]))
        yield stub


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"input": "A", "label": "A"}, {"input": "B", "label": "x", "metadata": {"level": 3}}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(autouse=True)
def _reward():
    async def exact(args, sample, **kwargs):
        return {"acc": float(sample.response == sample.label), "len": len(sample.response)}

    with function_registry.temporary("test:exact", exact):
        yield


def eval_fn(engine, configs, **overrides) -> InferenceRolloutFn:
    flags = {"custom_rm_path": "test:exact", "reward_key": "acc", "eval_datasets": configs, **overrides}
    fn = InferenceRolloutFn(RolloutFnConstructorInput(engine.args(**flags), None))
    fn.state.tokenizer, fn.state.processor = CharTokenizer(), None
    return fn


async def test_every_prompt_is_answered_as_often_as_the_data_set_says(engine, prompts):
    config = EvalDatasetConfig("set", prompts, label_key="label", n_samples_per_eval_prompt=2, rm_type="math")
    output = await eval_fn(engine, [config])(RolloutFnEvalInput(0))
    data = output.data["set"]
    assert data["rewards"] == [1.0, 1.0, 0.0, 0.0]
    assert data["truncated"] == [False] * 4
    assert [s.index for s in data["samples"]] == [0, 1, 2, 3]
    assert [s.group_index for s in data["samples"]] == [0, 0, 1, 1]
    assert data["samples"][2].metadata == {"level": 3, "rm_type": "math"}


async def test_all_data_sets_run_and_their_reward_key_may_differ_from_training(engine, prompts):
    configs = [EvalDatasetConfig(name, prompts, label_key="label") for name in ("one", "two")]
    fn = eval_fn(engine, configs, eval_reward_key="len")
    output = await fn(RolloutFnEvalInput(0))
    assert {name: data["rewards"] for name, data in output.data.items()} == {"one": [1, 1], "two": [1, 1]}
    cached = list(fn.eval_prompt_dataset_cache.values())
    await fn(RolloutFnEvalInput(1))
    assert len(cached) == 2
    assert all(a is b for a, b in zip(cached, fn.eval_prompt_dataset_cache.values(), strict=True))


async def test_sampling_is_the_data_sets_own(engine, prompts):
    config = EvalDatasetConfig(
        "set", prompts, temperature=0.0, top_p=0.5, top_k=1, max_response_len=3, stop=["s"], stop_token_ids=[9],
        min_new_tokens=2,
    )  # fmt: skip
    await eval_fn(engine, [config], rollout_stop=["run"])(RolloutFnEvalInput(0))
    params = engine.requests[0]["sampling_params"]
    expected = {"temperature": 0.0, "top_p": 0.5, "top_k": 1, "max_new_tokens": 3, "stop": ["s"]}
    assert {key: params[key] for key in expected} == expected
    assert (params["stop_token_ids"], params["min_new_tokens"]) == ([9], 2)


async def test_deterministic_mode_seeds_by_repetition(engine, prompts):
    config = EvalDatasetConfig("set", prompts, n_samples_per_eval_prompt=2)
    await eval_fn(engine, [config], sglang_enable_deterministic_inference=True, rollout_seed=5)(RolloutFnEvalInput(0))
    assert sorted(r["sampling_params"]["sampling_seed"] for r in engine.requests) == [5, 5, 6, 6]


async def test_a_data_set_may_bring_its_own_generate_function(engine, prompts):
    async def own(args, sample, sampling_params, evaluation=False):
        assert evaluation
        sample.response, sample.status = "own", Sample.Status.TRUNCATED
        return sample

    config = EvalDatasetConfig("set", prompts, custom_generate_function_path="test:own")
    with function_registry.temporary("test:own", own):
        output = await eval_fn(engine, [config])(RolloutFnEvalInput(0))
    assert output.data["set"]["truncated"] == [True, True]
    assert engine.requests == []


async def test_routing_keys_are_given_where_the_policy_needs_them(engine, prompts):
    fn = eval_fn(engine, [EvalDatasetConfig("set", prompts)], sglang_router_policy="consistent_hashing")
    await fn(RolloutFnEvalInput(0))
    assert len({h["X-SMG-Routing-Key"] for h in engine.headers}) == 2


async def test_a_failing_sample_fails_the_evaluation_with_its_own_error(engine, prompts):
    async def failing(args, sample, sampling_params):
        raise LookupError("plug-in")

    config = EvalDatasetConfig("set", prompts, custom_generate_function_path="test:failing")
    with function_registry.temporary("test:failing", failing), pytest.raises(LookupError, match="plug-in"):
        await eval_fn(engine, [config])(RolloutFnEvalInput(0))


async def test_group_rewards_are_refused(engine, prompts):
    fn = eval_fn(engine, [EvalDatasetConfig("set", prompts)], group_rm=True)
    with pytest.raises(ValueError, match="--group-rm"):
        await fn(RolloutFnEvalInput(0))


async def test_data_sets_come_from_the_flags_where_they_are_not_resolved_yet(engine, prompts):
    fn = eval_fn(engine, None, eval_prompt_data=["flagged", prompts], label_key="label")
    output = await fn(RolloutFnEvalInput(0))
    assert output.data["flagged"]["rewards"] == [1.0, 0.0]


async def test_a_missing_reward_key_is_named(engine, prompts):
    fn = eval_fn(engine, [EvalDatasetConfig("set", prompts)], eval_reward_key="nope")
    with pytest.raises(ValueError, match="--eval-reward-key 'nope'"):
        await fn(RolloutFnEvalInput(0))


async def test_no_data_sets_are_no_results(engine):
    assert (await eval_fn(engine, [])(RolloutFnEvalInput(0))).data == {}
