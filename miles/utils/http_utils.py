"""HTTP for rollout code and plug-ins: `await post(url, payload)` and `await get(url)`, from any event loop.

There is nothing to set up: the first request on a loop opens a client there, and the loop's end closes it.
`init_http_client(args)` sizes the client to the run and takes over its timeouts.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson

from miles.utils.http_client import HttpClient, HttpConfig
from miles.utils.http_errors import HttpConnectionError, HttpRequestError, HttpStatusError, HttpTimeoutError
from miles.utils.loop_bound import LoopBound
from miles.utils.network import (
    _wrap_ipv6,
    exit_code,
    find_available_port,
    get_host_info,
    is_port_available,
    router_worker_base_urls,
    terminate_process,
    wait_for_server_ready,
)

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping

    from miles.utils.network import Process

__all__ = [
    "NEVER_RETRIED_ENDPOINTS",
    "HttpConnectionError",
    "HttpRequestError",
    "HttpStatusError",
    "HttpTimeoutError",
    "_wrap_ipv6",
    "close_http_client",
    "find_available_port",
    "get",
    "get_host_info",
    "init_http_client",
    "is_port_available",
    "post",
    "post_bytes_no_retry",
    "router_worker_base_urls",
    "terminate_process",
    "wait_for_server_ready",
    "wait_http_ok",
]

logger = logging.getLogger(__name__)

# The steps of a weight update, by the last part of their path. Each changes the engine's state, or waits for a peer
# that has gone on: a second one after a lost answer would be a different step. `post` never repeats them.
NEVER_RETRIED_ENDPOINTS = frozenset(
    {
        "pause_generation",
        "continue_generation",
        "begin_weight_update",
        "end_weight_update",
        "init_weights_update_group",
        "destroy_weights_update_group",
        "update_weights_from_distributed",
        "update_weights_from_tensor",
        "update_weights_from_ipc",
        "update_weights_from_disk",
        "update_weight_version",
        "pull_weights",
    }
)

_METHODS = {"post": "POST", "put": "PUT", "get": "GET", "delete": "DELETE"}
_METHODS_WITHOUT_PAYLOAD = ("get", "delete")
_JSON = {"Content-Type": "application/json"}
_SPARE_FILE_DESCRIPTORS = 512
_POLL_SECS = 0.2


class _Http:
    """Holds the process's HTTP configuration and, for each event loop, the client that was opened there."""

    def __init__(self) -> None:
        self.config = HttpConfig()
        self.clients = LoopBound(lambda: HttpClient(self.config), HttpClient.close)

    async def client(self) -> HttpClient:
        client = await self.clients.get()
        if client.config is not self.config and client.config != self.config and not client.in_flight:
            await self.clients.close()
            client = await self.clients.get()
        return client


_http = _Http()  # this module's only state


def init_http_client(args: Namespace) -> None:
    """Take size, timeouts and retries from the run's flags, for requests from now on.

    A client that is already open takes over a new configuration as soon as it has no request in flight.
    """
    _http.config = HttpConfig.from_args(args)
    _make_room_for(_http.config.max_connections)


async def close_http_client() -> None:
    """Close the running loop's connections, if there are any; the next request opens new ones."""
    await _http.clients.close()


async def post(
    url: str,
    payload: Any,
    max_retries: int | None = None,
    action: str = "post",
    headers: Mapping[str, str] | None = None,
) -> Any:
    """Send `payload` as JSON; the response as parsed JSON, or as text where it is not JSON.

    Connection errors, 429 and 5xx are retried with growing pauses, `max_retries` times (None: --http-max-retries); any
    other status, a timeout of the whole request and the endpoints in NEVER_RETRIED_ENDPOINTS never. `action`: post,
    put, get or delete; the last two carry no payload. Raises HttpRequestError (`.status`, `.attempts`, `.elapsed`).
    """
    if action not in _METHODS:
        raise ValueError(f"post(action={action!r}): expected one of {', '.join(_METHODS)}")
    body = None
    if action in _METHODS_WITHOUT_PAYLOAD:
        if payload:
            raise ValueError(f"post(action={action!r}) carries no payload, got {type(payload).__name__}")
    else:
        body = _encode({} if payload is None else payload)
        headers = {**_JSON, **(headers or {})}
    client = await _http.client()
    retries = _http.config.max_retries if max_retries is None else max_retries
    if _endpoint(url) in NEVER_RETRIED_ENDPOINTS:
        retries = 0
    return _decode(await client.request(_METHODS[action], url, body=body, headers=headers, retries=retries))


async def get(url: str) -> Any:
    """The response of one GET, tried once, as parsed JSON or text. Raises HttpRequestError."""
    client = await _http.client()
    return _decode(await client.request("GET", url))


async def post_bytes_no_retry(
    url: str,
    payload: Any,
    *,
    timeout: float | None,
) -> bytes:
    """Send `payload` (bytes as they are, anything else as JSON) once; the response's bytes.

    `timeout`: seconds for the whole request; None: --http-timeout-secs. Raises HttpRequestError.
    """
    client = await _http.client()
    if isinstance(payload, bytes):
        return await client.request("POST", url, body=payload, timeout_secs=timeout)
    return await client.request("POST", url, body=_encode(payload), headers=_JSON, timeout_secs=timeout)


async def wait_http_ok(
    url: str,
    *,
    json_payload: Any = None,
    timeout: float = 180.0,
    request_timeout: float = 60.0,
    process: Process | None = None,
) -> None:
    """Ask `url` (GET, or POST of `json_payload`) until it answers 2xx.

    `timeout`, `request_timeout`: seconds in all, and for one request. Raises HttpRequestError, the last failure, when
    the time is over, and RuntimeError at once when `process`, which should serve the URL, has exited.
    """
    loop = asyncio.get_running_loop()
    started = loop.time()
    deadline = started + timeout
    method = "GET" if json_payload is None else "POST"
    body = None if json_payload is None else _encode(json_payload)
    attempts = 0
    while True:
        attempts += 1
        client = await _http.client()
        left = max(_POLL_SECS, deadline - loop.time())
        try:
            await client.request(method, url, body=body, headers=_JSON, timeout_secs=min(request_timeout, left))
            return
        except HttpRequestError as error:
            _raise_if_exited(process, url)
            if loop.time() + _POLL_SECS > deadline:
                raise error.over(attempts, loop.time() - started) from error
        await asyncio.sleep(_POLL_SECS)


def _raise_if_exited(process: Process | None, url: str) -> None:
    if process is not None and (code := exit_code(process)) is not None:
        raise RuntimeError(f"the process that should serve {url} exited with code {code}")


def _endpoint(url: str) -> str:
    return urlsplit(url).path.rstrip("/").rpartition("/")[2]


def _encode(payload: Any) -> bytes:
    try:
        return orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # what only the standard library takes: numbers as keys, integers beyond 64 bits
        return json.dumps(payload).encode()


def _decode(content: bytes) -> Any:
    """JSON, or text. NaN and Infinity, which some reward servers write, are not JSON for orjson."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        text = content.decode("utf-8", errors="replace")
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _make_room_for(connections: int) -> None:
    """Raise this process's soft limit of open files, as far as the hard one allows, to hold `connections` sockets."""
    needed = connections + _SPARE_FILE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        logger.warning(
            "%d requests in flight need about %d open files, the hard limit is %d: raise it (ulimit -Hn)",
            connections, needed, hard,
        )  # fmt: skip
