"""The cached weight version: one query per TTL, whatever the router does, and no answer that is not a number."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import httpx
import pytest

import miles.rollout.fully_async_rollout as module
from miles.rollout._weight_version import http_status, parse_weight_version
from tests.fast.fakes import rollout_args
from tests.fast.virtual_time import virtual

ARGS = rollout_args(sglang_router_ip="10.0.0.1", sglang_router_port=3000)
ROUTER = "http://10.0.0.1:3000"
REQUEST = httpx.Request("GET", ROUTER)


class FakeRouter:
    """A `get` that answers or raises what `responses` say in turn (the last one for ever), each after `seconds`."""

    def __init__(self, *responses: Any, seconds: float = 0.0) -> None:
        self.responses = list(responses)
        self.seconds = seconds
        self.urls: list[str] = []

    async def __call__(self, url: str) -> Any:
        self.urls.append(url)
        await asyncio.sleep(self.seconds)
        response = self.responses.pop(0) if len(self.responses) > 1 else self.responses[0]
        if isinstance(response, BaseException):
            raise response
        return response


@pytest.fixture
def router(monkeypatch):
    def install(*responses: Any, seconds: float = 0.0) -> FakeRouter:
        fake = FakeRouter(*responses, seconds=seconds)
        monkeypatch.setattr(module, "get", fake)
        return fake

    return install


def version(number: Any) -> dict[str, Any]:
    return {"weight_version": number}


@virtual
async def test_asks_the_router_once_per_ttl(router):
    fake = router(version("3"), version("4"))
    cached = module._CachedWeightVersion(ttl=1.0)
    assert [await cached.get(ARGS) for _ in range(3)] == [3, 3, 3]
    assert fake.urls == [f"{ROUTER}/get_model_info"]
    await asyncio.sleep(1.0)
    assert await cached.get(ARGS) == 4
    assert len(fake.urls) == 2


@pytest.mark.parametrize(
    "failure",
    [
        ConnectionRefusedError(),
        TimeoutError(),
        aiohttp.ClientConnectionError(),
        aiohttp.ServerTimeoutError(),
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("slow"),
        httpx.HTTPStatusError("503", request=REQUEST, response=httpx.Response(503)),
        json.JSONDecodeError("no JSON", "", 0),
    ],
    ids=lambda failure: type(failure).__name__,
)
@virtual
async def test_failed_queries_of_every_kind_are_throttled_and_keep_the_last_value(router, failure):
    fake = router(version("3"), failure)
    cached = module._CachedWeightVersion(ttl=1.0)
    assert await cached.get(ARGS) == 3
    for second in range(1, 4):
        await asyncio.sleep(1.0)
        for _ in range(5):
            assert await cached.get(ARGS) == 3
        assert len(fake.urls) == 1 + second


@pytest.mark.parametrize(
    "answer",
    [
        version("default"),
        version(None),
        version("1.5"),
        version(1.5),
        version(True),
        version("-1"),
        version("٣"),
        {},
        None,
        [],
        "<html>",
        7,
    ],
    ids=repr,
)
@virtual
async def test_malformed_answer_is_no_version_and_does_not_raise(router, answer):
    fake = router(answer)
    cached = module._CachedWeightVersion(ttl=1.0)
    assert await cached.get(ARGS) is None
    assert await cached.get(ARGS) is None
    assert len(fake.urls) == 1


@virtual
async def test_last_good_version_survives_a_malformed_answer(router):
    router(version(6), version("default"), version("8"))
    cached = module._CachedWeightVersion(ttl=0.0)
    assert [await cached.get(ARGS) for _ in range(3)] == [6, 6, 8]


@virtual
async def test_slow_router_costs_two_seconds_and_is_not_asked_again_at_once(router):
    fake = router(version("3"), seconds=60)
    cached = module._CachedWeightVersion(ttl=1.0)
    loop = asyncio.get_running_loop()
    assert await cached.get(ARGS) is None
    assert loop.time() == 2.0
    await asyncio.sleep(0.9)
    assert await cached.get(ARGS) is None
    assert len(fake.urls) == 1
    await asyncio.sleep(0.1)
    await cached.get(ARGS)
    assert len(fake.urls) == 2


@virtual
async def test_query_timeout_is_read_at_call_time(router, monkeypatch):
    router(version("3"), seconds=60)
    monkeypatch.setattr(module, "WEIGHT_VERSION_QUERY_TIMEOUT_SECS", 0.25)
    assert await module._CachedWeightVersion(ttl=1.0).get(ARGS) is None
    assert asyncio.get_running_loop().time() == 0.25


@virtual
async def test_ttl_counts_from_the_end_of_a_query(router):
    fake = router(version("3"), seconds=1.5)
    cached = module._CachedWeightVersion(ttl=1.0)
    await cached.get(ARGS)
    assert await cached.get(ARGS) == 3
    assert len(fake.urls) == 1


@virtual
async def test_concurrent_readers_share_one_query(router):
    fake = router(version("3"), seconds=0.5)
    cached = module._CachedWeightVersion(ttl=1.0)
    assert await asyncio.gather(*(cached.get(ARGS) for _ in range(4))) == [3, 3, 3, 3]
    assert len(fake.urls) == 1


@virtual
async def test_cancellation_goes_through_and_counts_as_a_query(router):
    fake = router(version("3"), seconds=1.0)
    cached = module._CachedWeightVersion(ttl=1.0)
    reader = asyncio.create_task(cached.get(ARGS))
    await asyncio.sleep(0.5)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert await cached.get(ARGS) is None
    assert len(fake.urls) == 1
    await asyncio.sleep(1.0)
    assert await cached.get(ARGS) == 3


class OurStatusError(Exception):
    status = 404


@pytest.mark.parametrize(
    "not_found",
    [OurStatusError(), httpx.HTTPStatusError("404", request=REQUEST, response=httpx.Response(404))],
    ids=["status", "response.status_code"],
)
@virtual
async def test_unknown_path_is_followed_by_the_other_one(router, not_found):
    fake = router(not_found, version("3"))
    assert await module._CachedWeightVersion(ttl=1.0).get(ARGS) == 3
    assert fake.urls == [f"{ROUTER}/get_model_info", f"{ROUTER}/model_info"]


@virtual
async def test_both_paths_share_one_time_limit(router):
    fake = router(OurStatusError(), version("3"), seconds=1.5)
    assert await module._CachedWeightVersion(ttl=1.0).get(ARGS) is None
    assert len(fake.urls) == 2
    assert asyncio.get_running_loop().time() == 2.0


@virtual
async def test_warns_once_until_the_router_answers_again(router, caplog):
    down = ConnectionRefusedError()
    router(down, down, version("3"), down)
    cached = module._CachedWeightVersion(ttl=0.0)
    for _ in range(5):
        await cached.get(ARGS)
    assert len(caplog.records) == 2
    assert "last known one (3)" in caplog.records[1].message


def test_status_of_an_exception_without_one_is_none():
    assert http_status(ValueError()) is None


@pytest.mark.parametrize(("number", "parsed"), [("0", 0), ("12", 12), (0, 0), (7, 7)])
def test_whole_numbers_are_versions(number, parsed):
    assert parse_weight_version(version(number)) == parsed
