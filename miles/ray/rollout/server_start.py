"""Starting an HTTP server on a port that was free when it was chosen, and may be somebody else's when it is used.

launch on a port --> healthy, and it is our process that listens --> its address
        ^       |
        +-------+-- somebody else was quicker; who that is may answer as healthily as ours
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from miles.utils.http_utils import wait_http_ok
from miles.utils.network import url_host
from miles.utils.processes import ChildProcess, ProcessDied

if TYPE_CHECKING:
    from collections.abc import Callable

START_ATTEMPTS = 3


class Launched(NamedTuple):
    """A server process, and where it is to listen."""

    process: ChildProcess
    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{url_host(self.host)}:{self.port}"


async def start_server(
    launch: Callable[[], Launched], *, attempts: int = START_ATTEMPTS, timeout_secs: float
) -> Launched:
    """Launch a server and wait until it answers /health; again, on a port that `launch` chooses, where that was lost.

    Raises ProcessDied where it ends for another reason, and where each of the ports was lost.
    """
    for attempt in range(1, attempts + 1):
        server = launch()
        try:
            await _wait_healthy(server.process, f"{server.url}/health", timeout_secs)
        except ProcessDied as error:
            if attempt == attempts or not _port_was_taken(error):
                raise
        else:
            if server.process.listens_on(server.port):
                return server
            await server.process.stop()
    ports = f"port {server.port}" if attempts == 1 else f"each of {attempts} ports"
    raise ProcessDied(f"{server.process.name}: {ports} was taken by another process before it could")


async def _wait_healthy(process: ChildProcess, url: str, timeout_secs: float) -> None:
    """Wait until `url` answers 200; raises ProcessDied at once where the process ends first."""
    healthy = asyncio.ensure_future(wait_http_ok(url, timeout=timeout_secs))
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


def _port_was_taken(error: ProcessDied) -> bool:
    text = str(error).lower()
    return "address already in use" in text or "eaddrinuse" in text
