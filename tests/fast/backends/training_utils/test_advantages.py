from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.backends.training_utils.advantages import (
    compute_advantages_and_returns,
    discounted_sums,
    generalized_advantages,
)


def batch(**fields: Any) -> dict[str, Any]:
    """One sample of four tokens, of which the second is a tool's; the policy is 0.1, 0.2, ... above the reference."""
    return {
        "response_lengths": [4],
        "loss_masks": [torch.tensor([1, 0, 1, 1])],
        "rewards": [2.0],
        "sample_indices": [7],
        "log_probs": [torch.tensor([-1.0, -1.0, -1.0, -1.0])],
        "ref_log_probs": [torch.tensor([-1.1, -1.2, -1.3, -1.4])],
        **fields,
    }


def run(data: dict[str, Any], **flags: Any) -> tuple[torch.Tensor, torch.Tensor]:
    compute_advantages_and_returns(Namespace(**flags), data)
    return torch.cat(data["advantages"]), torch.cat(data["returns"])


@pytest.mark.parametrize("estimator", ["grpo", "gspo"])
def test_grpo_gives_every_token_the_reward(estimator: str) -> None:
    data = batch(
        response_lengths=[2, 1], loss_masks=[torch.ones(2), torch.ones(1)], rewards=[0.5, -0.5], sample_indices=[7, 8]
    )
    advantages, returns = run(data, advantage_estimator=estimator)
    assert advantages.tolist() == returns.tolist() == [0.5, 0.5, -0.5]
    assert [row.shape for row in data["advantages"]] == [(2,), (1,)]


def test_reinforce_plus_plus_discounts_from_the_end() -> None:
    # k1 at the unmasked tokens: 0.1, -, 0.3, 0.4; token rewards -0.5 kl = -0.05, 0, -0.15, -0.2, plus 2 at the last.
    # Returns with gamma 1/2: 1.8; -0.15 + 0.9 = 0.75; 0 + 0.375; -0.05 + 0.1875 = 0.1375.
    _, returns = run(
        batch(), advantage_estimator="reinforce_plus_plus", kl_coef=0.5, gamma=0.5, normalize_advantages=True
    )
    torch.testing.assert_close(returns, torch.tensor([0.1375, 0.375, 0.75, 1.8]))


def test_reinforce_plus_plus_rewards_the_last_unmasked_token() -> None:
    data = batch(loss_masks=[torch.tensor([1, 1, 0, 0])])
    _, returns = run(data, advantage_estimator="reinforce_plus_plus", gamma=0.5, normalize_advantages=True)
    # The reward 2 lies at the second token: 2 / 2 = 1 at the first, and nothing behind it.
    assert returns.tolist() == [1.0, 2.0, 0.0, 0.0]


def test_reinforce_plus_plus_baseline_spreads_reward_and_penalty() -> None:
    # r - 0.5 kl = 2 - 0.05, 2 (masked: no penalty), 2 - 0.15, 2 - 0.2.
    _, returns = run(
        batch(), advantage_estimator="reinforce_plus_plus_baseline", kl_coef=0.5, normalize_advantages=True
    )
    torch.testing.assert_close(returns, torch.tensor([1.95, 2.0, 1.85, 1.8]))


def test_advantages_are_whitened_over_unmasked_tokens_only() -> None:
    # Unmasked returns 1.95, 1.85, 1.8: mean 1.866667, deviations 0.083333, -0.016667, -0.066667,
    # variance (0.006944 + 0.000278 + 0.004444) / 2 = 0.005833, root 0.076376: 1.0911, -0.2182, -0.8729.
    advantages, _ = run(
        batch(), advantage_estimator="reinforce_plus_plus_baseline", kl_coef=0.5, normalize_advantages=True
    )
    torch.testing.assert_close(advantages[[0, 2, 3]], torch.tensor([1.0911, -0.2182, -0.8729]), atol=1e-4, rtol=0)


