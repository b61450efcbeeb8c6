"""The other ways to train: in turns, and one step off; and two runs at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.cpu.runs import Launcher

pytestmark = [pytest.mark.timeout(240), getattr(pytest.mark, "stage-a-cpu")]


def test_in_turns_every_batch_is_written_by_the_weights_that_it_trains(launcher: Launcher) -> None:
    run = launcher.run(driver="train.py", fully_async=False)
    versions = [(s["rollout/weight_version/min"], s["rollout/weight_version/max"]) for s in run.steps()]
    assert versions == [(1, 1), (2, 2), (3, 3)]
    assert all(step["train/train_rollout_logprob_abs_diff"] < 1e-4 for step in run.steps())


def test_one_step_off_every_later_batch_is_one_version_old(launcher: Launcher) -> None:
    run = launcher.run("--num-rollout", "4", fully_async=False)
    versions = [(s["rollout/weight_version/min"], s["rollout/weight_version/max"]) for s in run.steps()]
    assert versions == [(1, 1), (1, 1), (2, 2), (3, 3)]


def test_two_runs_side_by_side_do_not_disturb_each_other(launcher: Launcher) -> None:
    runs = [launcher.start(), launcher.start()]
    finished = [run.finish() for run in runs]
    for run in finished:
        assert run.exit_code == 0, run.output
        assert len(run.steps()) == 3
    assert finished[0].run_dir != finished[1].run_dir


def test_two_trainers_and_two_engines(launcher: Launcher) -> None:
    run = launcher.run("--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "2", "--check-weight-update-equal")
    assert len(run.steps()) == 3
    assert run.steps()[0]["train/train_rollout_logprob_abs_diff"] < 1e-4
    assert (run.run_dir / "logs" / "trainer-1.log").exists() and (run.run_dir / "logs" / "engine-1.log").exists()
