"""The plug-ins that docs/user-guide/customization.md shows do what they say."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from miles.rollout.base_types import GenerateFnInput
from miles.rollout.inference_rollout.inference_rollout_common import GenerateState
from miles.utils.types import Sample
from tests.fast.rollout.engine_stub import CharTokenizer, EngineStub, response

PAGE = Path(__file__).resolve().parents[3] / "docs" / "user-guide" / "customization.md"


def example(name: str) -> dict[str, Any]:
    """What the page's file of this name defines."""
    marked = re.escape(f"<!-- tested: file {name} -->")
    block = re.search(rf"^{marked}\n```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert block is not None, f"{PAGE} has no {name}"
    defined: dict[str, Any] = {"__name__": name.removesuffix(".py")}
    exec(block.group(1), defined)
    return defined


async def answer(name: str, sample: Sample, **overrides: Any) -> list[dict[str, Any]]:
    """Let the page's generate function answer `sample`; returns the requests that it sent."""
    async with EngineStub() as engine:
        engine.respond = lambda payload: response("yes", reason="length", weight_version="4")
        state = GenerateState(engine.args(**overrides))
        state.tokenizer, state.processor = CharTokenizer(), None
        input = GenerateFnInput(state, sample, {"max_new_tokens": 8, "temperature": 1.0}, evaluation=False)
        output = await example(name)["generate"](input)
        assert output.samples is sample
        return list(engine.requests)


@pytest.mark.parametrize("name", ["my_generate.py", "my_request.py"])
async def test_a_generate_function_fills_in_the_sample(name: str) -> None:
    sample = Sample(prompt="q?")
    (request,) = await answer(name, sample)
    sample.validate()
    assert request["sampling_params"]["max_new_tokens"] == 8 and request["return_logprob"] is True
    assert sample.tokens == [ord(c) for c in "q?yes"] and sample.response == "yes"
    assert sample.rollout_log_probs == [-0.5] * 3 and sample.weight_versions == ["4"]
    assert sample.status is Sample.Status.TRUNCATED


async def test_a_row_limits_its_own_answer() -> None:
    (request,) = await answer("my_generate.py", Sample(prompt="q?", metadata={"max_new_tokens": 3}))
    assert request["sampling_params"]["max_new_tokens"] == 3


async def test_a_full_context_ends_the_sample_without_a_request() -> None:
    sample = Sample(prompt="q?")
    assert await answer("my_request.py", sample, rollout_max_context_len=2) == []
    assert sample.status is Sample.Status.TRUNCATED and sample.tokens == [ord(c) for c in "q?"]


def test_the_data_source_numbers_its_groups_and_takes_them_back() -> None:
    source = example("my_data.py")["Digits"](Namespace(n_samples_per_prompt=3))
    first, second = source.get_samples(2)
    assert [sample.index for sample in first + second] == list(range(6))
    assert {sample.group_index for sample in first} == {0} and {sample.group_index for sample in second} == {1}
    assert len({sample.prompt for sample in first}) == 1
    assert first[0].label == "".join(sorted(first[0].prompt.removesuffix(">")))
    source.add_samples([first])
    again, fresh = source.get_samples(2)
    assert again is first and fresh[0].group_index == 2
    assert source.get_samples(1)[0][0].index == 9


def test_the_filter_keeps_groups_that_teach() -> None:
    keep = example("my_filter.py")["some_right_some_wrong"]
    args = Namespace(reward_key=None)
    assert keep(args, [Sample(reward=0.0), Sample(reward=1.0)]).keep
    verdict = keep(args, [Sample(reward=1.0), Sample(reward=1.0)])
    assert (verdict.keep, verdict.reason) == (False, "all_1")
