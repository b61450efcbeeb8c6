"""The router's command line, and one that runs already. What a real router does is in tests/contracts."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web

from miles.ray.rollout.router import ExternalRouter, Router, RouterClient, make_router, router_command
from miles.utils.http_utils import close_http_client
from miles.utils.network import find_available_port
from miles.utils.processes import ChildProcess, ProcessDied
from tests.fast.ray.rollout.answering_server import answering_server
from tests.fast.virtual_time import virtual

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


def flags(**changes: Any) -> Namespace:
    values = {
        "sglang_router_ip": "127.0.0.1",
        "sglang_router_port": None,
        "sglang_router_policy": None,
        "sglang_router_request_timeout_secs": 60,
        "router_prometheus_port": None,
        "rollout_external_router": False,
    }
    return Namespace(**{**values, **changes})


def test_it_asks_engines_what_they_answer_while_they_are_paused_and_the_user_wins() -> None:
    words = router_command(flags(), "127.0.0.1", 1)
    assert words[words.index("--health-check-endpoint") + 1] == "/model_info"
    words = router_command(flags(router_health_check_endpoint="/ping"), "127.0.0.1", 1)
    assert words[-2:] == ["--health-check-endpoint", "/ping"]


class FakeRouter:
    """The list of workers of sglang-router: a change is accepted, and done when the list has been read once more."""

    def __init__(self) -> None:
        self.workers: dict[str, dict[str, Any]] = {}
        self._accepted: list[Any] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/workers", self._list)
        app.router.add_post("/workers", self._add)
        app.router.add_delete("/workers/{id}", self._remove)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def _list(self, _: web.Request) -> web.Response:
        listed = list(self.workers.values())
        for change in self._accepted:
            change()
        self._accepted.clear()
        return web.json_response({"workers": listed})

    async def _add(self, request: web.Request) -> web.Response:
        url = (await request.json())["url"]
        worker = {"id": url.rpartition(":")[2], "url": url, "is_healthy": True}
        self._accepted.append(lambda: self.workers.setdefault(worker["id"], worker))
        return web.json_response({}, status=202)

    async def _remove(self, request: web.Request) -> web.Response:
        known = request.match_info["id"] in self.workers
        self._accepted.append(lambda: self.workers.pop(request.match_info["id"], None))
        return web.json_response({}, status=202 if known else 404)


@pytest.fixture
async def router() -> AsyncIterator[tuple[FakeRouter, int]]:
    fake, port = FakeRouter(), find_available_port()
    runner = web.AppRunner(fake.app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    yield fake, port
    await runner.cleanup()
    await close_http_client()


async def test_adding_and_removing_waits_until_it_is_done(router: tuple[FakeRouter, int]) -> None:
    fake, port = router
    client = RouterClient(f"http://127.0.0.1:{port}")
    await client.add_engines(["http://a:1"])
    # The router serves an engine already: that is not the one that is waited for.
    await client.add_engines(["http://b:2"])
    assert set(fake.workers) == {"1", "2"}
    await client.remove_engines(["http://a:1"])
    await client.remove_engines(["http://nobody:3"])
    assert set(fake.workers) == {"2"}


async def test_the_engines_of_the_run_leave_an_external_router(router: tuple[FakeRouter, int]) -> None:
    fake, port = router
    external = make_router(flags(rollout_external_router=True, sglang_router_port=port))
    assert isinstance(external, ExternalRouter)
    await external.start()
    await external.add_engines(["http://a:1", "http://b:2"])
    assert set(fake.workers) == {"1", "2"}
    await external.stop()
    assert fake.workers == {}


async def test_an_external_router_with_engines_of_others_is_refused(router: tuple[FakeRouter, int]) -> None:
    fake, port = router
    fake.workers["9"] = {"id": "9", "url": "http://other:9", "is_healthy": True}
    external = ExternalRouter(flags(sglang_router_port=port))
    with pytest.raises(ValueError, match=r"has engines already .http://other:9., which this run would not update"):
        await external.start()
    await external.stop()
    assert set(fake.workers) == {"9"}, "an engine of somebody else was taken out"


def test_without_the_flag_the_run_starts_its_own() -> None:
    assert isinstance(make_router(flags()), Router)


def own_router(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *free_ports: int, **changes: Any) -> Router:
    """Its process is a few lines; what is taken for free are these ports in turn."""
    ports = list(free_ports)
    monkeypatch.setattr("miles.ray.rollout.router.find_available_port", lambda base: ports.pop(0))
    monkeypatch.setattr("miles.ray.rollout.router.router_command", lambda args, ip, port: answering_server(port))
    return Router(flags(run_dir=tmp_path, **changes))


async def test_another_runs_router_is_not_taken_for_ours(
    router: tuple[FakeRouter, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, strangers = router
    free = find_available_port()
    own = own_router(monkeypatch, tmp_path, strangers, free)
    await own.start()
    assert (own.port, own.url) == (free, f"http://127.0.0.1:{free}")
    await own.stop()


async def test_a_port_that_the_user_has_chosen_is_not_replaced(
    router: tuple[FakeRouter, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, strangers = router
    own = own_router(monkeypatch, tmp_path, sglang_router_port=strangers)
    with pytest.raises(ProcessDied, match=rf"router.*port {strangers} was taken|router.*exited with code 1"):
        await own.start()


class Deaf:
    """Stands for the router's answers: none while `silent`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.silent = False
        self.error: Exception | None = None
        monkeypatch.setattr(RouterClient, "engine_urls", lambda client: self._answer())

    async def _answer(self) -> set[str]:
        if self.silent:
            await asyncio.get_running_loop().create_future()
        if self.error is not None:
            raise self.error
        return set()


