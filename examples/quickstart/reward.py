"""The quickstart's reward, a user plug-in: ``--custom-rm-path examples.quickstart.reward.reward``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import Namespace

    from miles.utils.types import Sample


def exact_match(sample: Sample) -> float:
    """1.0 for the right answer, 0.0 for any other."""
    return float(sample.response.strip() == sample.label)


async def reward(args: Namespace, sample: Sample | list[Sample], **kwargs: Any) -> float | list[float]:
    """Score one sample, or each of a list (miles passes a list with ``--group-rm``)."""
    if isinstance(sample, list):
        return [exact_match(one) for one in sample]
    return exact_match(sample)
