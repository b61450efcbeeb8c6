"""A reward that a random model can earn and learn: how many of its tokens have an even id."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import Namespace

    from miles.utils.types import Sample


async def even_tokens(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """Share of the response's tokens with an even id, 0 to 1; about a half before training."""
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    return sum(token % 2 == 0 for token in response) / max(1, len(response))
