"""Engines that hang, answer 5xx or are gone, seen from outside."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from miles.ray.rollout.engine_health import EngineHealth
from miles.utils.http_utils import close_http_client, find_available_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HANGS = -1
TIMEOUT_SECS = 0.3


class StubEngine:
    """Answers each path with the status in `statuses`, 200 where there is none, never where it is HANGS."""

    def __init__(self) -> None:
        self.statuses: dict[str, int] = {}
        self.only_once: set[str] = set()
        self.url = ""
        self._ended = asyncio.Event()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        assert self._runner is not None
        self._ended.set()
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        path = request.match_info["path"]
        status = self.statuses.get(path, 200)
        if path in self.only_once:
            self.statuses.pop(path, None)
        if status == HANGS:
            await self._ended.wait()
        return web.json_response({}, status=status)


@pytest.fixture
async def engine() -> AsyncIterator[StubEngine]:
    engine = StubEngine()
    await engine.start()
    yield engine
    await close_http_client()
    await engine.stop()


@pytest.fixture
def health() -> EngineHealth:
    return EngineHealth(TIMEOUT_SECS)


async def test_an_engine_that_generates_is_well(engine: StubEngine, health: EngineHealth) -> None:
    assert await health.fails_to_generate(engine.url) is None
    assert await health.fails_requests(engine.url) is None
    assert await health.fails_to_answer(engine.url) is None


async def test_an_engine_that_answers_health_and_never_generates_hangs(
    engine: StubEngine, health: EngineHealth
) -> None:
    engine.statuses = {"health_generate": HANGS, "generate": HANGS}
    assert await health.fails_to_generate(engine.url) == f"has generated nothing for {TIMEOUT_SECS:g} s"
    assert await health.fails_to_answer(engine.url) is None


async def test_a_full_queue_is_no_failure(engine: StubEngine, health: EngineHealth) -> None:
    engine.statuses = {"generate": HANGS}
    assert await health.fails_to_generate(engine.url) is None
    assert await health.fails_requests(engine.url) is None


async def test_an_engine_that_answers_requests_with_an_error_is_sick_though_it_calls_itself_healthy(
    engine: StubEngine, health: EngineHealth
) -> None:
    engine.statuses = {"generate": 500}
    assert await health.fails_to_generate(engine.url) is None
    assert await health.fails_requests(engine.url) == f"answers POST {engine.url}/generate with HTTP 500"
    engine.statuses = {"health_generate": 503}
    assert await health.fails_to_generate(engine.url) == f"answers GET {engine.url}/health_generate with HTTP 503"


async def test_a_single_error_does_not_count(engine: StubEngine, health: EngineHealth) -> None:
    engine.statuses = {"generate": 500, "health_generate": 503}
    engine.only_once = {"generate", "health_generate"}
    assert await health.fails_to_generate(engine.url) is None
    assert await health.fails_requests(engine.url) is None


async def test_an_engine_without_the_endpoint_and_one_that_refuses_the_token_are_well(
    engine: StubEngine, health: EngineHealth
) -> None:
    engine.statuses = {"health_generate": 404, "generate": 400, "model_info": 404}
    assert await health.fails_to_generate(engine.url) is None
    assert await health.fails_requests(engine.url) is None
    assert await health.fails_to_answer(engine.url) is None


async def test_an_engine_that_was_silent_before_a_pause_gets_what_is_left_of_the_timeout(engine: StubEngine) -> None:
    engine.statuses = {"health_generate": HANGS}
    assert await EngineHealth(3600.0).fails_to_generate(engine.url, 0.1) == "has generated nothing for 3600 s"


async def test_an_engine_that_is_gone_gives_no_answer(health: EngineHealth) -> None:
    url = f"http://127.0.0.1:{find_available_port(0)}"
    assert f"gives no answer to GET {url}/health_generate: " in (await health.fails_to_generate(url) or "")
    assert f"gives no answer to POST {url}/generate: " in (await health.fails_requests(url) or "")
    assert "gives no answer: " in (await health.fails_to_answer(url) or "")
    await close_http_client()


async def test_an_engine_that_is_silent_altogether_has_not_answered(engine: StubEngine, health: EngineHealth) -> None:
    engine.statuses = {"model_info": HANGS}
    assert await health.fails_to_answer(engine.url) == f"has not answered for {TIMEOUT_SECS:g} s"
