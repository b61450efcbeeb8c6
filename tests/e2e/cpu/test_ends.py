"""However a run ends, it ends soon, says why in one message, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from miles.utils.checkpoint_set import newest_readable, read_record
from tests.e2e.cpu.ends import FOREVER, GONE_SECS, IN_CI, End

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.cpu.runs import Launcher, RunningRun

pytestmark = [pytest.mark.timeout(240), getattr(pytest.mark, "stage-a-cpu")]

SAVE_LAST = ("--save-interval", "100000")
AGENTS_GONE_SECS = 90
OURS = ("engine-0", "engine-0-actor", "router", "rollout_manager", "trainer-0")


class Killed:
    """The run whose driver was killed, and when: what is left of it is looked at again at the end."""

    run: RunningRun | None = None
    at: float = 0.0


@pytest.fixture(scope="module")
def killed() -> Iterator[Killed]:
    yield Killed()


def test_nothing_of_ours_outlives_a_killed_driver(launcher: Launcher, killed: Killed) -> None:
    run = launcher.start(*FOREVER)
    run.wait_for_steps(2)
    ours = {name: pid for name, pid in run.pids().items() if name in OURS}
    assert set(ours) == set(OURS)
    run.remember_processes()
    run.send(signal.SIGKILL)
    killed.run, killed.at = run, time.monotonic()
    run.reap()
    left = set(ours.values())
    while left and time.monotonic() < killed.at + GONE_SECS:
        left = {pid for pid in left if is_running(pid)}
        time.sleep(0.1)
    assert not left, f"still there: {[name for name, pid in ours.items() if pid in left]}"


@pytest.mark.parametrize("end", IN_CI, ids=str)
def test_a_process_that_dies_or_stops_ends_the_run_with_its_name_and_its_log(
    launcher: Launcher, tmp_path: Path, end: End
) -> None:
    end.play(launcher, tmp_path / "checkpoints")


def test_a_stopped_run_saves_and_the_same_command_with_load_goes_on(launcher: Launcher, tmp_path: Path) -> None:
    save = tmp_path / "checkpoints"
    run = launcher.start(*FOREVER, "--save", str(save), *SAVE_LAST)
    run.wait_for_steps(3)
    run.remember_processes()
    started = time.monotonic()
    run.send(signal.SIGTERM)  # as `ray job stop` does; Ctrl-C is tests/e2e/cpu/test_fully_async.py's
    stopped = run.finish(timeout_secs=60)
    assert time.monotonic() - started < GONE_SECS + 5
    assert stopped.exit_code == 130, stopped.output
    assert "SIGTERM received" not in stopped.output, "Ray's stack trace"
    assert f"--load {save}" in stopped.output
    assert run.survivors(5) == []

    first = stopped.steps()[-1]["step"] + 1
    version, exports = saved_version(save), tmp_path / "hf"
    stopped_at = newest_readable(save)
    assert stopped_at is not None
    left_out = stopped_at.name.replace("iter", "step")  # as by a kill between a set and its export
    resumed = launcher.run(
        *("--load", str(save), "--save", str(save), *SAVE_LAST, "--num-rollout", str(first + 3)),
        *("--save-hf", str(exports / "step_{rollout_id:07d}")),
    )
    assert {path.name for path in exports.iterdir()} == {left_out, f"step_{first + 2:07d}"}
    step, *_ = resumed.steps()
    # The step under way when the signal came may have been finished, and is then part of the checkpoint.
    assert step["step"] in (first, first + 1)
    assert step["rollout/weight_version/max"] <= version + 1
    # One update at the start, and one before the save after each step but the first.
    assert saved_version(save) == version + len(resumed.steps())


def saved_version(save: Path) -> int:
    newest = newest_readable(save)
    assert newest is not None
    return int(read_record(newest)["weight_version"])


def test_an_error_in_a_plug_in_ends_the_run_with_that_error(launcher: Launcher) -> None:
    run = launcher.start("--custom-rm-path", "tests.e2e.cpu.plugins.reward_that_raises")
    finished = run.finish()
    assert finished.exit_code == 1
    assert "KeyError" in finished.output and "no reward for sample" in finished.output
    assert "Traceback" not in finished.output
    assert "reward_that_raises" in (finished.run_dir / "logs" / "driver.log").read_text()


def test_nothing_at_all_outlives_a_killed_driver_for_long(killed: Killed) -> None:
    if killed.run is None:
        pytest.skip("the test that kills a driver did not run")
    assert killed.run.survivors(max(1.0, killed.at + AGENTS_GONE_SECS - time.monotonic())) == []


# ---- ends without any failure


def one_epoch(launcher: Launcher, prompts: int) -> tuple[str, ...]:
    """A data source of one's own that ends, long before the last step."""
    source = "tests.e2e.cpu.resume_plugins.OneEpoch"
    return ("--data-source-path", source, "--prompt-data", f"{launcher.data}/train.jsonl@[0:{prompts}]", *FOREVER)


