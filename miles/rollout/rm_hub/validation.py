"""What counts as a reward. A broken one is an error here, by name, rather than a NaN in the loss.

A missing one - None or NaN, from a reward function that could not decide - is an error, too, unless `--missing-reward
remove` says to take the sample out of training instead.
"""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any

from miles.utils.types import MISSING_REWARD

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from miles.utils.types import Sample


_SHOWN_CHARACTERS = 200


class RewardError(ValueError):
    """A reward function returned something that is not a reward."""


def check_reward(reward: Any, source: str, sample: Sample, args: Namespace) -> Any:
    """`reward`, where it is a finite number or a dict with one under the run's reward key; else RewardError.

    A 0-dimensional array or tensor counts as its number. `source`: the function or type, for the error. With
    `--missing-reward remove` a None or NaN marks the sample (`remove_sample`, MISSING_REWARD) and becomes 0.0.
    """
    if isinstance(sample.metadata, dict):
        sample.metadata.pop(MISSING_REWARD, None)  # of an earlier answer
    removes = getattr(args, "missing_reward", "error") == "remove"
    if isinstance(reward, dict):
        missing = [key for key in _present_keys(reward, args) if _is_missing(reward[key])]
        if missing and removes:
            _mark_missing(sample, source)
            return {**reward, **dict.fromkeys(missing, 0.0)}
        return _check_dict(reward, source, sample, args)
    if removes and _is_missing(reward):
        _mark_missing(sample, source)
        keys = _reward_keys(args)
        return dict.fromkeys(keys, 0.0) if keys else 0.0
    value = _number(reward)
    if value is None or not _is_finite(value):
        raise RewardError(
            f"{source} returned {_shown(reward)} for sample {sample.index}: expected a finite number, or a dict of them"
            f"{_remedy(reward)}"
        )
    return value


def check_reward_list(rewards: Any, source: str, samples: Sequence[Sample], args: Namespace) -> list[Any]:
    """One reward for each sample, each checked; else RewardError."""
    if hasattr(rewards, "tolist"):  # an array or tensor
        rewards = rewards.tolist()
    where = f"{len(samples)} samples"
    if not isinstance(rewards, list | tuple):
        raise RewardError(f"{source} returned {_shown(rewards)} for {where}: expected a list of rewards")
    if len(rewards) != len(samples):
        raise RewardError(
            f"{source} returned {len(rewards)} rewards for {where} ({[sample.index for sample in samples]})"
        )
    return [check_reward(reward, source, sample, args) for reward, sample in zip(rewards, samples, strict=True)]


def _check_dict(reward: dict[str, Any], source: str, sample: Sample, args: Namespace) -> dict[str, Any]:
    """Eval may read another entry than training, so one of the two keys is enough; without either the user's own
    post-processing reads the dict."""
    keys, present = _reward_keys(args), _present_keys(reward, args)
    if keys and not present:
        raise RewardError(
            f"{source} returned {_shown(reward)} for sample {sample.index}: no entry {' or '.join(map(repr, keys))}"
        )
    for key in present:
        value = _number(reward[key])
        if value is None or not _is_finite(value):
            raise RewardError(
                f"{source} returned {_shown(reward)} for sample {sample.index}: entry {key!r} is not a finite number"
                f"{_remedy(reward[key])}"
            )
    return reward


def _reward_keys(args: Namespace) -> list[str]:
    keys = (getattr(args, "reward_key", None), getattr(args, "eval_reward_key", None))
    return list(dict.fromkeys(key for key in keys if key))


def _present_keys(reward: dict[str, Any], args: Namespace) -> list[str]:
    return [key for key in _reward_keys(args) if key in reward]


def _mark_missing(sample: Sample, source: str) -> None:
    sample.remove_sample = True
    if isinstance(sample.metadata, dict):
        sample.metadata[MISSING_REWARD] = source


def _is_missing(reward: Any) -> bool:
    if reward is None:
        return True
    value = _number(reward)
    return value is not None and value != value


def _remedy(reward: Any) -> str:
    return " (--missing-reward remove takes such samples out of training)" if _is_missing(reward) else ""


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return f"a {type(value).__name__} that is too long to be shown"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _number(value: Any) -> float | int | None:
    if isinstance(value, numbers.Real):
        return value  # type: ignore[return-value]
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return _number(value.item())
    return None
