"""Filters for `--dynamic-sampling-filter-path`. A group may hold lists of samples in place of a sample."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from miles.rollout.filter_hub.base_types import DynamicFilterOutput
from miles.utils.types import Sample
from miles.utils.user_calls import on_the_loop

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Iterator

_SMALLEST_STD = 1e-8


@on_the_loop
def check_reward_nonzero_std(args: Namespace, samples: Iterable[Any], **kwargs: Any) -> DynamicFilterOutput:
    """Keep a group whose rewards differ: where they are all the same, every advantage is zero.

    A group is kept when the standard deviation of its rewards (n - 1 in the denominator) exceeds 1e-8; one sample alone
    has none. The reason is "zero_std_" with the first reward, rounded to one decimal. Samples without a reward
    (`--missing-reward remove`) are left out; a group that has no other is refused as "no_reward".
    """
    flat = list(_flatten(samples))
    if not flat:
        raise ValueError("check_reward_nonzero_std: the group has no samples")
    rewards = [float(sample.get_reward_value(args)) for sample in flat if not sample.reward_is_placeholder]
    if not rewards:
        return DynamicFilterOutput(keep=False, reason="no_reward")
    if len(rewards) > 1 and statistics.stdev(rewards) > _SMALLEST_STD:
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{round(rewards[0], 1)}")


@on_the_loop
def check_no_aborted(args: Namespace, samples: Iterable[Any], **kwargs: Any) -> DynamicFilterOutput:
    """Keep a group in which no sample was aborted."""
    if any(sample.status == Sample.Status.ABORTED for sample in _flatten(samples)):
        return DynamicFilterOutput(keep=False, reason="group_has_aborted")
    return DynamicFilterOutput(keep=True)


def _flatten(samples: Iterable[Any]) -> Iterator[Sample]:
    for sample in samples:
        if isinstance(sample, list):
            yield from _flatten(sample)
        else:
            yield sample
