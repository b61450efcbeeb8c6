"""What a run survives with --use-fault-tolerance, and how it ends where it does not survive.

`docs/user-guide/fault-tolerance.md` names the test behind each of its statements.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from typing import TYPE_CHECKING

import pytest

from miles.utils.checkpoint_set import newest_readable
from miles.utils.run_report import SUMMARY_FILE
from miles.utils.trace import TRACE_FILE, read_trace
from tests.e2e.cpu.engine_faults import FaultyEpoch, draw

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.cpu.runs import Launcher, RunningRun

pytestmark = [pytest.mark.timeout(400), getattr(pytest.mark, "stage-a-cpu")]

SEED = 4
FOREVER = ("--num-rollout", "100000")
GONE_SECS = 15
PLAN = (
    (("server", "update-death"), "anytime"),
    (("actor", "SIGKILL"), "train"),
    (("server", "error"), "anytime"),
    (("server", "SIGSTOP"), "anytime"),
    (("server", "cut"), "anytime"),
    (("server", "silence"), "anytime"),
)


def test_engines_that_die_hang_or_fail_are_replaced_and_each_prompt_is_trained_exactly_once(
    launcher: Launcher, tmp_path: Path
) -> None:
    rng = random.Random(SEED)
    epoch = FaultyEpoch(launcher, tmp_path / "checkpoints")
    faults = [draw(rng, *plan) for plan in PLAN]
    run = epoch.play(faults)
    marks = [event["args"]["what"] for event in read_trace(run.run_dir / TRACE_FILE) if event["ph"] == "i"]
    assert json.loads((run.run_dir / SUMMARY_FILE).read_text())["engine_restarts"] >= len(faults)
    for fault in faults:
        served = f"{fault.engine} has the current weights and serves again"
        assert served in run.output and served in marks, f"seed {SEED}, {fault}: {run.output}"


def test_the_loss_of_every_engine_ends_the_run_with_one_message_and_leaves_a_set(
    launcher: Launcher, tmp_path: Path
) -> None:
    save = tmp_path / "checkpoints"
    flags = ("--save", str(save), "--save-interval", "1", "--use-fault-tolerance", "--rollout-num-gpus", "2")
    run = launcher.start(*FOREVER, *flags)
    run.wait_for_steps(2)
    run.remember_processes()
    pids = run.pids()
    for name in ("engine-0", "engine-1"):
        os.kill(pids[name], signal.SIGKILL)
    message = message_of(run)
    assert "the last engine of 2 is lost: engine-" in message and "was killed by SIGKILL" in message
    assert f"--load {save}" in message
    assert newest_readable(save) is not None
    assert run.survivors(GONE_SECS) == []


@pytest.mark.parametrize(
    ("victim", "named"),
    [
        ("raylet", "Ray's raylet, which holds the object store, (pid {pid}) was killed by SIGKILL"),
        ("gcs_server", "Ray's gcs_server, the cluster's control store, (pid {pid}) was killed by SIGKILL"),
    ],
)
def test_the_loss_of_ray_ends_the_run_with_its_name_and_leaves_a_set(
    launcher: Launcher, tmp_path: Path, victim: str, named: str
) -> None:
    save = tmp_path / "checkpoints"
    run = launcher.start(*FOREVER, "--save", str(save), "--save-interval", "1")
    run.wait_for_steps(2)
    pid = run.pids()[victim]
    ours = {name: pid for name, pid in run.pids().items() if name not in ("raylet", "gcs_server")}
    os.kill(pid, signal.SIGKILL)
    message = message_of(run)
    assert named.format(pid=pid) in message and f"--load {save}" in message
    assert newest_readable(save) is not None
    deadline = time.monotonic() + GONE_SECS
    while (left := [name for name, pid in ours.items() if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def message_of(run: RunningRun) -> str:
    """What a run that fails says; it must end soon."""
    finished = run.finish(timeout_secs=GONE_SECS + 15)
    assert finished.exit_code == 1, finished.output
    assert "Traceback" not in finished.output
    assert finished.output.count("\nmiles: ") == 1
    return finished.output[finished.output.index("\nmiles: ") :]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
