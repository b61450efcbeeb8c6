import asyncio
import random
import resource
import subprocess
import sys
from argparse import Namespace

import orjson
import pytest
from aiohttp import web

from miles.utils import http_utils
from miles.utils.http_client import HttpClient, HttpConfig
from miles.utils.http_errors import HttpConnectionError, HttpRequestError, HttpStatusError, HttpTimeoutError
from miles.utils.http_utils import (
    NEVER_RETRIED_ENDPOINTS,
    close_http_client,
    get,
    init_http_client,
    post,
    post_bytes_no_retry,
    wait_http_ok,
)
from miles.utils.loop_bound import LoopBound
from tests.fast.utils.http_servers import Script, VirtualPauses, refused_url, serve


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch):
    """Every test has its own configuration; the clients go with the test's event loop."""
    state = http_utils._Http()
    monkeypatch.setattr(http_utils, "_http", state)
    yield state
    assert not state.clients._resources, "a client outlived its event loop"


@pytest.fixture
async def pauses(monkeypatch, fresh_state):
    pauses = VirtualPauses(monkeypatch)
    make = lambda: HttpClient(fresh_state.config, sleep=pauses, rng=random.Random(0))  # noqa: E731
    fresh_state.clients = LoopBound(make, HttpClient.close)
    return pauses


class TestPost:
    async def test_sends_json_and_parses_json(self):
        script = Script((200, '{"text": "yes", "meta_info": {}}'))
        async with serve(script) as url:
            assert await post(f"{url}/generate", {"input_ids": [1, 2]}) == {"text": "yes", "meta_info": {}}
        assert script.requests == [("POST", "/generate", b'{"input_ids":[1,2]}')]
        assert script.headers[0]["Content-Type"] == "application/json"

    @pytest.mark.parametrize(
        ("body", "result"),
        [
            ("Cache flushed.\n", "Cache flushed.\n"),
            ("", ""),
            ("[1, 2.5, null]", [1, 2.5, None]),
            ('{"score": -Infinity}', {"score": float("-inf")}),
            ("0.5", 0.5),
            (b"\xff", "\ufffd"),
        ],
    )
    async def test_the_result_is_json_or_text(self, body, result):
        async with serve(Script((200, body))) as url:
            assert await post(url, {}) == result
            assert await get(url) == result

    async def test_an_empty_payload_is_an_empty_object(self):
        script = Script((200, ""))
        async with serve(script) as url:
            await post(url, {})
            await post(url, None)
        assert [body for _, _, body in script.requests] == [b"{}", b"{}"]

    async def test_takes_what_the_standard_library_takes(self):
        numpy = pytest.importorskip("numpy")
        script = Script((200, ""))
        payload = {"ids": numpy.arange(3), "by_number": {1: 2**70}}
        async with serve(script) as url:
            await post(url, {"ids": numpy.arange(3)})
            await post(url, {"by_number": {1: 2**70}})
            with pytest.raises(TypeError):
                await post(url, payload | {"object": object()})
        assert [body for _, _, body in script.requests] == [b'{"ids":[0,1,2]}', b'{"by_number": {"1": %d}}' % 2**70]

    async def test_headers_are_added(self):
        script = Script((200, ""))
        async with serve(script) as url:
            await post(url, {}, headers={"X-SMG-Routing-Key": "abc"})
        assert script.headers[0]["X-SMG-Routing-Key"] == "abc"
        assert script.headers[0]["Content-Type"] == "application/json"

    async def test_other_actions(self):
        script = Script((200, ""))
        async with serve(script) as url:
            await post(f"{url}/get", None, action="get")
            await post(f"{url}/delete", {}, action="delete")
            await post(f"{url}/put", {"a": 1}, action="put")
        assert script.requests == [("GET", "/get", b""), ("DELETE", "/delete", b""), ("PUT", "/put", b'{"a":1}')]

    @pytest.mark.parametrize("action", ["get", "delete"])
    async def test_get_and_delete_carry_no_payload(self, action):
        with pytest.raises(ValueError, match=f"{action}.*carries no payload"):
            await post("http://127.0.0.1:1", {"a": 1}, action=action)

    async def test_an_unknown_action_lists_the_known_ones(self):
        with pytest.raises(ValueError, match=r"'patch'.*post, put, get, delete"):
            await post("http://127.0.0.1:1", {}, action="patch")

    @pytest.mark.parametrize(("max_retries", "attempts"), [(None, 9), (0, 1), (2, 3)])
    async def test_retries_are_the_callers_or_the_runs(self, pauses, max_retries, attempts):
        script = Script((503, "busy"))
        async with serve(script) as url:
            with pytest.raises(HttpStatusError) as caught:
                await post(f"{url}/generate", {}, max_retries=max_retries)
        assert caught.value.attempts == len(script.requests) == attempts

    @pytest.mark.parametrize("endpoint", sorted(NEVER_RETRIED_ENDPOINTS))
    async def test_a_weight_update_call_is_sent_once_whatever_max_retries_says(self, pauses, endpoint):
        script = Script((503, "busy"))
        async with serve(script) as url:
            for path in (endpoint, endpoint + "/", endpoint + "?timeout=3"):
                with pytest.raises(HttpStatusError, match=f"{endpoint}.* after 1 attempt .* 503: busy"):
                    await post(f"{url}/{path}", {}, max_retries=60)
        assert len(script.requests) == 3
        with pytest.raises(HttpConnectionError, match="after 1 attempt"):
            await post(f"{refused_url()}/{endpoint}", {}, max_retries=60)