@pytest.mark.timeout(400)  # two runs
def test_the_end_of_the_data_ends_a_fully_async_run_well_and_nothing_is_left_to_resume(
    launcher: Launcher, tmp_path: Path
) -> None:
    flags = (*one_epoch(launcher, 10), "--save", str(tmp_path / "set"), *SAVE_LAST)
    evaluation = ("--eval-prompt-data", "held_out", f"{launcher.data}/eval.jsonl@[0:4]", "--eval-interval", "1000")
    run = launcher.run(*flags, *evaluation, "--skip-eval-before-train")
    steps = run.steps()
    assert [step["rollout/num_samples"] for step in steps] == [16, 16, 8]
    assert sum(step["rollout/fully_async/groups_pulled"] for step in steps) == 10
    assert steps[-1]["train/step"] == 3 and steps[-1]["train/loss"] is not None
    assert run.output.count("the data ended after 3 steps (") == 1, run.output
    assert [record["step"] for record in run.records("eval/held_out")] == [2]
    assert [record["end/samples_left_out"] for record in run.records("end/samples_left_out")] == [0]
    newest = newest_readable(tmp_path / "set")
    assert newest is not None and newest.name == "iter_0000002"

    resumed = launcher.run(*flags, "--load", str(tmp_path / "set"))
    assert "nothing left to do: the data ended after 3 steps" in resumed.output, resumed.output
    assert newest_readable(tmp_path / "set") == newest


@pytest.mark.parametrize("driver", ["train.py", "train_async.py"])
def test_the_end_of_the_data_ends_the_other_drivers_too(launcher: Launcher, driver: str, tmp_path: Path) -> None:
    flags = (*one_epoch(launcher, 7), "--save", str(tmp_path / "set"), *SAVE_LAST)
    run = launcher.run(*flags, driver=driver, fully_async=False)
    assert [step["rollout/num_samples"] for step in run.steps()] == [16, 12]
    assert run.output.count("the data ended after 2 steps (") == 1, run.output
    newest = newest_readable(tmp_path / "set")
    assert newest is not None and newest.name == "iter_0000001"


@pytest.mark.timeout(400)  # two runs
def test_an_epoch_with_fewer_prompts_than_a_batch_and_the_end_of_the_run(launcher: Launcher, tmp_path: Path) -> None:
    save = ("--save", str(tmp_path / "set"), *SAVE_LAST)
    flags = ("--prompt-data", f"{launcher.data}/train.jsonl@[0:3]", *save)
    run = launcher.run(*flags)
    assert [step["rollout/num_samples"] for step in run.steps()] == [16, 16, 16]
    resumed = launcher.run(*flags, "--load", str(tmp_path / "set"))
    assert "there was nothing to train on" in resumed.output and not resumed.records("train/loss")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
