"""Grading mathematical answers in processes of their own.

    equivalent(given, expected) --> memory of recent pairs --> an idle worker, or a new one, up to `max_workers`
                                                                  | answers in time ---> the verdict
                                                                  | silent, or dead ---> killed; "not equivalent"

Comparing takes milliseconds to for ever, and some of it holds the interpreter's lock; in the rollout process it would
stop every request in flight. A worker that exceeds its time is killed, which no thread can be.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

logger = logging.getLogger(__name__)

GRADING_TIMEOUT_SECS = 10.0
START_TIMEOUT_SECS = 120.0  # of importing sympy on a busy machine
REMEMBERED_PAIRS = 8192
WORKER_ARGUMENTS = ("-m", "miles.rollout.rm_hub.grading_worker")  # of the Python interpreter
_ALARM_SLACK_SECS = 5.0


class Grader:
    """A pool of grading processes, started as they are needed. Thread-safe. `close()` ends them."""

    def __init__(self, max_workers: int | None = None, timeout_secs: float = GRADING_TIMEOUT_SECS) -> None:
        """`max_workers` None: half the CPUs, 1 to 8."""
        self.max_workers = max_workers or max(1, min(8, (os.cpu_count() or 2) // 2))
        self.timeout_secs = timeout_secs
        self.closed = False
        self._lock = threading.Lock()
        self._free_slots = threading.Semaphore(self.max_workers)
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._threads = ThreadPoolExecutor(self.max_workers, thread_name_prefix="miles-grading")
        self._remembered = functools.lru_cache(maxsize=REMEMBERED_PAIRS)(self._ask)

    def equivalent(self, given: str, expected: str) -> bool:
        """Whether two answers (LaTeX or plain) mean the same. Blocks for at most `timeout_secs` once a worker is free;
        what cannot be compared in that time counts as different, with a warning.

        Raises RuntimeError after `close()`, and where no worker can be started.
        """
        return self._remembered(given, expected)

    async def equivalent_async(self, given: str, expected: str) -> bool:
        """`equivalent` on a thread of the pool."""
        self._check_open()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.equivalent, given, expected)

    def close(self) -> None:
        """End every process, busy or not, and join the threads. A comparison under way raises RuntimeError."""
        with self._lock:
            self.closed = True
            idle, self._idle = self._idle, []
            for worker in self._busy:
                worker.kill()
        for worker in idle:
            worker.dispose()
        self._threads.shutdown(cancel_futures=True)

    def _ask(self, given: str, expected: str) -> bool:
        with self._free_slots:
            worker = self._take()
            try:
                verdict = worker.ask(given, expected, self.timeout_secs)
            except BaseException:
                self._give_back(worker, usable=False)
                raise
            self._give_back(worker, usable=verdict is not None)
        if verdict is None:
            self._check_open()
            logger.warning(
                "comparing %r with %r took more than %g s, or ended its process: counted as different",
                given[:200],
                expected[:200],
                self.timeout_secs,
            )
        return bool(verdict)

    def _take(self) -> _Worker:
        with self._lock:
            self._check_open()
            while self._idle:
                worker = self._idle.pop()
                if worker.is_alive:
                    break
                worker.dispose()
            else:
                worker = _Worker()
            self._busy.add(worker)
            return worker

    def _give_back(self, worker: _Worker, *, usable: bool) -> None:
        with self._lock:
            self._busy.discard(worker)
            if usable and not self.closed:
                self._idle.append(worker)
                return
        worker.dispose()

    def _check_open(self) -> None:
        if self.closed:
            raise RuntimeError("the grader is closed")


class _Worker:
    """One grading process, and the pipe to it. One thread uses it at a time; any may kill it."""

    def __init__(self) -> None:
        root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, *WORKER_ARGUMENTS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._ready = False

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, given: str, expected: str, timeout_secs: float) -> bool | None:
        """The verdict; None where the process did not answer in time, or has ended."""
        if not self._ready:
            if self._read_line(START_TIMEOUT_SECS) is None:
                raise RuntimeError("the grading process did not start; its own message is above (math-verify missing?)")
            self._ready = True
        limit = timeout_secs + _ALARM_SLACK_SECS  # the process's own alarm, should nobody be left to kill it
        request = json.dumps({"given": given, "expected": expected, "limit": limit})
        try:
            self._stdin.write(request.encode() + b"\n")
        except OSError:  # it has ended
            return None
        line = self._read_line(timeout_secs)
        return None if line is None else bool(json.loads(line)["equivalent"])

    def kill(self) -> None:
        """End the process; a thread that waits in `ask` gets None. It still has to `dispose` of the worker."""
        self._process.kill()

    def dispose(self) -> None:
        """End the process, reap it and close the pipe; for the one thread that uses the worker."""
        self._process.kill()
        self._process.wait()
        self._stdin.close()
        self._stdout.close()

    def _read_line(self, timeout_secs: float) -> bytes | None:
        """The next line; None at the end of the process's output, or where it takes longer."""
        deadline = time.monotonic() + timeout_secs
        poll = select.poll()
        poll.register(self._stdout, select.POLLIN | select.POLLHUP)
        line = b""
        while not line.endswith(b"\n"):
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return None
            data = os.read(self._stdout.fileno(), 1 << 16)
            if not data:
                return None
            line += data
        return line


class _SharedGrader:
    """Holds the one grader that a process shares; a forked child starts its own."""

    def __init__(self) -> None:
        self._inherited: list[Grader] = []
        self._grader: Grader | None = None
        self._forget()

    def _forget(self) -> None:
        if self._grader is not None:
            self._inherited.append(self._grader)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._grader = None

    def get(self) -> Grader:
        if self._pid != os.getpid():
            self._forget()
        with self._lock:
            if self._grader is None:
                self._grader = Grader()
            return self._grader

    def close(self) -> None:
        if self._pid != os.getpid():
            self._forget()
        with self._lock:
            grader, self._grader = self._grader, None
        if grader is not None:
            grader.close()


_shared_grader = _SharedGrader()  # this module's only state


def get_grader() -> Grader:
    """The process's shared grader; it has no process before its first comparison."""
    return _shared_grader.get()


def close_grader() -> None:
    """End the shared grader's processes, if there are any; the next comparison starts new ones.

    A program that never calls this leaves none behind either: they end with the pipe to it.
    """
    _shared_grader.close()
