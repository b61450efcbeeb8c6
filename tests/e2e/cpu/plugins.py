"""Plug-ins of the end-to-end tests, loaded by dotted path as a user's would be."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.rollout.base_types import RolloutFnEvalOutput
from miles.rollout.checkpoint_eval import CheckpointEvalFn, EvalSkipped
from miles.rollout.generate_hub import single_turn

if TYPE_CHECKING:
    from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput, RolloutFnEvalInput


SLOW_STEP_SECS = 5
"""Longer than `ray job stop` waits by itself."""


async def generate_long(input: GenerateFnInput) -> GenerateFnOutput:
    """Answers of full length, so that a request takes longer than a training step and lives across weight updates."""
    input.sampling_params["ignore_eos"] = True
    return await single_turn.generate(input)


async def reward_that_raises(args: Any, sample: Any, **kwargs: Any) -> float:
    raise KeyError(f"no reward for sample {sample.index}")


async def generate_when_released(input: GenerateFnInput) -> GenerateFnOutput:
    """Evaluation answers that wait until the file in metadata["release"] exists."""
    release = Path(input.sample.metadata["release"])
    while not release.exists():  # noqa: ASYNC110, ASYNC240 - another process makes it
        await asyncio.sleep(0.05)
    return await single_turn.generate(input)


class CountWeights(CheckpointEvalFn):
    """A user's evaluation of a checkpoint. It fails once, and leaves out one version."""

    def __call__(self, input: RolloutFnEvalInput) -> RolloutFnEvalOutput:
        assert input.hf_dir is not None
        if input.weight_version == "2":
            raise RuntimeError("the harness broke")
        if input.weight_version == "3":
            raise EvalSkipped("no_quota", "the cluster is full")
        size = sum(path.stat().st_size for path in Path(input.hf_dir).glob("*.safetensors"))
        return RolloutFnEvalOutput(data={}, metrics={"eval/bytes": size})


async def scored(args: Any, sample: Any, **kwargs: Any) -> dict[str, float]:
    """A reward that differs between random answers, for runs with --reward-key score."""
    return {"score": sum(character in "01234" for character in sample.response) / max(1, len(sample.response))}


def wait_before_a_step(args: Any, *rest: Any) -> None:
    """For `--custom-megatron-before-train-step-hook-path`: slow from when the file that the environment names is there;
    the step that is the first to be writes into it."""
    path = Path(os.environ["MILES_TEST_SLOW_STEPS"])
    if path.exists():
        path.write_text("slow")
        time.sleep(SLOW_STEP_SECS)
