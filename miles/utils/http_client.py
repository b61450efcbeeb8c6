"""An HTTP client for thousands of long requests in flight: aiohttp for the wire, one instance per event loop.

    request --> attempt --> 2xx ............................. the body
                   ^    |-> connection broken, 429, 5xx ..... pause (exponential, full jitter), while retries are left
                   |____|-> other status, total timeout ..... HttpRequestError at once
                        |-> cancelled ....................... the connection is closed, the server sees it

Two connection pools. A request that may be repeated uses kept-alive connections, as many as requests are in flight; a
server that closes an idle one just as it is used costs a retry. A request that may not be repeated gets a fresh
connection of its own: neither that race nor a pool full of long generations can touch it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp

from miles.utils.http_errors import HttpConnectionError, HttpRequestError, HttpStatusError, HttpTimeoutError
from miles.utils.turns import Turns

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Awaitable, Callable, Iterator, Mapping

logger = logging.getLogger(__name__)

READ_BUFFER_BYTES = 1 << 20
RETRY_LOG_INTERVAL_SECS = 10.0


@dataclass(frozen=True)
class HttpConfig:
    """How the client behaves; the defaults serve whoever sends a request before `init_http_client`."""

    max_connections: int = 0  # kept-alive connections at most, over all hosts; 0 = no limit
    connect_timeout_secs: float | None = 10.0  # for the TCP connection of one attempt; None = no limit
    total_timeout_secs: float | None = 14400.0  # for one attempt from its start to the last byte; None = no limit
    max_retries: int = 8  # further attempts after the first

    @classmethod
    def from_args(cls, args: Namespace) -> HttpConfig:
        return cls(
            max_connections=requests_in_flight(args),
            connect_timeout_secs=getattr(args, "http_connect_timeout_secs", cls.connect_timeout_secs),
            total_timeout_secs=getattr(args, "http_timeout_secs", cls.total_timeout_secs),
            max_retries=getattr(args, "http_max_retries", cls.max_retries),
        )


def requests_in_flight(args: Namespace) -> int:
    """The most generation requests that a run has open at once; 0 where the flags do not say.

    The engines' side: sglang_server_concurrency * rollout_num_gpus // rollout_num_gpus_per_engine. Fully async can ask
    for more: groups in flight * n_samples_per_prompt, where groups in flight are rollout_batch_size or
    max(1, async_max_concurrent_samples // n_samples_per_prompt).
    """
    num_gpus = getattr(args, "rollout_num_gpus", None)
    if not num_gpus:
        return 0
    concurrency = getattr(args, "sglang_server_concurrency", None) or 512
    engines = concurrency * num_gpus // (getattr(args, "rollout_num_gpus_per_engine", None) or 1)
    if not getattr(args, "fully_async", False):
        return int(max(1, engines))
    group_size = args.n_samples_per_prompt
    max_samples = getattr(args, "async_max_concurrent_samples", None)
    groups = max(1, max_samples // group_size) if max_samples else args.rollout_batch_size
    return int(max(1, engines, groups * group_size))


@dataclass(frozen=True)
class Backoff:
    """Pauses between attempts: uniform in [0, min(cap, base * 2**(attempt - 1))] seconds ("full jitter"), so that
    requests which failed together do not come back together. A server's Retry-After is the least, up to the cap."""

    base_secs: float = 0.5
    cap_secs: float = 30.0

    def pause(self, attempt: int, rng: random.Random, retry_after: float | None = None) -> float:
        """Seconds to wait after failed attempt number `attempt` (from 1)."""
        longest = min(self.cap_secs, self.base_secs * 2.0 ** min(attempt - 1, 60))
        return max(rng.uniform(0.0, longest), min(retry_after or 0.0, self.cap_secs))


@dataclass(frozen=True)
class _Failure:
    """One failed attempt."""

    error: type[HttpRequestError]
    reason: str
    retryable: bool
    status: int | None = None
    body: str = ""
    retry_after: float | None = None
    cause: BaseException | None = None


class HttpClient:
    """Sends requests on the event loop that it was made on. `close()` it there, or use `async with`."""

    def __init__(
        self,
        config: HttpConfig | None = None,
        *,
        backoff: Backoff | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self.config = config or HttpConfig()
        self.in_flight = 0  # requests that have begun and not ended, pauses between attempts included
        self._backoff = backoff or Backoff()
        self._sleep = sleep
        self._rng = rng or random.Random()
        self._kept_alive = _open_session(limit=self.config.max_connections)
        self._fresh = _open_session(limit=0, force_close=True)
        self._retry_log = _RetryLog()
        self._answers = Turns()

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection. Requests in flight fail."""
        await self._kept_alive.close()
        await self._fresh.close()
        await asyncio.sleep(0)  # the transports report their end in the loop's next round

    async def request(
        self,
        method: str,
        url: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        retries: int = 0,
        timeout_secs: float | None = None,
    ) -> bytes:
        """The body of the 2xx response to one request, after at most `1 + retries` attempts.

        `timeout_secs`: for each attempt, instead of the configured total. Raises HttpStatusError,
        HttpConnectionError, HttpTimeoutError or their base HttpRequestError, and ValueError for a malformed URL.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        attempt = 0
        with self._count_in_flight():
            while True:
                attempt += 1
                result = await self._attempt(
                    method, url, body, headers, repeatable=retries > 0, timeout_secs=timeout_secs
                )
                if isinstance(result, bytes):
                    if not self._answers.take():  # the caller will parse it, and thousands may have come at once
                        await self._answers.wait()
                    return result
                if attempt > retries or not result.retryable:
                    raise _final_error(result, method, url, attempt, loop.time() - started) from result.cause
                pause = self._backoff.pause(attempt, self._rng, result.retry_after)
                self._retry_log.note(loop.time(), f"{method} {url}: {result.reason}", attempt, 1 + retries)
                await self._sleep(pause)

    async def _attempt(
        self,
        method: str,
        url: str,
        body: bytes | None,
        headers: Mapping[str, str] | None,
        *,
        repeatable: bool,
        timeout_secs: float | None,
    ) -> bytes | _Failure:
        """One attempt. The one place that turns transport failures into data: the caller decides about a retry."""
        session = self._kept_alive if repeatable else self._fresh
        limits = aiohttp.ClientTimeout(
            total=self.config.total_timeout_secs if timeout_secs is None else timeout_secs,
            sock_connect=self.config.connect_timeout_secs,
        )
        try:
            async with session.request(method, url, data=body, headers=headers, timeout=limits) as response:
                content = await response.read()
                return content if 200 <= response.status < 300 else _status_failure(response, content)
        except aiohttp.InvalidURL as error:
            raise ValueError(f"not an HTTP URL: {url!r}") from error
        except aiohttp.ConnectionTimeoutError as error:
            return _connection_failure(error, f"no connection within {limits.sock_connect} s")
        except TimeoutError as error:
            if error.errno is not None:  # the operating system gave the connection up
                return _connection_failure(error)
            return _Failure(HttpTimeoutError, f"no complete response within {limits.total} s", False, cause=error)
        except aiohttp.ClientConnectorCertificateError as error:
            return _Failure(HttpConnectionError, str(error), False, cause=error)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
            return _connection_failure(error)
        except aiohttp.ClientError as error:  # not HTTP, too many redirects, ...
            return _Failure(HttpRequestError, f"{type(error).__name__}: {error}", False, cause=error)

    @contextmanager
    def _count_in_flight(self) -> Iterator[None]:
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class _RetryLog:
    """One warning per interval, however many requests are being retried."""

    def __init__(self) -> None:
        self._retries = 0
        self._last: float | None = None

    def note(self, now: float, what: str, attempt: int, attempts: int) -> None:
        self._retries += 1
        if self._last is not None and now - self._last < RETRY_LOG_INTERVAL_SECS:
            return
        logger.warning("retrying (%d retries since the last notice): attempt %d of %d failed: %s",
                       self._retries, attempt, attempts, what)  # fmt: skip
        self._retries, self._last = 0, now


def _open_session(*, limit: int, force_close: bool = False) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=limit, force_close=force_close, socket_factory=_keepalive_socket),
        cookie_jar=aiohttp.DummyCookieJar(),
        read_bufsize=READ_BUFFER_BYTES,
        middlewares=(_no_silent_repeat,),
    )


