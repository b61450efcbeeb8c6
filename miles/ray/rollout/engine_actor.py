"""One inference server in a process of its own, owned by a Ray actor that sits on the server's resources."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from miles.backends.sglang_utils.launch import DIST_INIT_PORTS, ServerPlace, meeting_point, sglang_engine_command
from miles.ray.own_gpus import see_own_gpus_only
from miles.ray.rollout.engine_size import EngineSize
from miles.ray.rollout.server_start import Launched, start_server
from miles.utils.http_utils import find_available_port, get_host_info
from miles.utils.logging_utils import redirect_output
from miles.utils.processes import ChildProcess

if TYPE_CHECKING:
    from argparse import Namespace

_START_SECS = 3600.0  # a large checkpoint from slow storage; a process that ends is noticed at once


class EngineActor:
    """Starts the server of engine `rank`, watches it and stops it. HTTP goes to the server itself, past the actor.

    An engine that spans machines has an actor on each: the one of `node_rank` 0 serves HTTP, the others hold the rest
    of the model. `kind` is the first part of its name: engine, or eval-engine.
    """

    def __init__(self, args: Namespace, rank: int, kind: str = "engine", node_rank: int = 0) -> None:
        self.name = f"{kind}-{rank}" if node_rank == 0 else f"{kind}-{rank}-node-{node_rank}"
        self._args = args
        self._rank = rank
        self._node_rank = node_rank
        self._log_path = Path(args.run_dir) / "logs" / f"{self.name}.log"
        redirect_output(self._log_path)
        see_own_gpus_only()
        self._server: ChildProcess | None = None

    async def meeting_point(self) -> str:
        """host:port on this machine where the machines of the engine can meet."""
        return meeting_point(get_host_info()[1], find_available_port(0, consecutive=DIST_INIT_PORTS))

    async def start(self, dist_init_addr: str | None = None) -> str:
        """Start the server and return its URL: once it is healthy on node 0, at once on the others.

        Raises ProcessDied where it ends first. A port that somebody took between its choice and its use is chosen
        anew, also where that somebody is another run's engine, which answers as healthily as ours.
        """
        if self._node_rank > 0:  # healthy only once every node is: node 0 tells
            return self._launch(dist_init_addr).url
        server = await start_server(lambda: self._launch(dist_init_addr), timeout_secs=_START_SECS)
        return server.url

    def _launch(self, dist_init_addr: str | None) -> Launched:
        place = self._place(dist_init_addr)
        self._server = ChildProcess(self.name, self._command(place), self._log_path)
        return Launched(self._server, place.host, place.port)

    async def pids(self) -> dict[str, int]:
        """Process ids of the actor and of its server."""
        return {"actor": os.getpid(), "server": self._server.pid if self._server else -1}

    async def watch(self) -> None:
        """Never returns; raises ProcessDied when the server dies."""
        assert self._server is not None, "watch follows start"
        raise await self._server.wait_died()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()

    def _place(self, dist_init_addr: str | None) -> ServerPlace:
        return ServerPlace(
            host=get_host_info()[1],
            port=find_available_port(0),
            nccl_port=find_available_port(0),
            nodes=EngineSize.from_args(self._args).nodes,
            node_rank=self._node_rank,
            dist_init_addr=dist_init_addr,
        )

    def _command(self, place: ServerPlace) -> list[str]:
        if self._args.rollout_engine == "sglang":
            return sglang_engine_command(self._args, place, seed=self._rank)
        return embedded_engine_command(self._args, place.host, place.port, seed=self._rank)


def embedded_engine_command(args: Namespace, host: str, port: int, *, seed: int) -> list[str]:
    """The command line of an embedded engine that serves `args.hf_checkpoint`."""
    command = [sys.executable, "-m", "miles.backends.embedded_engine"]
    options = {
        "--model-path": args.hf_checkpoint,
        "--host": host,
        "--port": port,
        "--dtype": args.embedded_dtype,
        "--device": args.embedded_device,
        "--max-running-requests": args.embedded_max_running_requests,
        "--context-length": max(args.rollout_max_context_len, args.eval_max_context_len or 0),
        "--random-seed": args.rollout_seed + seed,
    }
    for name, value in options.items():
        if value is not None:
            command += [name, str(value)]
    return command
