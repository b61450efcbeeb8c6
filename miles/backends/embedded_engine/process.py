"""The server process: listen first, load behind, end on a signal, with the parent, or with the engine."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from miles.backends.embedded_engine.server import make_app
from miles.backends.embedded_engine.service import EngineService

if TYPE_CHECKING:
    from miles.backends.embedded_engine.config import EngineConfig

logger = logging.getLogger(__name__)

PARENT_POLL_SECS = 1.0
SHUTDOWN_SECS = 0.5
"""How long open connections may take to end once the engine has."""


def serve(config: EngineConfig) -> int:
    """Run until told to end; returns the exit status: 0 after a signal, 1 where the engine failed or cannot listen."""
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("aiohttp.server").addFilter(is_no_probe)
    if not (Path(config.model_path) / "config.json").is_file():
        logger.error("--model-path %s: there is no config.json", config.model_path)  # said before seconds of imports
        return 1
    return asyncio.run(_serve(config))


def is_no_probe(record: logging.LogRecord) -> bool:
    """False for sglang-router's gRPC probe, which speaks HTTP/2 to this port and is answered with 400: harmless."""
    error = record.exc_info[1] if record.exc_info else None
    return not (type(error).__name__ in ("BadHttpMessage", "BadHttpMethod", "BadStatusLine") and _is_http2(str(error)))


def _is_http2(message: str) -> bool:
    return "PRI" in message or "Upgrade" in message


async def _serve(config: EngineConfig) -> int:
    parent = os.getppid()
    service = EngineService(config)
    # handler_cancellation: a client that hangs up cancels its handler, which frees its place in the batch.
    runner = web.AppRunner(
        make_app(service), handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_SECS
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, config.host, config.port, backlog=4096).start()
    except OSError as error:
        logger.error("Cannot listen on --host %s --port %d: %s", config.host, config.port, error)
        return 1
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    service.start()
    reasons = [
        asyncio.create_task(stop.wait(), name="signal"),
        asyncio.create_task(service.ended.wait(), name="engine ended"),
        asyncio.create_task(_parent_is_gone(parent), name="parent gone"),
    ]
    done, pending = await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
    logger.info("Ending: %s", ", ".join(task.get_name() for task in done))
    for task in pending:
        task.cancel()
    await asyncio.wait(reasons)
    await service.close()
    await runner.cleanup()
    return 0 if service.engine.failure is None else 1


async def _parent_is_gone(parent: int) -> None:
    """Return once this process has another parent than at its start: nobody would end it then."""
    while os.getppid() == parent:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(PARENT_POLL_SECS)