def test_ppo_estimates_over_the_unmasked_tokens() -> None:
    # Unmasked values 0.5, 1.0, 2.0 (the tool's 9 is skipped), reward 2 at the end, gamma 0.5, lambda 0.5.
    # delta: 0.5 * 1 - 0.5 = 0; 0.5 * 2 - 1 = 0; 2 - 2 = 0 would be dull, so the reward is 3: last delta 1.
    # A: 1; 0 + 0.25 * 1 = 0.25; 0 + 0.25 * 0.25 = 0.0625. Returns A + V: 3, 1.25, 0.5625.
    data = batch(values=[torch.tensor([0.5, 9.0, 1.0, 2.0])], rewards=[3.0])
    advantages, returns = run(data, advantage_estimator="ppo", gamma=0.5, lambd=0.5)
    assert advantages.tolist() == [0.0625, 0.0, 0.25, 1.0]
    assert returns.tolist() == [0.5625, 0.0, 1.25, 3.0]


@pytest.mark.parametrize("estimator", ["ppo", "reinforce_plus_plus"])
def test_a_fully_masked_sample_gives_zeros(estimator: str) -> None:
    data = batch(loss_masks=[torch.zeros(4)], values=[torch.ones(4)])
    advantages, returns = run(data, advantage_estimator=estimator, normalize_advantages=True)
    assert advantages.tolist() == returns.tolist() == [0.0] * 4


def test_an_empty_response_is_no_special_case() -> None:
    for estimator in ("grpo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        data = batch(
            response_lengths=[0, 4],
            loss_masks=[torch.zeros(0), torch.ones(4)],
            rewards=[1.0, 1.0],
            sample_indices=[7, 8],
            values=[torch.zeros(0), torch.zeros(4)],
        )
        run(data, advantage_estimator=estimator, normalize_advantages=True)
        assert [len(row) for row in data["advantages"]] == [0, 4]


def test_the_rollouts_log_probs_replace_the_trainers() -> None:
    data = batch(rollout_log_probs=[torch.tensor([-1.1, -1.2, -1.3, -1.4])])
    _, returns = run(
        data,
        advantage_estimator="reinforce_plus_plus_baseline",
        kl_coef=0.5,
        normalize_advantages=True,
        use_rollout_logprobs=True,
    )
    torch.testing.assert_close(returns, torch.full((4,), 2.0))


def test_distillation_subtracts_the_distance_to_the_teacher() -> None:
    # student - teacher = -1 + 1.5 = 0.5 at each token; 2 - 3 * 0.5 = 0.5.
    data = batch(teacher_log_probs=[[-1.5] * 4])
    advantages, _ = run(data, use_opd=True, opd_kl_coef=3.0)
    torch.testing.assert_close(advantages, torch.full((4,), 0.5))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-5, 5), max_size=40), st.floats(0, 1))
def test_doubling_equals_the_loop(values: list[float], discount: float) -> None:
    expected, running = [], 0.0
    for value in reversed(values):
        running = value + discount * running
        expected.append(running)
    ours = discounted_sums(torch.tensor(values, dtype=torch.float64), discount)
    torch.testing.assert_close(ours, torch.tensor(expected[::-1], dtype=torch.float64))


def test_gae_with_lambda_one_is_return_minus_value() -> None:
    rewards, values = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.3, 0.2, 0.1])
    advantages, returns = generalized_advantages(rewards, values, torch.ones(3), gamma=1.0, lambd=1.0)
    torch.testing.assert_close(returns, torch.tensor([3.0, 3.0, 2.0]))
    torch.testing.assert_close(advantages, returns - values)


@pytest.mark.parametrize(
    ("fields", "flags", "message"),
    [
        ({"rewards": [float("nan")]}, {}, "rewards: sample 7 has the reward nan; a reward must be finite"),
        ({"rewards": [1.0, 2.0]}, {}, "rewards: 2 entries for 1 samples"),
        ({}, {"advantage_estimator": "ppo"}, "--advantage-estimator ppo needs 'values'"),
        ({}, {"advantage_estimator": "ppo", "kl_coef": 0.1}, "--kl-coef must be 0"),
        ({}, {"advantage_estimator": "reinforce_plus_plus"}, "needs --normalize-advantages"),
        ({"ref_log_probs": None}, {"kl_coef": 0.1}, "--kl-coef 0.1 needs 'ref_log_probs'"),
        ({"log_probs": [torch.zeros(3)]}, {"kl_coef": 0.1}, "log_probs: sample 7 has shape"),
        ({}, {"advantage_estimator": "td"}, "--advantage-estimator must be one of grpo, gspo"),
        ({}, {"gamma": 1.5}, r"--gamma must be in \[0, 1\], got 1.5"),
    ],
)
def test_mistakes_are_named(fields: dict[str, Any], flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(batch(**fields), **flags)
