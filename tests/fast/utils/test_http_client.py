import asyncio
import pickle
import random
import socket
from argparse import Namespace

import aiohttp
import pytest
from aiohttp import web

from miles.utils.http_client import Backoff, HttpClient, HttpConfig, requests_in_flight
from miles.utils.http_errors import HttpConnectionError, HttpRequestError, HttpStatusError, HttpTimeoutError
from tests.fast.utils.http_servers import Script, VirtualPauses, read_request, refused_url, serve, serve_connections

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.fixture
async def pauses(monkeypatch):
    return VirtualPauses(monkeypatch)


@pytest.fixture
async def client(pauses):
    async with HttpClient(sleep=pauses, rng=random.Random(0)) as client:
        yield client
        assert client.in_flight == 0


class TestBackoff:
    def test_pauses_are_uniform_below_a_bound_that_doubles_up_to_the_cap(self):
        backoff = Backoff(base_secs=0.5, cap_secs=3.0)
        rng = random.Random(1)
        for attempt, bound in enumerate([0.5, 1.0, 2.0, 3.0, 3.0], start=1):
            drawn = [backoff.pause(attempt, rng) for _ in range(2000)]
            assert 0.0 <= min(drawn) < 0.05 * bound
            assert 0.95 * bound < max(drawn) <= bound

    def test_a_late_attempt_does_not_overflow(self):
        assert Backoff(cap_secs=30.0).pause(100_000, random.Random(0)) <= 30.0

    def test_retry_after_is_the_least_up_to_the_cap(self):
        assert 7.0 <= Backoff(base_secs=0.5).pause(1, random.Random(0), retry_after=7.0) < 7.6
        assert Backoff(cap_secs=30.0).pause(1, random.Random(0), retry_after=86400.0) == 30.0


class TestRequestsInFlight:
    def args(self, **changes):
        fields = {
            "sglang_server_concurrency": 512,
            "rollout_num_gpus": 8,
            "rollout_num_gpus_per_engine": 2,
            "fully_async": False,
            "rollout_batch_size": 32,
            "n_samples_per_prompt": 8,
            "async_max_concurrent_samples": None,
        }
        return Namespace(**{**fields, **changes})

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({}, 2048),
            ({"sglang_server_concurrency": 16}, 64),
            ({"rollout_batch_size": 1024}, 2048),
            ({"fully_async": True}, 2048),
            ({"fully_async": True, "rollout_batch_size": 1024}, 8192),
            ({"fully_async": True, "rollout_batch_size": 1024, "async_max_concurrent_samples": 3001}, 3000),
            ({"fully_async": True, "rollout_num_gpus": 1, "async_max_concurrent_samples": 3}, 256),
            ({"rollout_num_gpus": 1, "rollout_num_gpus_per_engine": 8, "sglang_server_concurrency": 4}, 1),
            ({"rollout_num_gpus": None}, 0),
            ({"rollout_num_gpus": 0}, 0),
        ],
    )
    def test_is_what_the_engines_serve_or_fully_async_submits(self, changes, expected):
        assert requests_in_flight(self.args(**changes)) == expected

    def test_the_configuration_takes_the_flags_or_its_defaults(self):
        assert HttpConfig.from_args(Namespace()) == HttpConfig(0, 10.0, 14400.0, 8)
        args = self.args(http_connect_timeout_secs=1.0, http_timeout_secs=2.0, http_max_retries=3)
        assert HttpConfig.from_args(args) == HttpConfig(2048, 1.0, 2.0, 3)


