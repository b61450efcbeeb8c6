"""A reward that differs between random answers."""

from __future__ import annotations

from typing import Any


async def share_of_letters(args: Any, sample: Any, **kwargs: Any) -> float:
    return sum(character.isalpha() for character in sample.response) / max(1, len(sample.response))
