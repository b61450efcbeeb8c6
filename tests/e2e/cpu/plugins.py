"""Plug-ins of the end-to-end tests, loaded by dotted path as a user's would be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles.rollout.generate_hub import single_turn

if TYPE_CHECKING:
    from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput


async def generate_long(input: GenerateFnInput) -> GenerateFnOutput:
    """Answers of full length, so that a request takes longer than a training step and lives across weight updates."""
    input.sampling_params["ignore_eos"] = True
    return await single_turn.generate(input)


async def reward_that_raises(args: Any, sample: Any, **kwargs: Any) -> float:
    raise KeyError(f"no reward for sample {sample.index}")
