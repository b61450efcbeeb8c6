from __future__ import annotations

import math
from argparse import Namespace
from typing import Any

import pytest

from miles.ray.rollout.rewards import centered, groups_by_index, normalize_rewards
from miles.utils.misc import function_registry
from miles.utils.types import Sample


def samples_of(rewards: list[Any], groups: list[int | None]) -> list[Sample]:
    return [
        Sample(index=10 + i, group_index=group, reward=reward)
        for i, (reward, group) in enumerate(zip(rewards, groups, strict=True))
    ]


def flags(**more: Any) -> Namespace:
    return Namespace(**{"advantage_estimator": "grpo", "n_samples_per_prompt": 4, "rollout_batch_size": 2, **more})


def test_group_mean_and_unbiased_deviation() -> None:
    # 1, 0, 0, 1: mean 1/2, variance 4 * 1/4 / 3 = 1/3, deviation 0.577350: +-0.5 / 0.577351 = +-0.866024.
    assert centered([1.0, 0.0, 0.0, 1.0], scale=True) == pytest.approx([0.866024, -0.866024, -0.866024, 0.866024])
    assert centered([1.0, 0.0, 0.0, 1.0], scale=False) == [0.5, -0.5, -0.5, 0.5]


def test_the_small_constant_is_added_to_the_deviation() -> None:
    # +-5e-7: deviation 7.07e-7, so 5e-7 / 1.707e-6.
    expected = 5e-7 / (math.sqrt(2 * 25e-14) + 1e-6)
    assert centered([1e-6, 0.0], scale=True) == pytest.approx([expected, -expected])


def test_equal_rewards_give_exact_zeros() -> None:
    assert centered([0.1] * 3, scale=True) == [0.0, 0.0, 0.0]


def test_groups_are_told_apart_whatever_their_size_and_order() -> None:
    # Group 0 has 1, 3, 5 (mean 3), group 1 has 10, 20 (mean 15): five samples, which is no 4 * 2.
    raw, rewards = normalize_rewards(
        flags(grpo_std_normalization=False), samples_of([1, 10, 3, 20, 5], [0, 1, 0, 1, 0])
    )
    assert raw == [1.0, 10.0, 3.0, 20.0, 5.0]
    assert rewards == [-2.0, -5.0, 0.0, 5.0, 2.0]


@pytest.mark.parametrize("estimator", ["grpo", "gspo"])
def test_only_grpo_and_gspo_divide(estimator: str) -> None:
    samples = samples_of([1, 0, 0, 1], [0] * 4)
    assert normalize_rewards(flags(advantage_estimator=estimator), samples)[1][0] == pytest.approx(0.866024)
    assert normalize_rewards(flags(advantage_estimator="reinforce_plus_plus_baseline"), samples)[1][0] == 0.5
    assert normalize_rewards(flags(advantage_estimator="ppo"), samples)[1] == [1.0, 0.0, 0.0, 1.0]
    assert normalize_rewards(flags(rewards_normalization=False), samples)[1] == [1.0, 0.0, 0.0, 1.0]


def test_a_group_of_one_is_not_divided() -> None:
    assert normalize_rewards(flags(n_samples_per_prompt=1), samples_of([1, 0], [0, 1]))[1] == [0.0, 0.0]
    # With one prompt sample that was expanded to two training samples there is a difference, but no deviation.
    assert normalize_rewards(flags(n_samples_per_prompt=1), samples_of([1, 0], [0, 0]))[1] == [0.5, -0.5]


def test_without_any_group_index_consecutive_runs_are_the_groups() -> None:
    assert groups_by_index(samples_of([0] * 4, [None] * 4), 2) == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="3 samples are no whole number of groups of --n-samples-per-prompt 2"):
        groups_by_index(samples_of([0] * 3, [None] * 3), 2)
    with pytest.raises(ValueError, match="group_index: sample 11 has none"):
        groups_by_index(samples_of([0] * 3, [0, None, 0]), 3)


def test_reward_key_picks_from_dictionaries() -> None:
    samples = samples_of([{"acc": 1, "len": 9}, {"acc": 0, "len": 9}], [0, 0])
    assert normalize_rewards(flags(reward_key="acc"), samples)[0] == [1.0, 0.0]
    with pytest.raises(ValueError, match=r"sample 10 has a dictionary with the keys \['acc', 'len'\].*--reward-key"):
        normalize_rewards(flags(), samples)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (float("nan"), "sample 11 has nan; it must be finite"),
        (float("inf"), "sample 11 has inf"),
        (None, "sample 11 has None; it must be a number"),
        ("good", "sample 11 has 'good'"),
    ],
)
def test_a_reward_that_is_no_finite_number_names_its_sample(reward: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        normalize_rewards(flags(), samples_of([1, reward], [0, 0]))


def test_the_hook_replaces_everything() -> None:
    def halves(args: Namespace, samples: list[Sample]) -> tuple[list[float], list[float]]:
        return [s.reward for s in samples], [s.reward / 2 for s in samples]

    samples = samples_of([1, 0], [0, 0])
    with function_registry.temporary("halves", halves):
        assert normalize_rewards(flags(custom_reward_post_process_path="halves"), samples) == ([1, 0], [0.5, 0])
    with (
        function_registry.temporary("short", lambda args, samples: ([1.0], [1.0, 2.0])),
        pytest.raises(ValueError, match="--custom-reward-post-process-path: 1 values for 2 samples"),
    ):
        normalize_rewards(flags(custom_reward_post_process_path="short"), samples)


def test_a_sample_without_a_reward_is_left_out_of_its_groups_baseline() -> None:
    samples = samples_of([1, 0, 0, 1, 0], [0] * 5)
    samples[4].metadata["missing_reward"] = "judge"
    samples[4].remove_sample = True
    raw, rewards = normalize_rewards(flags(), samples)
    assert raw == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert rewards == pytest.approx([0.866024, -0.866024, -0.866024, 0.866024, 0.0])


def test_a_group_in_which_no_sample_or_one_has_a_reward_gets_zeros() -> None:
    samples = samples_of([0, 0, 5, 0], [0, 0, 1, 1])
    for i in (0, 1, 3):
        samples[i].metadata["missing_reward"] = "judge"
    assert normalize_rewards(flags(n_samples_per_prompt=2), samples)[1] == [0.0] * 4


def test_a_sample_that_a_filter_removed_keeps_its_reward_and_counts() -> None:
    samples = samples_of([1, 0, 0, 1], [0] * 4)
    samples[0].remove_sample = True
    assert normalize_rewards(flags(), samples)[1] == pytest.approx([0.866024, -0.866024, -0.866024, 0.866024])