async def test_get_is_one_try(pauses):
    script = Script((503, "busy"))
    async with serve(script) as url:
        with pytest.raises(HttpStatusError, match=r"GET .* after 1 attempt"):
            await get(f"{url}/model_info")
    assert len(script.requests) == 1


class TestPostBytesNoRetry:
    async def test_sends_bytes_or_json_and_returns_bytes(self):
        script = Script((200, b"\x00\x01"))
        async with serve(script) as url:
            assert await post_bytes_no_retry(url, b"raw", timeout=10) == b"\x00\x01"
            assert await post_bytes_no_retry(url, {"a": 1}, timeout=None) == b"\x00\x01"
        assert [body for _, _, body in script.requests] == [b"raw", b'{"a":1}']

    async def test_is_one_try_with_a_time_limit(self, pauses):
        async def handler(request):
            await asyncio.Event().wait()

        async with serve(handler) as url:
            with pytest.raises(HttpTimeoutError, match="after 1 attempt"):
                await post_bytes_no_retry(url, b"", timeout=0.05)


class TestWaitHttpOk:
    async def test_waits_until_the_answer_is_2xx(self, monkeypatch):
        monkeypatch.setattr(http_utils, "_POLL_SECS", 0.001)
        script = Script((503, ""), (404, ""), (200, ""))
        async with serve(script) as url:
            await wait_http_ok(f"{url}/health")
        assert [method for method, _, _ in script.requests] == ["GET"] * 3

    async def test_posts_a_payload(self):
        script = Script((200, ""))
        async with serve(script) as url:
            await wait_http_ok(url, json_payload={"text": "hi"})
        assert script.requests[0][::2] == ("POST", b'{"text":"hi"}')

    async def test_gives_up_with_the_last_failure(self, monkeypatch):
        monkeypatch.setattr(http_utils, "_POLL_SECS", 0.01)
        with pytest.raises(HttpConnectionError) as caught:
            await wait_http_ok(refused_url(), timeout=0.1)
        assert caught.value.attempts > 1
        assert 0.05 < caught.value.elapsed < 10

    async def test_a_server_that_hangs_is_given_up_too(self):
        async def handler(request):
            await asyncio.Event().wait()

        async with serve(handler) as url:
            with pytest.raises(HttpTimeoutError):
                await wait_http_ok(url, timeout=0.2)

    def test_a_process_that_has_exited_ends_the_wait_at_once(self):
        process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
        process.wait(30)
        with pytest.raises(RuntimeError, match="exited with code 3"):
            asyncio.run(wait_http_ok(refused_url(), timeout=1000, process=process))


