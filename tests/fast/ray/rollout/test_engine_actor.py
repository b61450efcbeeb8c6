"""A server that finds its port taken starts again on another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web

from miles.backends.sglang_utils.launch import ServerPlace
from miles.ray.rollout.engine_actor import EngineActor
from miles.utils.network import find_available_port
from miles.utils.processes import ProcessDied
from tests.fast.ray.rollout.answering_server import answering_server

if TYPE_CHECKING:
    from pathlib import Path


class OnPorts(EngineActor):
    """Its server is a few lines that answer 200, on these ports in turn."""

    def __init__(self, ports: list[int], tmp_path: Path) -> None:
        self.name, self._node_rank, self._server = "engine-0", 0, None
        self._log_path, self._ports = tmp_path / "engine-0.log", ports

    def _place(self, dist_init_addr: str | None) -> ServerPlace:
        return ServerPlace(
            host="127.0.0.1", port=self._ports.pop(0), nccl_port=0, nodes=1, node_rank=0, dist_init_addr=dist_init_addr
        )

    def _command(self, place: ServerPlace) -> list[str]:
        return answering_server(place.port)


@pytest.fixture
async def stranger() -> Any:
    """The port of another run's engine, which is healthy."""

    async def is_healthy(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/health", is_healthy)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", find_available_port(0))
    await site.start()
    yield runner.addresses[0][1]
    await runner.cleanup()


async def test_another_runs_engine_is_not_taken_for_ours(stranger: int, tmp_path: Path) -> None:
    own = find_available_port(0)
    actor = OnPorts([stranger, own], tmp_path)
    assert await actor.start() == f"http://127.0.0.1:{own}"
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{own}/health") as response:
        assert response.status == 200
    await actor.stop()


async def test_where_every_port_is_taken_that_is_said(stranger: int, tmp_path: Path) -> None:
    with pytest.raises(ProcessDied, match=r"engine-0.*taken|engine-0.*exited with code 1"):
        await OnPorts([stranger] * 3, tmp_path).start()
