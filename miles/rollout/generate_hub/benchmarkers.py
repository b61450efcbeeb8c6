"""Generate functions that load the engines without regard to what is answered."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from miles.rollout.sglang_rollout import generate

if TYPE_CHECKING:
    from argparse import Namespace

    from miles.utils.types import Sample

OUTPUT_TOKENS = (32 * 1024, 64 * 1024)


async def generate_with_random_osl(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """An answer of a random length between 32k and 64k tokens, whatever the model would say."""
    max_new_tokens = random.randint(*OUTPUT_TOKENS)
    return await generate(args, sample, {**sampling_params, "ignore_eos": True, "max_new_tokens": max_new_tokens})
