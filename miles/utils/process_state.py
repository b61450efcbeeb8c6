"""What the system knows of processes that need not be our children: how they ended, whether they are stopped."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import time
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable

_EXIT_POLL_SECS = 0.01


def how_ended(returncode: int) -> str:
    """What subprocess's return code says, in words."""
    return f"was killed by {signal_name(-returncode)}" if returncode < 0 else f"exited with code {returncode}"


def signal_name(number: int) -> str:
    """`SIGKILL`; most real-time signals have a number only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class ExitWatch:
    """Knows, of any process of this machine, which signal has killed it, where the kernel tells (Linux 6.15 and later).

    It must be made while the process lives.
    """

    def __init__(self, pid: int) -> None:
        try:
            self._descriptor: int | None = os.pidfd_open(pid)
        except (AttributeError, OSError):
            self._descriptor = None

    def signal(self, timeout_secs: float = 1.0) -> str | None:
        """The name of the signal; None where there was none, where it is not known, and where the process is not gone
        within `timeout_secs`: its connections end a moment before it does."""
        if self._descriptor is None:
            return None
        deadline = time.monotonic() + timeout_secs
        try:
            while (status := _exit_status(self._descriptor)) is None and time.monotonic() < deadline:
                time.sleep(_EXIT_POLL_SECS)
        except OSError:  # a kernel that does not tell
            return None
        return None if status is None or not os.WIFSIGNALED(status) else signal_name(os.WTERMSIG(status))

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_STOPS = {psutil.STATUS_STOPPED: "it is stopped (SIGSTOP)", psutil.STATUS_TRACING_STOP: "a debugger has stopped it"}

# ioctl PIDFD_GET_INFO of linux/pidfd.h, and the request for the exit status, which is the last of these numbers.
_PIDFD_INFO = struct.Struct("QQ11Ii")
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11
_PIDFD_INFO_EXIT = 1 << 3


def _exit_status(descriptor: int) -> int | None:
    """As waitpid(2) has it; None until the process has ended and its parent knows. Raises OSError on older kernels."""
    info = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
    fcntl.ioctl(descriptor, _PIDFD_GET_INFO, info)
    mask, *_, status = _PIDFD_INFO.unpack(info)
    return int(status) if mask & _PIDFD_INFO_EXIT else None


def how_stopped(pid: int) -> str | None:
    """What keeps this process of this machine from running, in words; None where nothing does, or it has ended."""
    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return None
    return _STOPS.get(status)


def kill_left(processes: Iterable[psutil.Process]) -> None:
    """Kill those that still run, stopped or not."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.kill()