class TestRetries:
    @pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
    async def test_statuses_that_can_pass_are_retried(self, client, pauses, status):
        script = Script((status, "later"), (status, "later"), (200, "done"))
        async with serve(script) as url:
            assert await client.request("POST", f"{url}/generate", body=b"{}", retries=2) == b"done"
        assert script.requests == [("POST", "/generate", b"{}")] * 3
        assert len(pauses.pauses) == 2

    @pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 405, 408, 409, 413, 422])
    async def test_other_statuses_are_not(self, client, pauses, status):
        script = Script((status, "no"))
        async with serve(script) as url:
            with pytest.raises(HttpStatusError) as caught:
                await client.request("POST", url, retries=8)
        assert (caught.value.status, caught.value.attempts, caught.value.body) == (status, 1, "no")
        assert len(script.requests) == 1
        assert pauses.pauses == []

    async def test_they_are_bounded_and_the_error_says_how_often_and_how_long(self, client, pauses):
        script = Script((503, "first"), (500, "x" * 9000))
        async with serve(script) as url:
            with pytest.raises(HttpStatusError) as caught:
                await client.request("POST", f"{url}/generate", retries=5)
        error = caught.value
        assert len(script.requests) == error.attempts == 6
        assert [pause <= bound for pause, bound in zip(pauses.pauses, (0.5, 1, 2, 4, 8), strict=True)] == [True] * 5
        assert sum(pauses.pauses) <= error.elapsed < sum(pauses.pauses) + 10
        assert error.status == 500
        assert error.body == "x" * 500
        assert str(error).startswith(
            f"POST {url}/generate failed after 6 attempts in {error.elapsed:.1f} s: HTTP 500: x"
        )

    async def test_the_server_can_ask_for_a_longer_pause(self, client, pauses):
        script = Script(
            (429, "", {"Retry-After": "7"}), (503, "", {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}), (200, "ok")
        )
        async with serve(script) as url:
            await client.request("GET", url, retries=2)
        assert 7.0 <= pauses.pauses[0] < 7.6
        assert pauses.pauses[1] <= 1.0

    async def test_a_refused_connection_is_retried_until_the_server_is_there(self, client, pauses):
        url = refused_url()
        with pytest.raises(HttpConnectionError, match=r"failed after 4 attempts in .* s: Cannot connect") as caught:
            await client.request("POST", url, retries=3)
        assert caught.value.status is None
        assert caught.value.attempts == 4
        assert len(pauses.pauses) == 3
        assert isinstance(caught.value.__cause__, aiohttp.ClientConnectorError)

    async def test_a_connection_closed_without_an_answer_is_retried(self, client):
        async def die_once(number, reader, writer):
            await read_request(reader)
            if number > 0:
                writer.write(OK)

        async with serve_connections(die_once) as url:
            assert await client.request("POST", url, body=b"{}", retries=1) == b"ok"

    async def test_an_answer_that_breaks_off_is_retried(self, client):
        async def break_off_once(number, reader, writer):
            await read_request(reader)
            writer.write(OK if number > 0 else b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf of i")

        async with serve_connections(break_off_once) as url:
            assert await client.request("POST", url, body=b"{}", retries=1) == b"ok"

    async def test_an_idle_connection_that_the_server_closes_as_it_is_used_costs_a_retry(self, client):
        requests = []

        async def one_request_each(number, reader, writer):
            requests.append((number, await read_request(reader)))
            writer.write(OK)
            # The client keeps this connection; the server ends it when the next request has come, unread.
            await reader.readexactly(1)

        async with serve_connections(one_request_each) as url:
            assert await client.request("POST", url, body=b"first", retries=3) == b"ok"
            assert await client.request("POST", url, body=b"second", retries=3) == b"ok"
            await client.close()
        assert requests == [(0, b"first"), (1, b"second")]

    async def test_something_that_is_not_http_is_not_retried(self, client):
        async def chatter(number, reader, writer):
            await read_request(reader)
            writer.write(b"220 mail.example ready\r\n\r\n")

        async with serve_connections(chatter) as url:
            with pytest.raises(HttpRequestError, match="after 1 attempt"):
                await client.request("POST", url, retries=3)

    async def test_a_malformed_url_is_the_callers_mistake(self, client):
        with pytest.raises(ValueError, match="not an HTTP URL: 'not a url'"):
            await client.request("POST", "not a url", retries=3)

    async def test_many_retries_make_few_log_lines(self, client, caplog):
        async with serve(Script((503, ""))) as url:
            results = await asyncio.gather(
                *(client.request("POST", url, retries=1) for _ in range(50)), return_exceptions=True
            )
        assert {type(result) for result in results} == {HttpStatusError}
        assert 1 <= len(caplog.records) <= 3


class TestSentOnce:
    """A request without retries has a connection of its own, and reaches the server at most once."""

    @pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
    async def test_a_lost_answer_is_not_asked_for_again(self, client, method):
        requests = []

        async def die(number, reader, writer):
            await read_request(reader)
            requests.append(number)

        async with serve_connections(die) as url:
            with pytest.raises(HttpConnectionError, match=r"after 1 attempt .* ServerDisconnectedError"):
                await client.request(method, url)
        assert requests == [0]

    async def test_it_does_not_use_kept_connections(self, client):
        ports = []

        async def remember_port(request):
            ports.append(request.transport.get_extra_info("peername")[1])
            return web.Response()

        async with serve(remember_port) as url:
            for retries in (1, 1, 0, 0):
                await client.request("GET", url, retries=retries)
        assert ports[0] == ports[1]
        assert len(set(ports)) == 3

    async def test_a_full_pool_does_not_hold_it_up(self, pauses):
        generating, release = asyncio.Event(), asyncio.Event()

        async def handler(request):
            if request.path == "/generate":
                generating.set()
                await release.wait()
            return web.Response(text="ok")

        async with serve(handler) as url, HttpClient(HttpConfig(max_connections=1)) as client:
            generation = asyncio.create_task(client.request("POST", f"{url}/generate", retries=1))
            await generating.wait()
            assert await client.request("GET", f"{url}/model_info", timeout_secs=10) == b"ok"
            release.set()
            assert await generation == b"ok"


class TestTimeouts:
    async def test_a_request_that_takes_too_long_in_all_is_not_repeated(self, pauses):
        started = []

        async def handler(request):
            started.append(request.path)
            await asyncio.Event().wait()

        async with serve(handler) as url, HttpClient(HttpConfig(total_timeout_secs=0.05), sleep=pauses) as client:
            with pytest.raises(HttpTimeoutError, match=r"after 1 attempt in .* no complete response within 0\.05 s"):
                await client.request("POST", f"{url}/generate", retries=5)
        assert started == ["/generate"]
        assert pauses.pauses == []

    async def test_a_body_that_never_ends_counts_too(self, client):
        async def handler(request):
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b"some")
            await asyncio.Event().wait()

        async with serve(handler) as url:
            with pytest.raises(HttpTimeoutError):
                await client.request("POST", url, retries=5, timeout_secs=0.05)

    async def test_a_connection_that_is_never_made_is_retried(self, pauses):
        with socket.socket() as full:  # a listener whose queue is full neither accepts nor refuses
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            address = full.getsockname()
            fillers = [socket.socket() for _ in range(2)]
            try:
                for filler in fillers:
                    filler.setblocking(False)
                    filler.connect_ex(address)
                async with HttpClient(HttpConfig(connect_timeout_secs=0.05), sleep=pauses) as client:
                    with pytest.raises(HttpConnectionError, match=r"after 2 attempts .* no connection within 0\.05 s"):
                        await client.request("POST", f"http://127.0.0.1:{address[1]}", retries=1)
            finally:
                for filler in fillers:
                    filler.close()


