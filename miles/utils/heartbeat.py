"""Whether a process runs at all, as seen from another one, on whichever machine.

    start_heart()   a thread that answers whoever connects, whatever the other threads of its process do
    hears(heart)    asks it, from another process

A process that is stopped, that has hung in native code with the interpreter's lock held, or whose machine is gone does
not answer. One that computes, that waits for another process, or that stands in pdb does.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from miles.utils.network import get_host_info

_BEAT = b"."
_OUT_OF_DESCRIPTORS_SECS = 0.1
_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


class CannotAsk(OSError):
    """The process that asks is out of descriptors, ports or memory, which says nothing about the one that is asked."""


@dataclass(frozen=True)
class Heart:
    """Where a process answers, and what its process id means."""

    pid: int
    node: str
    """The name of its machine."""
    pid_space: str
    """Equal for two processes that mean the same process by the same id."""
    host: str
    port: int

    @property
    def is_in_our_pid_space(self) -> bool:
        return bool(self.pid_space) and self.pid_space == own_pid_space()


def start_heart() -> Heart:
    """Answer from now on, as long as this process lives, at a port that the system chooses."""
    node, host = get_host_info()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family, backlog=16)
    threading.Thread(target=_beat, args=(listening,), name="heart", daemon=True).start()
    return Heart(os.getpid(), node, own_pid_space(), host, listening.getsockname()[1])


def own_pid_space() -> str:
    """This boot of this machine, and the namespace of its process ids; empty where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


async def hears(heart: Heart, *, timeout_secs: float) -> bool:
    """Whether the process answers within this time. Raises ConnectionRefusedError where it is gone, and CannotAsk."""
    try:
        async with asyncio.timeout(timeout_secs):
            reader, writer = await asyncio.open_connection(heart.host, heart.port)
            try:
                return await reader.read(1) == _BEAT
            finally:
                writer.close()
    except ConnectionRefusedError:
        raise
    except OSError as error:  # TimeoutError is one
        if is_of_who_asks(error):
            raise CannotAsk(*error.args) from error
        return False


def is_of_who_asks(error: OSError) -> bool:
    """Whether it says nothing about the process that is asked."""
    return error.errno in _OURS


def _beat(listening: socket.socket) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:  # this process has no descriptor left for it just now
            time.sleep(_OUT_OF_DESCRIPTORS_SECS)
            continue
        with connection, suppress(OSError):  # whoever asked may have gone
            connection.sendall(_BEAT)
