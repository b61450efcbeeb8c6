"""The processes of a private Ray cluster that a run cannot do without, and their end.

Ray itself notices late and says little: without its control store (gcs_server) it goes on for a minute and then ends
the driver from native code; without the raylet, which holds the object store, every actor dies and any of them may be
the first to be missed.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray._private import ray_constants, worker

if TYPE_CHECKING:
    import subprocess

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
