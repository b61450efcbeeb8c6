"""The engines of evaluation are brought to exactly one snapshot, and are replaced where they died."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from miles.ray.eval.fleet import EvalFleet
from miles.rollout.checkpoint_eval import EvalSkipped
from tests.fast.rollout.engine_stub import make_args

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class StubServer:
    """A server with weights. `ignores`: that many loads are answered well and change nothing."""

    def __init__(self) -> None:
        self.version = "default"
        self.loads: list[dict[str, Any]] = []
        self.ignores = 0
        self.status = 200
        self.port = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/get_model_info", self._model_info)
        app.router.add_post("/update_weights_from_disk", self._load)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]
        return f"http://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.loads.append(body)
        if self.status != 200:
            return web.json_response({"success": False, "message": "no such directory"}, status=self.status)
        if self.ignores:
            self.ignores -= 1
        else:
            self.version = body["weight_version"]
        return web.json_response({"success": True, "message": "ok"})


class StubServers:
    """Two engines and a router that relays the first one; counts how often they were started."""

    def __init__(self) -> None:
        self.engines: list[StubServer] = []
        self.router = StubServer()
        self.starts = 0

    async def start(self) -> list[str]:
        self.starts += 1
        self.engines = [StubServer(), StubServer()]
        self.router._model_info = self.engines[0]._model_info  # type: ignore[method-assign]
        await self.router.start()
        return [await engine.start() for engine in self.engines]

    async def stop(self) -> None:
        for server in [self.router, *self.engines]:
            await server.stop()

    async def pids(self) -> dict[str, int]:
        return {}


@pytest.fixture
async def servers() -> AsyncIterator[StubServers]:
    servers = StubServers()
    yield servers
    await servers.stop()


@pytest.fixture
async def fleet(servers: StubServers) -> AsyncIterator[EvalFleet]:
    from miles.utils.http_utils import close_http_client

    await servers.start()  # to learn the router's port
    args = make_args(sglang_router_port=servers.router.port, hf_checkpoint="model")
    await servers.stop()
    fleet = EvalFleet(args, servers)
    await fleet.start()
    servers.starts = 0
    yield fleet
    await close_http_client()


async def test_every_engine_gets_the_snapshot_under_its_version(fleet: EvalFleet, servers: StubServers) -> None:
    state = await fleet.pin("snapshots/step_1", "3")
    for engine in servers.engines:
        assert engine.loads == [{"model_path": "snapshots/step_1", "weight_version": "3", "flush_cache": True}]
    assert state.args.sglang_router_port == servers.router.port
    assert await fleet.pin("snapshots/step_2", "4") is state
    assert servers.starts == 0


async def test_an_engine_that_did_not_take_the_weights_is_tried_again(fleet: EvalFleet, servers: StubServers) -> None:
    servers.engines[1].ignores = 1
    await fleet.pin("snapshots/step_1", "3")
    assert [len(engine.loads) for engine in servers.engines] == [2, 2]


async def test_one_that_never_takes_them_gives_no_point(fleet: EvalFleet, servers: StubServers) -> None:
    servers.engines[1].ignores = 9
    with pytest.raises(EvalSkipped, match="has the weights 'default' instead of '3'") as skipped:
        await fleet.pin("snapshots/step_1", "3")
    assert skipped.value.reason == "pin_failed"


async def test_one_that_refuses_to_load_gives_no_point(fleet: EvalFleet, servers: StubServers) -> None:
    servers.engines[0].status = 400
    with pytest.raises(EvalSkipped, match="no such directory"):
        await fleet.pin("nowhere", "3")


async def test_dead_servers_are_replaced(fleet: EvalFleet, servers: StubServers) -> None:
    await servers.engines[1].stop()
    await fleet.pin("snapshots/step_1", "3")
    assert servers.starts == 1
    assert [engine.version for engine in servers.engines] == ["3", "3"]
