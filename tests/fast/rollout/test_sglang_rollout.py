from __future__ import annotations

import asyncio
import json

import pytest

from miles.rollout import sglang_rollout
from miles.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from miles.rollout.data_source import RolloutDataSourceWithBuffer
from miles.rollout.sglang_rollout import GenerateState, generate, generate_rollout, get_model_url
from miles.utils.async_utils import close_async_loop
from miles.utils.misc import SingletonMeta, function_registry
from miles.utils.types import Sample
from tests.fast.rollout.engine_stub import CharTokenizer, EngineStub, make_args


@pytest.fixture(autouse=True)
def _fresh_singleton():
    SingletonMeta.clear(GenerateState)
    yield
    SingletonMeta.clear(GenerateState)
    close_async_loop()


def test_the_state_is_one_per_process():
    state = GenerateState(make_args())
    assert GenerateState(make_args(rollout_temperature=0.5)) is state
    assert state.eval_state is state.eval_state
    assert state.eval_state is not state


async def test_generate_answers_one_sample_without_a_reward():
    async with EngineStub() as engine:
        args = engine.args()
        GenerateState(args).tokenizer = CharTokenizer()
        GenerateState(args).processor = None
        params = {"max_new_tokens": 4}
        sample = await generate(args, Sample(prompt="q"), params)
    assert (sample.response, sample.status, sample.reward) == ("ok", Sample.Status.COMPLETED, None)
    assert params == {"max_new_tokens": 4}


async def complete(args, sample, sampling_params):
    sample.status, sample.response = Sample.Status.COMPLETED, "done"
    return sample


async def one(args, sample, **kwargs):
    return 1.0


def test_generate_rollout_trains_and_evaluates_through_the_same_code(tmp_path):
    path = tmp_path / "eval.jsonl"
    path.write_text(json.dumps({"input": "A"}) + "\n")
    with function_registry.temporary("test:gen", complete), function_registry.temporary("test:one", one):
        args = make_args(
            custom_generate_function_path="test:gen", custom_rm_path="test:one", eval_prompt_data=["e", str(path)]
        )
        state = GenerateState(args)
        state.eval_state.tokenizer, state.eval_state.processor = CharTokenizer(), None
        train = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
        evaluated = generate_rollout(args, 0, None, evaluation=True)
    assert isinstance(train, RolloutFnTrainOutput)
    assert [len(group) for group in train.samples] == [2, 2]
    assert isinstance(evaluated, RolloutFnEvalOutput)
    assert evaluated.data["e"]["rewards"] == [1.0]
    assert len(state.eval_prompt_dataset_cache) == 1


def test_generate_rollout_raises_what_a_plugin_raises():
    async def failing(args, sample, sampling_params):
        await asyncio.sleep(0)
        raise LookupError("plug-in")

    with function_registry.temporary("test:failing", failing):
        args = make_args(custom_generate_function_path="test:failing")
        with pytest.raises(LookupError, match="plug-in"):
            generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))


def test_the_model_url_is_the_router_unless_there_are_several():
    args = make_args(sglang_router_ip="10.0.0.1", sglang_router_port=3)
    assert get_model_url(args, "any") == "http://10.0.0.1:3/generate"
    args.sglang_model_routers = {"actor": ("10.0.0.2", 4)}
    assert get_model_url(args, "actor", "/x") == "http://10.0.0.2:4/x"
    with pytest.raises(ValueError, match="no router for the model 'judge'; there are actor"):
        get_model_url(args, "judge")


def test_the_names_that_scripts_import_are_there():
    assert set(sglang_rollout.__all__) == {"GenerateState", "generate", "generate_rollout", "get_model_url"}
