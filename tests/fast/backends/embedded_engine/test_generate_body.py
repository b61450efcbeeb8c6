from __future__ import annotations

import itertools
from typing import Any

import pytest

from miles.backends.embedded_engine.errors import MalformedBody, RequestError
from miles.backends.embedded_engine.generate_body import GenerateBody, ModelLimits, parse_generate_body

LIMITS = ModelLimits(vocab_size=50, context_length=32, end_ids=frozenset({1}))


class WordTokenizer:
    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return " ".join(map(str, ids))


def parse(body: Any, tokenizer: Any = None) -> GenerateBody:
    return parse_generate_body(body, LIMITS, tokenizer or WordTokenizer(), itertools.count().__next__)


def test_one_prompt_is_one_request_and_an_object() -> None:
    body = parse({"input_ids": [3, 4], "rid": "a", "model": None, "anything": 1, "return_hidden_states": False})
    (request,) = body.requests
    assert (request.rid, request.prompt_ids, request.max_new_tokens) == ("a", [3, 4], 30)
    assert (body.is_list, body.stream, body.rids) == (False, False, {"a"})
    assert parse({"text": "aa bbb"}).requests[0].prompt_ids == [2, 3]


def test_a_batch_with_copies_is_a_list_prompt_by_prompt() -> None:
    body = parse(
        {
            "text": ["a", "bb b"],
            "sampling_params": [{"n": 2, "max_new_tokens": 3}, {"max_new_tokens": 4}],
            "rid": ["x", "y"],
            "return_logprob": [True, False],
            "logprob_start_len": 0,
        }
    )
    assert body.is_list
    assert [request.rid for request in body.requests] == ["x_0", "x_1", "y"]
    assert [request.prompt_ids for request in body.requests] == [[1], [1], [2, 1]]
    assert [request.max_new_tokens for request in body.requests] == [3, 3, 4]
    assert [request.input_logprobs_from for request in body.requests] == [0, 0, None]
    assert [request.index for request in body.requests] == [0, 1, 2]
    assert parse({"input_ids": [[3]]}).is_list


def test_copies_have_seeds_of_their_own_that_repeat() -> None:
    first, second = (
        parse({"input_ids": [3], "sampling_params": {"n": 3, "sampling_seed": 5}}).requests for _ in range(2)
    )
    states = [request.seed_state for request in first]
    assert len(set(states)) == 3
    assert states == [request.seed_state for request in second]
    unseeded = [parse({"input_ids": [3]}).requests[0].seed_state for _ in range(1)]
    assert unseeded[0] not in states


def test_end_tokens() -> None:
    def ends(**params: Any) -> frozenset[int]:
        return parse({"input_ids": [3], "sampling_params": params}).requests[0].end_ids

    assert ends() == {1}
    assert ends(stop_token_ids=[7]) == {1, 7}
    assert ends(ignore_eos=True) == set()
    assert ends(ignore_eos=True, stop_token_ids=[7]) == {7}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "Either text, input_ids or input_embeds should be provided."),
        ({"text": "a", "input_ids": [3]}, "Only one of"),
        ({"input_ids": []}, "The prompt is empty."),
        ({"input_ids": [[3], []]}, "The prompt is empty."),
        ({"text": []}, "The batch is empty."),
        ({"input_ids": [50]}, "Token id 50 is not in the vocabulary (0 to 49)."),
        ({"input_ids": [-1]}, "Token id -1"),
        (
            {"input_ids": [3] * 40},
            "The input (40 tokens) is longer than the model's context length (32 tokens).",
        ),
        (
            {"input_ids": [3] * 10, "sampling_params": {"max_new_tokens": 23}},
            "Requested token count exceeds the model's maximum context length of 32 tokens.",
        ),
        ({"input_ids": [3], "top_logprobs_num": 2}, "top_logprobs_num is not supported"),
        ({"input_ids": [3], "lora_path": "x"}, "lora_path is not supported"),
        ({"input_ids": [[3], [4]], "rid": ["a"]}, "rid has 1 entries for 2 prompts."),
        ({"input_ids": [[3], [4]], "rid": ["a", "a"]}, "Duplicate"),
        ({"input_ids": [3], "sampling_params": [{}]}, "sampling_params has 1 entries"),
        ({"input_ids": [[3]] * 9, "sampling_params": {"n": 1000}}, "At most 4096 sequences"),
    ],
)
def test_what_is_wrong_is_said(body: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(body)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        [1],
        {"input_ids": "abc"},
        {"input_ids": [1.5]},
        {"input_ids": [True]},
        {"input_ids": [[1], 2]},
        {"text": 3},
        {"input_ids": [3], "stream": "yes"},
        {"input_ids": [3], "return_logprob": 1},
        {"input_ids": [3], "rid": 7},
    ],
)
def test_wrong_types_are_malformed(body: Any) -> None:
    with pytest.raises(MalformedBody) as caught:
        parse(body)
    assert caught.value.body["object"] == "error"


def test_without_a_tokenizer_text_and_stop_strings_are_refused() -> None:
    def bare(body: Any) -> GenerateBody:
        return parse_generate_body(body, LIMITS, None, lambda: 0)

    with pytest.raises(RequestError, match="send input_ids"):
        bare({"text": "a"})
    with pytest.raises(RequestError, match="use stop_token_ids"):
        bare({"input_ids": [3], "sampling_params": {"stop": "x"}})
    assert bare({"input_ids": [3]}).requests
