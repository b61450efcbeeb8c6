"""What counts as a reward. A broken one is an error here, by name, rather than a NaN in the loss."""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from miles.utils.types import Sample


class RewardError(ValueError):
    """A reward function returned something that is not a reward."""


def check_reward(reward: Any, source: str, sample: Sample, args: Namespace) -> Any:
    """`reward`, where it is a finite number or a dict with one under the run's reward key; else RewardError.

    A 0-dimensional array or tensor counts as its number. `source`: the function or type, for the error.
    """
    if isinstance(reward, dict):
        return _check_dict(reward, source, sample, args)
    value = _number(reward)
    if value is None or not math.isfinite(value):
        raise RewardError(
            f"{source} returned {reward!r} for sample {sample.index}: expected a finite number, or a dict of them"
        )
    return value


def check_reward_list(rewards: Any, source: str, samples: Sequence[Sample], args: Namespace) -> list[Any]:
    """One reward for each sample, each checked; else RewardError."""
    if hasattr(rewards, "tolist"):  # an array or tensor
        rewards = rewards.tolist()
    if not isinstance(rewards, list | tuple):
        raise RewardError(f"{source} returned {rewards!r} for {len(samples)} samples: expected a list of rewards")
    if len(rewards) != len(samples):
        raise RewardError(f"{source} returned {len(rewards)} rewards for {len(samples)} samples")
    return [check_reward(reward, source, sample, args) for reward, sample in zip(rewards, samples, strict=True)]


def _check_dict(reward: dict[str, Any], source: str, sample: Sample, args: Namespace) -> dict[str, Any]:
    """Eval may read another entry than training, so one of the two keys is enough; without either the user's own
    post-processing reads the dict."""
    keys = [key for key in (getattr(args, "reward_key", None), getattr(args, "eval_reward_key", None)) if key]
    present = [key for key in keys if key in reward]
    if keys and not present:
        raise RewardError(
            f"{source} returned {reward!r} for sample {sample.index}: no entry {' or '.join(map(repr, keys))}"
        )
    for key in present:
        value = _number(reward[key])
        if value is None or not math.isfinite(value):
            raise RewardError(
                f"{source} returned {reward!r} for sample {sample.index}: entry {key!r} is not a finite number"
            )
    return reward


def _number(value: Any) -> float | int | None:
    if isinstance(value, numbers.Real):
        return value  # type: ignore[return-value]
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return _number(value.item())
    return None
