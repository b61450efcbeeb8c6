"""Child processes that never outlive their parent, with their output in one log file each."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from miles.utils import owned_process
from miles.utils.process_state import how_ended, how_stopped

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_POLL_SECS = 0.1


class ProcessDied(RuntimeError):
    """A process of the run ended although nobody ended it. The message says which, how, and where its log is."""


class ChildProcess:
    """A server process that this process started and owns.

    It leads a process group of which nothing is left when it ends, whatever ends it (see `owned_process`). It dies with
    the *thread* that started it (Linux): start it from a thread that lives as long as the child should. Standard output
    and error are appended to `log_path`.
    """

    def __init__(
        self, name: str, command: Sequence[str], log_path: str | Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log_path = Path(log_path)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._popen = subprocess.Popen(
                [sys.executable, "-SP", owned_process.__file__, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def is_running(self) -> bool:
        return self._popen.poll() is None

    def silence(self, what: str) -> ProcessDied:
        """The error that tells that it lives and does nothing."""
        return self._error(f"{what}: {how_stopped(self.pid) or 'it hangs'}")

    def listens_on(self, port: int) -> bool:
        """Whether this process, or one that it started, is who answers at TCP port `port` of this machine."""
        try:
            root = psutil.Process(self.pid)
            family = [root, *root.children(recursive=True)]
            return any(
                connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
                for process in family
                for connection in process.net_connections("tcp")
            )
        except psutil.NoSuchProcess:
            return False

    async def wait_died(self) -> ProcessDied:
        """Wait until the process has ended, then return the error that tells it."""
        while self.is_running:  # noqa: ASYNC110 - a process, not one of our tasks
            await asyncio.sleep(_POLL_SECS)
        return self.death()

    def death(self) -> ProcessDied:
        """The error that tells how the process ended, with the last lines of its log."""
        return self._error(how_ended(self._popen.returncode))

    def _error(self, what: str) -> ProcessDied:
        return ProcessDied(f"{self.name} (pid {self.pid}) {what}; see {self.log_path}{log_tail(self.log_path)}")

    async def stop(self, grace_secs: float = 3.0) -> None:
        """Ask the process to end, and kill it after `grace_secs`. Does nothing where it has ended."""
        if not self.is_running:
            return
        self._popen.terminate()
        try:
            async with asyncio.timeout(grace_secs):
                await self.wait_died()
        except TimeoutError:
            self._popen.kill()
            await self.wait_died()


def log_tail(path: Path, lines: int = 5) -> str:
    """The last non-empty lines of a log, indented, for an error message; empty where there is nothing to show."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    last = [line for line in text.splitlines() if line.strip()][-lines:]
    return "".join(f"\n    | {line}" for line in last)
