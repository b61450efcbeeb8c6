"""What turns into a server that a process owns: it dies with its owner, and what it has started dies with it.

    python -SP owned_process.py OWNER_PID COMMAND...     a script that needs nothing but the standard library

    owner --starts--> this process (leads a process group) --exec--> the server --starts--> its own processes
                        |                                               ^                      ^
                        +--starts--> guard: waits for the server's end -+- then kills the group+

The kernel kills the server when its owner dies. The server's own processes need not be so careful: those of an SGLang
that is killed while it starts stay for ever. So a guard that belongs to nobody waits for the server's end, whatever it
is, and kills what is left of its group.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)


def become(owner: int, command: list[str]) -> None:
    """Replaces this process, of which `owner` is the parent."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != owner:  # it died before we could ask
        sys.exit(1)
    os.setpgid(0, 0)
    leave_guard()
    os.execvp(command[0], command)


def leave_guard() -> None:
    """Start the guard of this process, in a session of its own and as nobody's child."""
    server = os.getpid()
    try:
        end = os.pidfd_open(server)
    except (AttributeError, OSError):  # a kernel without it: the server's processes look after themselves
        return
    middle = os.fork()
    if middle:
        os.close(end)
        os.waitpid(middle, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    os.chdir("/")
    select.select([end], [], [])
    try:
        os.killpg(server, signal.SIGKILL)
    except ProcessLookupError:  # nothing is left of it
        pass
    os._exit(0)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