class TestConfiguration:
    def test_init_takes_the_flags_and_needs_no_event_loop(self, fresh_state):
        init_http_client(Namespace(rollout_num_gpus=2, sglang_server_concurrency=64, http_max_retries=1))
        assert fresh_state.config == HttpConfig(max_connections=128, max_retries=1)

    def test_init_makes_room_for_the_sockets(self):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        low = 256
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
            init_http_client(Namespace(rollout_num_gpus=1, sglang_server_concurrency=200))
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 200 + 512
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def test_too_few_files_are_a_warning_with_numbers(self, caplog, monkeypatch):
        monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 300))
        monkeypatch.setattr(resource, "setrlimit", lambda _, limits: None)
        init_http_client(Namespace(rollout_num_gpus=1, sglang_server_concurrency=200))
        assert "200 requests in flight need about 712 open files, the hard limit is 300" in caplog.text

    async def test_an_idle_client_takes_over_a_new_configuration(self, fresh_state):
        async with serve(Script((200, ""))) as url:
            await get(url)
            first = fresh_state.clients.peek()
            init_http_client(Namespace())  # equal: nothing to do
            await get(url)
            assert fresh_state.clients.peek() is first
            init_http_client(Namespace(http_timeout_secs=1.5))
            await get(url)
            assert fresh_state.clients.peek() is not first
            assert fresh_state.clients.peek().config.total_timeout_secs == 1.5

    async def test_a_client_with_requests_in_flight_is_left_alone(self, fresh_state):
        started, release = asyncio.Event(), asyncio.Event()

        async def handler(request):
            if request.path == "/generate":
                started.set()
                await release.wait()
            return web.Response(text="done")

        async with serve(handler) as url:
            generation = asyncio.create_task(post(f"{url}/generate", {}))
            await started.wait()
            init_http_client(Namespace(http_timeout_secs=1.5))
            assert await get(url) == "done"
            release.set()
            assert await generation == "done"


class TestOneClientPerLoop:
    def test_two_loops_share_nothing_and_each_closes_its_own(self, fresh_state):
        clients = []

        async def use():
            async with serve(Script((200, "1"))) as url:
                assert await get(url) == 1
                assert await post(url, {}) == 1
                clients.append(fresh_state.clients.peek())

        asyncio.run(use())
        asyncio.run(use())
        assert clients[0] is not clients[1]
        assert [client._kept_alive.closed and client._fresh.closed for client in clients] == [True, True]

    async def test_close_and_go_on(self, fresh_state):
        async with serve(Script((200, "1"))) as url:
            await get(url)
            first = fresh_state.clients.peek()
            await close_http_client()
            assert first._kept_alive.closed
            await close_http_client()
            assert await get(url) == 1

    async def test_closing_without_a_client_does_nothing(self):
        await close_http_client()


def test_endpoints_of_a_weight_update_are_found_behind_any_prefix():
    assert http_utils._endpoint("http://h:1/v1/update_weight_version?x=1") in NEVER_RETRIED_ENDPOINTS
    assert http_utils._endpoint("http://h:1/generate") not in NEVER_RETRIED_ENDPOINTS
    assert http_utils._endpoint("http://h:1") == ""


def test_errors_can_be_told_apart_from_the_facade():
    assert issubclass(http_utils.HttpStatusError, HttpRequestError)


def test_importing_it_is_light():
    code = "import sys, miles.utils.http_utils, miles.utils.async_utils; print(*sorted(sys.modules))"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "ray", "transformers", "sglang", "megatron", "numpy", "httpx"} & set(modules)


def test_eight_thousand_tokens_survive_the_way():
    tokens = [[-0.123456789 * i, i, None] for i in range(8192)]

    async def use():
        async with serve(Script((200, orjson.dumps({"meta_info": {"output_token_logprobs": tokens}})))) as url:
            return await post(url, {"input_ids": list(range(8192))})

    assert asyncio.run(use())["meta_info"]["output_token_logprobs"] == tokens