def _keepalive_socket(address: Any) -> socket.socket:
    """A TCP socket on which the kernel notices within two minutes that the other machine is gone: a generation sends
    nothing for as long as it runs, so that the connection alone cannot tell a busy engine from a dead one."""
    family, kind, protocol, _, _ = address
    sock = socket.socket(family=family, type=kind, proto=protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):  # not on every platform
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
    return sock


async def _no_silent_repeat(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Keep aiohttp from repeating idempotent requests by itself: here, attempts are counted and `get` is one try."""
    try:
        return await handler(request)
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
        raise  # aiohttp does not repeat these
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise aiohttp.ClientConnectionError(f"{type(error).__name__}: {error}") from error


def _status_failure(response: aiohttp.ClientResponse, content: bytes) -> _Failure:
    status = response.status
    return _Failure(
        HttpStatusError,
        f"HTTP {status}",
        retryable=status == 429 or status >= 500,
        status=status,
        body=content[:4096].decode("utf-8", errors="replace"),
        retry_after=_seconds(response.headers.get("Retry-After")),
    )


def _seconds(header: str | None) -> float | None:
    """Retry-After in seconds; its other form, a date, is ignored."""
    return float(header) if header is not None and header.isdecimal() else None


def _connection_failure(error: BaseException, reason: str | None = None) -> _Failure:
    return _Failure(HttpConnectionError, reason or str(error) or type(error).__name__, True, cause=error)


def _final_error(failure: _Failure, method: str, url: str, attempts: int, elapsed: float) -> HttpRequestError:
    return failure.error(
        url=url,
        method=method,
        attempts=attempts,
        elapsed=elapsed,
        reason=failure.reason,
        status=failure.status,
        body=failure.body,
    )