@virtual
async def test_a_manager_without_descriptors_does_not_take_its_router_for_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    deaf, router = Deaf(monkeypatch), RouterClient("http://127.0.0.1:1")
    deaf.error = aiohttp.ClientOSError(errno.EMFILE, "Too many open files")
    silent = asyncio.ensure_future(router.wait_silent(60.0))
    await asyncio.sleep(600.0)
    assert not silent.done()
    deaf.error = aiohttp.ClientOSError(errno.ECONNREFUSED, "Connection refused")
    await asyncio.sleep(70.0)
    assert silent.done()


@virtual
@pytest.mark.parametrize("error", [KeyError("workers"), ValueError("no JSON"), TypeError("a list")])
async def test_a_router_whose_answers_are_none_is_silent(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    Deaf(monkeypatch).error = error
    await RouterClient("http://127.0.0.1:1").wait_silent(60.0)


@virtual
async def test_a_router_that_lives_and_does_not_answer_is_named_in_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deaf, router = Deaf(monkeypatch), Router(flags(heartbeat_timeout_secs=60.0))
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    router._process = process = ChildProcess("router", sleeper, tmp_path / "router.log")
    router.url = "http://127.0.0.1:1"
    watch = asyncio.ensure_future(router.watch())
    await asyncio.sleep(600.0)
    assert not watch.done()
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)  # noqa: ASYNC222 - it has been stopped
    deaf.silent = True
    await asyncio.sleep(55.0)
    assert not watch.done()
    await asyncio.sleep(15.0)
    with pytest.raises(ProcessDied, match=r"has not answered at http://127.0.0.1:1 for 60 s .*it is stopped"):
        await watch
    process._popen.kill()
    assert str(await process.wait_died()).startswith(f"router (pid {process.pid}) was killed by SIGKILL")


@virtual
async def test_an_external_router_may_be_away_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = Deaf(monkeypatch)
    watch = asyncio.ensure_future(ExternalRouter(flags(sglang_router_port=1)).watch())
    for _ in range(5):
        deaf.silent = True
        await asyncio.sleep(15.0)
        deaf.silent = False
        await asyncio.sleep(15.0)
    assert not watch.done()
    deaf.silent = True
    await asyncio.sleep(45.0)
    with pytest.raises(ProcessDied, match=r"the external router http://127.0.0.1:1 has not answered for 30 s"):
        await watch
