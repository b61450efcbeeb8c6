"""What is known of a process that is nobody's child here: the signal that killed it, and whether it is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from miles.utils.process_state import ExitWatch, how_ended, how_stopped, kill_left
from tests.kernel import TELLS_SIGNALS

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


def grandchild(code: str) -> tuple[subprocess.Popen[str], int]:
    """A process that is nobody's whom we could wait for, and its parent."""
    start = f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {code!r}]); "
    parent = subprocess.Popen(
        [sys.executable, "-c", start + "print(child.pid, flush=True); child.wait(); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


@pytest.mark.skipif(not TELLS_SIGNALS, reason="this kernel does not tell how another's child ended (Linux 6.15)")
def test_the_signal_that_killed_a_process_is_known_though_it_is_not_a_child_of_ours() -> None:
    parent, pid = grandchild("import time; time.sleep(600)")
    with parent:
        watch = ExitWatch(pid)
        assert watch.signal(timeout_secs=0.0) is None
        os.kill(pid, signal.SIGBUS)
        assert watch.signal(timeout_secs=30.0) == "SIGBUS"
        watch.close()
        assert watch.signal() is None
        parent.communicate("\n")


def test_no_signal_is_told_of_a_process_that_ended_by_itself_or_is_not_there() -> None:
    parent, pid = grandchild("import sys; sys.exit(3)")
    with parent:
        assert ExitWatch(pid).signal(timeout_secs=30.0) is None
        parent.communicate("\n")
    assert ExitWatch(pid).signal() is None


def test_a_process_that_is_stopped_is_told_from_one_that_waits_and_is_killed_all_the_same() -> None:
    with subprocess.Popen(SLEEPER) as process:
        assert how_stopped(process.pid) is None
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert how_stopped(process.pid) == "it is stopped (SIGSTOP)"
        left = psutil.Process(process.pid)
        kill_left([left])
        assert process.wait() == -signal.SIGKILL
        assert how_stopped(process.pid) is None
        kill_left([left])


@pytest.mark.parametrize(
    ("returncode", "words"),
    [
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-9, "was killed by SIGKILL"),
        (-40, "was killed by signal 40"),
    ],
)
def test_an_end_in_words(returncode: int, words: str) -> None:
    assert how_ended(returncode) == words
