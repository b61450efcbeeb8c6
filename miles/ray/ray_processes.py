"""What of Ray a run cannot do without, and its end: processes of a private cluster, the control store of a joined one.

Ray itself notices late and says little: without its control store (gcs_server) it goes on for a minute and then ends
the driver from native code; without the raylet, which holds the object store, every actor dies and any of them may be
the first to be missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray._private import ray_constants, worker

if TYPE_CHECKING:
    import subprocess

GCS_SILENT_SECS = 40.0
"""A gcs_server that is made to survive faults may be back by then; at 60 s Ray ends the driver."""
_GCS_LOOK_SECS = 5.0

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
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return f"{self.role} (pid {self.pid}) {how}"


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
