"""Whatever is killed, and whenever: the resumed run skips no prompt and trains on none twice."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.e2e.cpu.kills import Epoch, Kill

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.cpu.runs import Launcher

pytestmark = [pytest.mark.timeout(400), getattr(pytest.mark, "stage-a-cpu")]

SEED = 20
PLAN = (("driver", "save"), ("rollout_manager", "update"), ("trainer-0", None))


def test_an_epoch_that_is_killed_three_times_trains_each_prompt_exactly_once(
    launcher: Launcher, tmp_path: Path
) -> None:
    rng = random.Random(SEED)
    epoch = Epoch(launcher, tmp_path / "checkpoints")
    for victim, moment in PLAN:
        outcome = epoch.run_until(Kill.draw(rng, victim, moment))
        assert outcome is not None, f"seed {SEED}: the epoch was complete before {victim} was killed"
    epoch.run_to_end()
    epoch.check()
    starts = [outcome.resumed_at for outcome in epoch.outcomes]
    assert starts[0] == 0 and any(starts[1:]), f"seed {SEED}: no run resumed from a set: {epoch.outcomes}"
