from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from miles.backends.embedded_engine.random_numbers import seed_state, uniforms
from miles.backends.embedded_engine.sampler import Sampler
from tests.fast.backends.embedded_engine.tiny import grow, make_request

CPU = torch.device("cpu")
PROBS = torch.tensor([0.05, 0.4, 0.25, 0.1, 0.2])
LOGITS = PROBS.log() + 3.7
DRAWS = 4000


def draw(**params: Any) -> tuple[Counter[int], list[tuple[int, float]]]:
    """Tokens of many requests with the same logits, and their log-probs."""
    requests = [make_request([2], f"r{i}", seed=i, **params) for i in range(DRAWS)]
    tokens, logprobs = Sampler(requests, CPU).sample(LOGITS.expand(DRAWS, -1))
    return Counter(tokens), list(zip(tokens, logprobs, strict=True))


def assert_frequencies(counts: Counter[int], probs: dict[int, float]) -> None:
    assert set(counts) == set(probs)
    for token, p in probs.items():
        assert counts[token] / DRAWS == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / DRAWS))


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 2]),
        ({"top_p": 0.7}, [1, 2, 4]),
        ({"top_p": 0.01}, [1]),
        ({"min_p": 0.3}, [1, 2, 4]),
        ({"top_k": 4, "top_p": 0.6, "min_p": 0.55}, [1, 2]),
        ({"top_k": 1}, [1]),
        ({"temperature": 0.0}, [1]),
    ],
)
def test_tokens_come_from_the_renormalised_rest_and_logprobs_from_the_whole(
    params: dict[str, Any], kept: list[int]
) -> None:
    counts, drawn = draw(**params)
    total = sum(PROBS[token].item() for token in kept)
    assert_frequencies(counts, {token: PROBS[token].item() / total for token in kept})
    for token, logprob in drawn[:50]:
        assert logprob == pytest.approx(math.log(PROBS[token].item()), abs=1e-5)


def test_temperature_scales_the_distribution_and_its_logprobs() -> None:
    scaled = torch.softmax(LOGITS / 0.5, dim=0)
    counts, drawn = draw(temperature=0.5)
    assert_frequencies(counts, dict(enumerate(scaled.tolist())))
    for token, logprob in drawn[:50]:
        assert logprob == pytest.approx(math.log(scaled[token].item()), abs=1e-5)


def test_rows_of_one_batch_keep_their_own_settings() -> None:
    settings: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_k": 2}, {"temperature": 2.0}, {"min_p": 0.9}]
    requests = [make_request([2], f"r{i}", seed=i, **params) for i, params in enumerate(settings * 100)]
    tokens, logprobs = Sampler(requests, CPU).sample(LOGITS.expand(len(requests), -1))
    assert set(tokens[0::4]) == {1}
    assert set(tokens[1::4]) == {1, 2}
    assert set(tokens[2::4]) == {0, 1, 2, 3, 4}
    assert set(tokens[3::4]) == {1}
    hot = torch.log_softmax(LOGITS / 2, dim=0)
    assert logprobs[2] == pytest.approx(hot[tokens[2]].item(), abs=1e-5)


def test_penalties_change_the_logits_of_tokens_in_the_output() -> None:
    request = make_request([3, 3], frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=1.5, temperature=0)
    grow(request, [1, 1, 2])
    logits = torch.tensor([[0.5, 4.0, -1.0, 2.0, 0.0]])
    expected = torch.tensor([0.5, (4.0 - 2 * 0.5 - 0.25) / 1.5, (-1.0 - 0.5 - 0.25) * 1.5, 2.0, 0.0])
    sampler = Sampler([request], CPU)
    tokens, logprobs = sampler.sample(logits)
    assert tokens == [3]
    assert logprobs == pytest.approx([torch.log_softmax(expected, 0)[3].item()], abs=1e-5)
    assert logits[0, 1] == 4.0
    grow(request, [3])
    expected[3] = (2.0 - 0.75) / 1.5
    tokens, logprobs = sampler.sample(logits)
    assert tokens == [1]
    assert logprobs == pytest.approx([torch.log_softmax(expected, 0)[1].item()], abs=1e-5)


def test_no_end_token_before_min_new_tokens_and_logprobs_of_the_whole_distribution() -> None:
    requests = [
        make_request([2], f"r{i}", seed=i, min_new_tokens=2, max_new_tokens=5, end_ids=frozenset({1, 999}))
        for i in range(200)
    ]
    sampler = Sampler(requests, CPU)
    logits = LOGITS.expand(200, -1)
    for length in range(3):
        tokens, logprobs = sampler.sample(logits)
        assert (1 in tokens) == (length == 2)
        assert logprobs == pytest.approx([math.log(PROBS[token].item()) for token in tokens], abs=1e-5)
        for request, token in zip(requests, tokens, strict=True):
            grow(request, [token])


def test_top_p_before_min_new_tokens_counts_what_may_be_drawn() -> None:
    # Without token 1 (0.4), the others' probabilities are 0.083, 0.417, 0.167, 0.333: the largest two make 0.75.
    counts, drawn = draw(top_p=0.7, min_new_tokens=1, end_ids=frozenset({1}))
    assert_frequencies(counts, {2: 5 / 9, 4: 4 / 9})
    assert all(logprob == pytest.approx(math.log(PROBS[token].item()), abs=1e-5) for token, logprob in drawn)


def test_a_token_of_probability_0_is_never_drawn() -> None:
    logits = torch.full((DRAWS, 7), -torch.inf)
    logits[:, 3] = 0.0
    requests = [make_request([2], f"r{i}", seed=i) for i in range(DRAWS)]
    tokens, logprobs = Sampler(requests, CPU).sample(logits)
    assert set(tokens) == {3}
    assert set(logprobs) == {0.0}


def test_nan_logits_give_a_token_of_the_vocabulary() -> None:
    tokens, logprobs = Sampler([make_request([2])], CPU).sample(torch.full((1, 7), torch.nan))
    assert 0 <= tokens[0] < 7
    assert math.isnan(logprobs[0])


def test_uniform_numbers_are_uniform_and_depend_on_seed_and_position_alone() -> None:
    states = np.array([seed_state(seed) for seed in range(500)], dtype=np.uint64)
    numbers = np.concatenate([uniforms(states, np.full(500, position, dtype=np.uint64)) for position in range(40)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert np.abs(counts - 1000).max() < 150
    assert len(np.unique(numbers)) == len(numbers)
    assert uniforms(states[7:8], np.array([3], dtype=np.uint64))[0] == numbers[3 * 500 + 7]
