"""One inference server in a process of its own, owned by a Ray actor that sits on the server's resources."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from miles.utils.http_utils import find_available_port, get_host_info, wait_http_ok
from miles.utils.logging_utils import redirect_output
from miles.utils.processes import ChildProcess, ProcessDied

if TYPE_CHECKING:
    from argparse import Namespace

_START_ATTEMPTS = 3


class EngineActor:
    """Starts the server of engine `rank`, watches it and stops it. HTTP goes to the server itself, past the actor.

    `kind` is the first part of its name: engine, or eval-engine.
    """

    def __init__(self, args: Namespace, rank: int, kind: str = "engine") -> None:
        self.name = f"{kind}-{rank}"
        self._args = args
        self._rank = rank
        self._log_path = Path(args.run_dir) / "logs" / f"{self.name}.log"
        redirect_output(self._log_path)
        self._server: ChildProcess | None = None

    async def start(self) -> str:
        """Start the server and return its URL once it is healthy. Raises ProcessDied where it ends first.

        A port that somebody took between its choice and its use is chosen anew.
        """
        host = get_host_info()[1]
        for attempt in range(1, _START_ATTEMPTS + 1):
            port = find_available_port(0)
            url = f"http://{host}:{port}"
            self._server = ChildProcess(
                self.name, embedded_engine_command(self._args, host, port, seed=self._rank), self._log_path
            )
            try:
                await wait_healthy(self._server, f"{url}/health")
            except ProcessDied as error:
                if attempt == _START_ATTEMPTS or "address already in use" not in str(error).lower():
                    raise
            else:
                break
        return url

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


async def wait_healthy(process: ChildProcess, url: str) -> None:
    """Wait until `url` answers 200; raises ProcessDied at once where the process ends first."""
    healthy = asyncio.ensure_future(wait_http_ok(url))
    died = asyncio.ensure_future(process.wait_died())
    try:
        await asyncio.wait({healthy, died}, return_when=asyncio.FIRST_COMPLETED)
        if died.done() and not healthy.done():
            raise died.result()
        await healthy
    finally:
        for task in (healthy, died):
            task.cancel()
        await asyncio.gather(healthy, died, return_exceptions=True)
