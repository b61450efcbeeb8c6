"""Small real servers for the tests of the HTTP client, and a clock for its pauses."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager, closing
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    import pytest


@asynccontextmanager
async def serve(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """An aiohttp server that gives every request to `handler`; yields its base URL."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await handler(request)

    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{tail:.*}", handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Script:
    """A handler that answers with the given (status, body[, headers]) in turn, the last one for ever, and keeps what
    it was asked."""

    def __init__(self, *answers: tuple) -> None:
        self._answers = list(answers)
        self.requests: list[tuple[str, str, bytes]] = []
        self.headers: list[dict[str, str]] = []

    async def __call__(self, request: web.Request) -> web.Response:
        self.requests.append((request.method, request.path, await request.read()))
        self.headers.append(dict(request.headers))
        status, body, *headers = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        body = body if isinstance(body, bytes) else body.encode()
        return web.Response(status=status, body=body, headers=headers[0] if headers else None)


@asynccontextmanager
async def serve_connections(
    on_connection: Callable[[int, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """A bare TCP server that calls `on_connection(number from 0, reader, writer)` and then closes the connection."""
    count = 0

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        number, count = count, count + 1
        try:
            await on_connection(number, reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """One request's body; raises IncompleteReadError at the connection's end."""
    head = await reader.readuntil(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
    return await reader.readexactly(int(lengths[0])) if lengths else b""


def refused_url() -> str:
    """A URL on which nobody listens."""
    with closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"


class VirtualPauses:
    """Stands in for `asyncio.sleep`: a pause is over at once, and the running loop's clock has moved on by it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        real_time = loop.time
        self.pauses: list[float] = []
        monkeypatch.setattr(loop, "time", lambda: real_time() + sum(self.pauses))

    async def __call__(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await asyncio.sleep(0)
