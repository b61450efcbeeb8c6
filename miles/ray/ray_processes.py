"""What of Ray a run cannot do without, and its end: processes of a private cluster, the control store of a joined one.

Ray itself notices late and says little: without its control store (gcs_server) it goes on for a minute and then ends
the driver from native code; without the raylet, which holds the object store, every actor dies and any of them may be
the first to be missed.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray._private import ray_constants, worker

from miles.ray.silence import Silence
from miles.utils.process_state import how_ended, how_stopped

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence

GCS_SILENT_SECS = 40.0
"""A gcs_server that is made to survive faults may be back by then; at 60 s Ray ends the driver, or without its raylet
every actor."""
_GCS_LOOK_SECS = 5.0
_LOOK_SECS = 0.1

_ROLES = {
    ray_constants.PROCESS_TYPE_RAYLET: "Ray's raylet, which holds the object store,",
    ray_constants.PROCESS_TYPE_GCS_SERVER: "Ray's gcs_server, the cluster's control store,",
}


@dataclass(frozen=True)
class RayProcess:
    """One process of Ray. `role` begins a sentence."""

    name: str
    role: str
    popen: subprocess.Popen[Any]

    @property
    def pid(self) -> int:
        return self.popen.pid

    def death(self) -> str | None:
        """How it has ended, as a sentence; None where it runs."""
        code = self.popen.poll()
        if code is None:
            return None
        return f"{self.role} (pid {self.pid}) {how_ended(code)}"

    def stop(self) -> str | None:
        """What keeps it from running although it lives, as a sentence; None where nothing does."""
        how = how_stopped(self.pid)
        return None if how is None else f"{self.role} (pid {self.pid}) does not run: {how}"

    def children(self) -> list[psutil.Process]:
        """Workers and agents, which end with it: later than a run may take, where it was killed."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return list(psutil.Process(self.pid).children())
        return []

    def kill_if_stopped(self) -> None:
        """Whoever asks it to end would wait for ever."""
        if how_stopped(self.pid) is not None:
            self.popen.kill()


def own_ray_processes() -> list[RayProcess]:
    """Those that `ray.init` has started from this process; none where a cluster was joined."""
    node = worker._global_node
    started = node.all_processes if node is not None else {}
    return [
        RayProcess(name, role, process.process) for name, role in _ROLES.items() for process in started.get(name, [])
    ]


def joined_gcs_address() -> str | None:
    """host:port of the control store of a cluster that was joined; None where the cluster is this run's own."""
    return None if own_ray_processes() else str(ray.get_runtime_context().gcs_address)


async def ray_lost(processes: Sequence[RayProcess], *, limit_secs: float, look_secs: float = _LOOK_SECS) -> str:
    """Wait until one of them has ended, or was stopped for `limit_secs` and at most `GCS_SILENT_SECS`; says which."""
    clock = asyncio.get_running_loop().time
    silence = Silence(min(limit_secs, GCS_SILENT_SECS))
    by_name = {process.name: process for process in processes}
    for name in by_name:
        silence.begin(name, clock())
    while True:
        stops = {}
        for name, process in by_name.items():
            if (death := process.death()) is not None:
                return death
            stops[name] = process.stop()
            silence.learn(name, heard=stops[name] is None, now=clock())
        for name in silence.lost():
            return f"{stops[name]}, for {silence.limit_secs:g} s by now"
        await asyncio.sleep(look_secs)


async def gcs_lost(address: str, *, silent_secs: float = GCS_SILENT_SECS, look_secs: float = _GCS_LOOK_SECS) -> str:
    """Wait until nobody has listened at `address` for `silent_secs`; returns that as a sentence."""
    clock = asyncio.get_running_loop().time
    last_heard = clock()
    while clock() - last_heard < silent_secs:
        await asyncio.sleep(look_secs)
        if await _listens(address, timeout_secs=look_secs):
            last_heard = clock()
    return f"Ray's gcs_server at {address} has not been reached for {silent_secs:g} s"


async def _listens(address: str, *, timeout_secs: float) -> bool:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(timeout_secs):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True
