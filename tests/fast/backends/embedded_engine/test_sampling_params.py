from __future__ import annotations

from typing import Any

import pytest

from miles.backends.embedded_engine.errors import RequestError, UnsupportedField
from miles.backends.embedded_engine.sampling_params import SamplingParams


def test_absent_and_null_fields_have_the_defaults() -> None:
    assert SamplingParams.from_json(None) == SamplingParams.from_json({}) == SamplingParams()
    nulls = dict.fromkeys(SamplingParams.__annotations__) | {"json_schema": None, "regex": None}
    assert SamplingParams.from_json(nulls) == SamplingParams()


def test_fields_are_converted() -> None:
    params = SamplingParams.from_json(
        {"temperature": 1, "top_k": 5.0, "stop": "x", "stop_token_ids": [3, 3, 4], "max_new_tokens": 7}
    )
    assert params == SamplingParams(
        temperature=1.0, top_k=5, stop=("x",), stop_token_ids=frozenset({3, 4}), max_new_tokens=7
    )


@pytest.mark.parametrize("name", ["bar", "json_schema", "logit_bias", "beam_width"])
def test_any_other_field_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedField, match=name) as caught:
        SamplingParams.from_json({name: 1})
    assert isinstance(caught.value.body["error"], str)


def test_an_unknown_name_is_refused_even_if_null() -> None:
    with pytest.raises(UnsupportedField):
        SamplingParams.from_json({"bar": None})


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"temperature": True},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": 0},
        {"top_k": 1.5},
        {"min_p": -0.1},
        {"frequency_penalty": 3},
        {"presence_penalty": -3},
        {"repetition_penalty": 0},
        {"max_new_tokens": -1},
        {"max_new_tokens": 3, "min_new_tokens": 4},
        {"n": 0},
        {"n": 10**9},
        {"stop": [""]},
        {"stop": [1]},
        {"stop": ["x"] * 65},
        {"stop_token_ids": ["a"]},
        {"ignore_eos": 1},
        [1],
    ],
)
def test_bad_values_are_refused_with_the_value(bad: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams.from_json(bad)
    assert caught.value.status == 400
    assert "message" in caught.value.body["error"]
