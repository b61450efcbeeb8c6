from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil

from miles.utils.processes import ChildProcess

if TYPE_CHECKING:
    from pathlib import Path

SLEEPER = [sys.executable, "-c", "import time; print('started', flush=True); time.sleep(600)"]


async def wait_for_line(path: Path, line: str) -> None:
    while line not in path.read_text():  # noqa: ASYNC110, ASYNC240 - another process writes it
        await asyncio.sleep(0.01)


async def test_a_death_is_told_with_name_signal_and_the_end_of_the_log(tmp_path: Path) -> None:
    child = ChildProcess("engine-0", SLEEPER, tmp_path / "logs" / "engine-0.log")
    await wait_for_line(child.log_path, "started")
    os.kill(child.pid, signal.SIGKILL)
    message = str(await child.wait_died())
    assert f"engine-0 (pid {child.pid}) was killed by SIGKILL" in message
    assert str(child.log_path) in message and "| started" in message


async def test_an_exit_code_is_told(tmp_path: Path) -> None:
    child = ChildProcess("router", [sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log")
    assert "exited with code 3" in str(await child.wait_died())


async def test_stop_ends_a_child_that_ignores_sigterm_and_may_be_called_twice(tmp_path: Path) -> None:
    code = "import signal,time; signal.signal(15, signal.SIG_IGN); print('started', flush=True); time.sleep(600)"
    child = ChildProcess("stubborn", [sys.executable, "-c", code], tmp_path / "log")
    await wait_for_line(child.log_path, "started")
    await child.stop(grace_secs=0.05)
    assert not child.is_running
    await child.stop()


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    code = f"""
import os, sys, time
from miles.utils.processes import ChildProcess
child = ChildProcess("orphan", {SLEEPER!r}, {str(tmp_path / "log")!r})
while "started" not in open(child.log_path).read(): time.sleep(0.01)
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    parent = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=30)
    assert parent.returncode == -signal.SIGKILL
    pid = int(parent.stdout)
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=10)
    assert not psutil.pid_exists(pid)


async def test_nothing_of_a_child_outlives_it(tmp_path: Path) -> None:
    """As of an SGLang that is killed while it starts: the processes that it had started know nothing of its end."""
    code = f"import subprocess, time; print('pid', subprocess.Popen({SLEEPER!r}).pid, flush=True); time.sleep(600)"
    child = ChildProcess("engine-0", [sys.executable, "-c", code], tmp_path / "log")
    await wait_for_line(child.log_path, "started")
    lines = child.log_path.read_text().splitlines()
    grandchild = psutil.Process(int(next(line for line in lines if line.startswith("pid ")).split()[1]))
    os.kill(child.pid, signal.SIGKILL)
    _, alive = await asyncio.to_thread(psutil.wait_procs, [grandchild], timeout=10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    await child.wait_died()


async def test_a_child_is_told_from_whoever_else_answers_at_a_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        code = (
            "import socket, time; server = socket.create_server(('127.0.0.1', 0)); "
            "print('port', server.getsockname()[1], flush=True); time.sleep(600)"
        )
        child = ChildProcess("engine-0", [sys.executable, "-c", code], tmp_path / "log")
        await wait_for_line(child.log_path, "port ")
        await wait_for_line(child.log_path, "\n")
        own = int(child.log_path.read_text().split()[1])
        assert child.listens_on(own)
        assert not child.listens_on(port)
        await child.stop()
        assert not child.listens_on(own)