class TestCancellation:
    async def test_the_server_sees_a_cancelled_request_end(self, client):
        started, ended = asyncio.Event(), asyncio.Event()

        async def handler(request):
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        async with serve(handler) as url:
            task = asyncio.create_task(client.request("POST", url, body=b"{}", retries=8))
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.wait_for(ended.wait(), 10)

    async def test_a_pause_can_be_cancelled(self):
        paused = asyncio.Event()

        async def pause_for_ever(seconds):
            paused.set()
            await asyncio.Event().wait()

        async with serve(Script((503, ""))) as url, HttpClient(sleep=pause_for_ever) as client:
            task = asyncio.create_task(client.request("POST", url, retries=8))
            await paused.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert client.in_flight == 0


async def test_as_many_connections_as_the_configuration_says():
    full, release, arrived = asyncio.Event(), asyncio.Event(), 0

    async def handler(request):
        nonlocal arrived
        if request.path == "/generate":
            arrived += 1
            if arrived == 100:
                full.set()
            await release.wait()
        return web.Response()

    async with serve(handler) as url, HttpClient(HttpConfig(max_connections=100)) as client:
        tasks = [asyncio.create_task(client.request("POST", f"{url}/generate", retries=1)) for _ in range(101)]
        await full.wait()
        await client.request("GET", f"{url}/health")  # time enough for one more request to arrive
        assert arrived == 100
        release.set()
        await asyncio.gather(*tasks)
        assert arrived == 101


@pytest.mark.parametrize("error_type", [HttpRequestError, HttpStatusError, HttpConnectionError, HttpTimeoutError])
def test_errors_survive_pickling(error_type):
    error = error_type(url="http://h/x", method="POST", attempts=3, elapsed=1.25, reason="gone", status=503, body="b")
    error.add_note("on the way")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is error_type
    assert str(copy) == str(error) == "POST http://h/x failed after 3 attempts in 1.2 s: HTTP 503: b"
    assert (copy.url, copy.attempts, copy.elapsed, copy.status, copy.body) == ("http://h/x", 3, 1.25, 503, "b")


def test_errors_have_standard_parents():
    assert issubclass(HttpConnectionError, ConnectionError)
    assert issubclass(HttpTimeoutError, TimeoutError)
    assert not issubclass(HttpStatusError, OSError)
