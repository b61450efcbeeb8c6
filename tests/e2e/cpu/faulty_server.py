"""Faults inside a real embedded engine, and a record of what the engine has done, without a hook in the product.

    the test:    environment() of the run .................... every engine process installs the middleware at its start
                 order(directory, pid, fault) ---- a file ---> the engine looks for it at each request of the rollout
    the engine:  begins the fault at the request that the order names, and appends what happens to its own record
                 <-- record_of(directory, pid) --

In the engine's process the middleware stands before the engine's own routes. Requests of health checks are no requests
of the rollout: they are not counted, but they meet the fault as well.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_DIRECTORY = "MILES_TEST_ENGINE_FAULTS"
_SITE = Path(__file__).parent / "engine_site"
_BUCKET = "/update_weights_from_distributed"

# Fault -> what happens to the requests of which paths. /health and /model_info stay good in all but the last two.
FAULTS = {
    "error": ("error", ("/generate",)),
    "silence": ("silence", ("/generate", "/health_generate")),
    "cut": ("cut", ("/generate",)),
    "update-error": ("error", (_BUCKET,)),
    "update-silence": ("silence", (_BUCKET,)),
    "update-cut": ("cut", (_BUCKET,)),
    "death": ("death", ("/generate",)),
    "update-death": ("death", (_BUCKET,)),
}


def environment(directory: Path) -> dict[str, str]:
    """What a run needs in its environment so that its engines take orders from `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(_SITE), str(Path(__file__).parents[3])])
    return {"PYTHONPATH": path, _DIRECTORY: str(directory)}


def order(directory: Path, pid: int, fault: str, requests: int) -> None:
    """The engine with this pid has the fault from the `requests`-th request of the rollout that comes from now on."""
    part = directory / f".{pid}.order"
    part.write_text(json.dumps({"fault": fault, "requests": requests}), encoding="utf-8")
    part.rename(directory / f"{pid}.order")


def record_of(directory: Path, pid: int) -> list[dict[str, Any]]:
    """What that engine has done, in order.

    {"event": "weights"} a first weight update is complete, {"event": "asked"} a first request of the rollout has come,
    {"event": "answered", "version": ...} and was answered, {"event": "fault", "version": ...} the fault begins.
    """
    path = directory / f"{pid}.record"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def recorded_pids(directory: Path) -> list[int]:
    """The engines that have a record."""
    return sorted(int(path.stem) for path in directory.glob("*.record"))


def install() -> None:
    """Called in the engine's process, before it makes its application."""
    from miles.backends.embedded_engine import server

    make_app, faults = server.make_app, EngineFaults(Path(os.environ[_DIRECTORY]), os.getpid())

    def make_faulty_app(*args: Any) -> web.Application:
        app = make_app(*args)
        app.middlewares.insert(0, faults.middleware)
        return app

    server.make_app = make_faulty_app


class EngineFaults:
    """See the module docstring."""

    def __init__(self, directory: Path, pid: int) -> None:
        self._order = directory / f"{pid}.order"
        self._record = directory / f"{pid}.record"
        self._requests_left: int | None = None
        self._told: set[str] = set()
        self._version: str | None = None
        self._action = ""
        self._paths: tuple[str, ...] = ()

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        of_rollout = request.path == "/generate" and bool((await request.json()).get("return_logprob"))
        if of_rollout:
            self._note_once("asked")
            self._count_down()
        if request.path in self._paths:
            return await self._spoil(request, handler)
        response = await handler(request)
        if of_rollout and response.status == 200:
            self._version = json.loads(response.body)["meta_info"]["weight_version"]  # type: ignore[attr-defined]
            self._note_once("answered")
        if request.path == "/end_weight_update" and response.status == 200:
            self._note_once("weights")
        return response

    def _count_down(self) -> None:
        if self._paths:
            return
        if self._requests_left is None:
            if not self._order.exists():
                return
            self._requests_left = json.loads(self._order.read_text(encoding="utf-8"))["requests"]
        self._requests_left -= 1
        if self._requests_left <= 0:
            fault = json.loads(self._order.read_text(encoding="utf-8"))["fault"]
            self._action, self._paths = FAULTS[fault]
            self._note_once("fault")

    async def _spoil(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._action == "error":
            return web.json_response({"detail": "a fault of the test"}, status=500)
        if self._action == "death":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._action == "silence":
            await asyncio.get_running_loop().create_future()
        return await _cut(request, await handler(request))

    def _note_once(self, event: str) -> None:
        if event not in self._told:
            self._told.add(event)
            line = json.dumps({"event": event, "version": self._version})
            with self._record.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


async def _cut(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """Send the half of this answer and hang up."""
    body: bytes = response.body  # type: ignore[attr-defined]
    half = web.StreamResponse(status=response.status, headers={"Content-Type": "application/json"})
    half.content_length = len(body)
    await half.prepare(request)
    await half.write(body[: len(body) // 2])
    if request.transport is not None:
        request.transport.close()
    return half
