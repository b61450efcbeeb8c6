from __future__ import annotations

import pytest

from miles.rollout.generate_hub.benchmarkers import OUTPUT_TOKENS, generate_with_random_osl
from miles.rollout.inference_rollout.compatibility import load_generate_function
from miles.rollout.sglang_rollout import GenerateState
from miles.utils.misc import SingletonMeta
from miles.utils.types import Sample
from tests.fast.rollout.engine_stub import CharTokenizer, EngineStub


@pytest.fixture(autouse=True)
def _fresh_singleton():
    SingletonMeta.clear(GenerateState)
    yield
    SingletonMeta.clear(GenerateState)


async def test_answers_have_a_random_length_and_do_not_end_early():
    async with EngineStub() as engine:
        args = engine.args()
        GenerateState(args).tokenizer = CharTokenizer()
        GenerateState(args).processor = None
        await generate_with_random_osl(args, Sample(prompt="q"), {"max_new_tokens": 1})
    params = engine.requests[0]["sampling_params"]
    assert params["ignore_eos"] is True
    assert OUTPUT_TOKENS[0] <= params["max_new_tokens"] <= OUTPUT_TOKENS[1]


def test_it_is_found_by_its_path():
    assert load_generate_function("miles.rollout.generate_hub.benchmarkers.generate_with_random_osl") is not None
