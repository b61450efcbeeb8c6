"""Rewards as the advantage estimators want them: checked, and compared within each prompt group. Standard library only.

sample.reward --custom post-process--> (raw, rewards)                                 where the flag is given
sample.reward --number, finite--> raw --minus group mean, / (group std + 1e-6)--> rewards
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from miles.utils.misc import load_function
from miles.utils.user_calls import UserCode

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Hashable, Sequence

    from miles.utils.types import Sample

_CENTERED_ESTIMATORS = ("grpo", "gspo", "reinforce_plus_plus_baseline")
_SCALED_ESTIMATORS = ("grpo", "gspo")
_STD_EPS = 1e-6


def normalize_rewards(args: Namespace, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """`(raw_rewards, rewards)`, one of each a sample: what the reward function said, and what training uses.

    For grpo, gspo and reinforce_plus_plus_baseline the mean of the prompt group is subtracted, and for grpo and gspo
    the difference is divided by the unbiased standard deviation of the group + 1e-6 (not with
    --n-samples-per-prompt 1, where a group has no deviation). A group whose rewards are all equal gets exact zeros.
    --disable-rewards-normalization and --disable-grpo-std-normalization switch the two steps off. Groups are told
    apart by `group_index`, whatever the number of samples in them, so trimmed and expanded groups are compared with
    themselves only. A sample without a reward (`--missing-reward remove`) is left out of its group's mean and
    deviation, and gets 0.0; one that a filter marked `remove_sample` has a reward like any other, and counts.

    >>> normalize_rewards(args, samples)      # one group with the rewards 1, 0, 0, 1: mean 0.5, std 0.57735
    ([1.0, 0.0, 0.0, 1.0], [0.866, -0.866, -0.866, 0.866])

    Raises ValueError naming the sample where a reward is missing, not a number, NaN or infinite.
    """
    hook = load_function(getattr(args, "custom_reward_post_process_path", None))
    if hook is not None:
        with UserCode("post-processing of rewards", hook, f"a batch of {len(samples)} samples"):
            raw, rewards = hook(args, list(samples))
        flag = "--custom-reward-post-process-path"
        return _checked(raw, samples, f"raw reward from {flag}"), _checked(rewards, samples, f"reward from {flag}")
    raw = _checked([sample.get_reward_value(args) for sample in samples], samples, "reward")
    estimator = getattr(args, "advantage_estimator", "grpo")
    if estimator not in _CENTERED_ESTIMATORS or not getattr(args, "rewards_normalization", True):
        return raw, list(raw)
    scale = (
        estimator in _SCALED_ESTIMATORS
        and getattr(args, "grpo_std_normalization", True)
        and getattr(args, "n_samples_per_prompt", 1) > 1
    )
    rewards = list(raw)
    missing = [sample.reward_is_placeholder for sample in samples]
    for group in groups_by_index(samples, getattr(args, "n_samples_per_prompt", 1)):
        members = [i for i in group if not missing[i]]
        for i, reward in zip(members, centered([raw[i] for i in members], scale=scale), strict=True):
            rewards[i] = reward
        for i in group:
            if missing[i]:
                rewards[i] = 0.0
    return raw, rewards


def centered(rewards: Sequence[float], *, scale: bool) -> list[float]:
    """Differences from the mean; with `scale` divided by the unbiased standard deviation + 1e-6."""
    if all(reward == rewards[0] for reward in rewards):  # none at all, and one alone, too
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    differences = [reward - mean for reward in rewards]
    if not scale:
        return differences
    std = math.sqrt(math.fsum(d * d for d in differences) / (len(rewards) - 1))
    return [d / (std + _STD_EPS) for d in differences]


def groups_by_index(samples: Sequence[Sample], n_samples_per_prompt: int) -> list[list[int]]:
    """Positions of the samples of each prompt group, in the order in which the groups first appear.

    Where no sample has a `group_index` (a generate function built the samples itself), consecutive runs of
    `n_samples_per_prompt` samples are the groups.

    Raises ValueError where only some samples have one, or the runs do not come out even.
    """
    without = [i for i, sample in enumerate(samples) if sample.group_index is None]
    if without and len(without) < len(samples):
        raise ValueError(
            f"group_index: sample {samples[without[0]].index} has none, but other samples of the batch do; rewards "
            "cannot be compared within its group"
        )
    if without and len(samples) % n_samples_per_prompt:
        raise ValueError(
            f"group_index: no sample has one, and {len(samples)} samples are no whole number of groups of "
            f"--n-samples-per-prompt {n_samples_per_prompt}"
        )
    groups: dict[Hashable, list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(i // n_samples_per_prompt if without else sample.group_index, []).append(i)
    return list(groups.values())


def _checked(values: Sequence[Any], samples: Sequence[Sample], what: str) -> list[float]:
    """The values as floats; ValueError naming the first sample whose value is none."""
    values = list(values)
    if len(values) != len(samples):
        raise ValueError(f"{what}: {len(values)} values for {len(samples)} samples")
    rewards = []
    for value, sample in zip(values, samples, strict=True):
        if isinstance(value, dict):
            raise ValueError(
                f"{what}: sample {sample.index} has a dictionary with the keys {sorted(value)}; name the one to train "
                "on with --reward-key"
            )
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise ValueError(f"{what}: sample {sample.index} has {value!r}; it must be a number") from None
        if not math.isfinite(number):
            raise ValueError(f"{what}: sample {sample.index} has {number}; it must be finite")
        rewards.append(number)
    return rewards
