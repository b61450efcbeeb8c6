"""Plug-ins of the runs with SGLang, loaded by dotted path as a user's would be."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.e2e.cpu.plugins import generate_long

if TYPE_CHECKING:
    from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput


async def share_of_letters(args: Any, sample: Any, **kwargs: Any) -> float:
    """A reward that differs between random answers."""
    return sum(character.isalpha() for character in sample.response) / max(1, len(sample.response))


def gate_path(save: Path) -> Path:
    """While this file exists, `generate_long_behind_a_gate` begins nothing new."""
    return save.with_name(f"{save.name}-gate")


async def generate_long_behind_a_gate(input: GenerateFnInput) -> GenerateFnOutput:
    gate = gate_path(Path(input.args.save))
    while gate.exists():  # noqa: ASYNC110 - the test opens it
        await asyncio.sleep(0.05)
    return await generate_long(input)
