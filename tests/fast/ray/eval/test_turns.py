"""Evaluation and a batch never share engines where the batch ends by aborting what it does not need."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from miles.ray.eval.turns import Turns
from miles.rollout._submission_gate import PausableSubmission
from tests.fast.virtual_time import virtual


class Pausable(PausableSubmission): ...


@pytest.mark.parametrize(("rollout_fn", "seconds"), [(object(), 10), (Pausable(), 5)])
def test_only_what_can_pause_goes_on_beside_evaluation(rollout_fn: Any, seconds: float) -> None:
    @virtual
    async def both() -> None:
        turns = Turns()

        async def work() -> None:
            async with turns.of(rollout_fn):
                await asyncio.sleep(5)

        await asyncio.gather(work(), work())
        assert asyncio.get_running_loop().time() == seconds

    both()
