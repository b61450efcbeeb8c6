"""sglang-router, which spreads generation requests over the engines: the run's own, or one that runs already.

Only generation goes through a router, and questions that any engine may answer. What controls an engine (pause,
weights, aborts) is sent to the engine itself: a router has no such routes, or passes the call on to one engine of many.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from miles.backends.sglang_utils.flags import router_command_flags
from miles.ray.rollout.server_start import START_ATTEMPTS, Launched, start_server
from miles.ray.silence import DEFAULT_LIMIT_SECS, Silence
from miles.ray.waits import first_of
from miles.utils.heartbeat import is_of_who_asks
from miles.utils.http_utils import HttpRequestError, find_available_port, get_host_info, wait_http_ok
from miles.utils.network import url_host
from miles.utils.processes import ChildProcess, ProcessDied

if TYPE_CHECKING:
    from argparse import Namespace

logger = logging.getLogger(__name__)

_REGISTRATION_TIMEOUT_SECS = 60
_REGISTRATION_POLL_SECS = 0.05
_START_SECS = 180.0
_EXTERNAL_START_SECS = 60.0
_EXTERNAL_SILENT_SECS = 30.0
_STOP_SECS = 3.0

# What the router asks an engine to see whether it lives. An SGLang that is paused does not answer /health for 20 s and
# then says 503, so that the router would take it out during a weight update. This it answers at once, paused or not.
HEALTH_CHECK_ENDPOINT = "/model_info"


class RouterClient:
    """The list of engines that a router sends requests to."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def add_engines(self, engine_urls: list[str]) -> None:
        """Register healthy engines and wait until the router sends them requests. One that is registered stays so."""
        async with aiohttp.ClientSession(self.url) as session:
            for url in engine_urls:
                async with session.post("/workers", json={"url": url}) as response:
                    response.raise_for_status()
            async with asyncio.timeout(_REGISTRATION_TIMEOUT_SECS):
                while not set(engine_urls) <= await _healthy_engines(session):  # noqa: ASYNC110 - a remote state
                    await asyncio.sleep(_REGISTRATION_POLL_SECS)

    async def remove_engines(self, engine_urls: list[str]) -> None:
        """Take engines out and wait until the router has forgotten them. One that it does not know is no error."""
        async with aiohttp.ClientSession(self.url) as session, asyncio.timeout(_REGISTRATION_TIMEOUT_SECS):
            while ids := [worker["id"] for worker in await _workers(session) if worker["url"] in engine_urls]:
                for worker_id in ids:
                    async with session.delete(f"/workers/{worker_id}") as response:
                        if response.status != 404:  # gone meanwhile
                            response.raise_for_status()
                await asyncio.sleep(_REGISTRATION_POLL_SECS)

    async def engine_urls(self) -> set[str]:
        """Every engine that is registered, healthy or not."""
        async with aiohttp.ClientSession(self.url) as session:
            return {worker["url"] for worker in await _workers(session)}

    async def wait_silent(self, limit_secs: float) -> None:
        """Return once it has been asked for so long, and has not answered."""
        clock, silence = asyncio.get_running_loop().time, Silence(limit_secs)
        silence.begin(self.url, clock(), was_heard=True)
        while not silence.lost():
            began = clock()
            try:
                async with asyncio.timeout(silence.look_secs):
                    await self.engine_urls()
                heard = True
            # The last three: an answer that is not a router's.
            except (aiohttp.ClientError, TimeoutError, LookupError, TypeError, ValueError) as error:
                if isinstance(error, OSError) and is_of_who_asks(error):  # nobody has listened: this does not count
                    logger.warning("%s could not be asked whether it lives: %s", self.url, error)
                    await asyncio.sleep(silence.look_secs)
                    continue
                heard = False
            silence.learn(self.url, heard=heard, now=clock())
            await asyncio.sleep(max(0.0, silence.look_secs - (clock() - began)))


async def _workers(session: aiohttp.ClientSession) -> list[dict[str, Any]]:
    async with session.get("/workers") as response:
        response.raise_for_status()
        workers: list[dict[str, Any]] = (await response.json())["workers"]
    return workers


async def _healthy_engines(session: aiohttp.ClientSession) -> set[str]:
    return {worker["url"] for worker in await _workers(session) if worker["is_healthy"]}


class Router(RouterClient):
    """The router process of the run. `ip` and `port` say where it listens, `name` what it is called. Without
    --sglang-router-port the port is known once it has started."""

    def __init__(self, args: Namespace, name: str = "router") -> None:
        self._name = name
        self.ip = args.sglang_router_ip or get_host_info()[1]
        self.port = int(args.sglang_router_port or 0)
        super().__init__("")
        self._args = args
        self._process: ChildProcess | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else -1

    async def start(self) -> None:
        """Start the process and wait until it serves. Raises ProcessDied where it ends, and where another process has
        the port that the user has chosen."""
        chosen = bool(self._args.sglang_router_port)
        server = await start_server(self._launch, attempts=1 if chosen else START_ATTEMPTS, timeout_secs=_START_SECS)
        self.port, self.url = server.port, server.url

    def _launch(self) -> Launched:
        port = int(self._args.sglang_router_port or find_available_port(0))
        log = Path(self._args.run_dir) / "logs" / f"{self._name}.log"
        self._process = ChildProcess(self._name, router_command(self._args, self.ip, port), log)
        return Launched(self._process, self.ip, port)

    async def watch(self) -> None:
        """Never returns; raises ProcessDied when the router dies, or lives and does not answer."""
        assert self._process is not None, "watch follows start"
        limit_secs = getattr(self._args, "heartbeat_timeout_secs", DEFAULT_LIMIT_SECS)
        raise await first_of((self._process.wait_died(), self._silence_of(self._process, limit_secs)))

    async def _silence_of(self, process: ChildProcess, limit_secs: float) -> ProcessDied:
        await self.wait_silent(limit_secs)
        return process.silence(f"has not answered at {self.url} for {limit_secs:g} s (--heartbeat-timeout-secs)")

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.stop()


class ExternalRouter(RouterClient):
    """A router that runs already at --sglang-router-ip and -port. The run's engines leave it at the end."""

    pid = -1

    def __init__(self, args: Namespace) -> None:
        self.ip, self.port = args.sglang_router_ip, int(args.sglang_router_port)
        super().__init__(f"http://{url_host(self.ip)}:{self.port}")
        self._added: list[str] = []

    async def start(self) -> None:
        """Check that it answers and has no engines: ones of somebody else would never get this run's weights."""
        try:
            await wait_http_ok(f"{self.url}/health", timeout=_EXTERNAL_START_SECS)
            others = await self.engine_urls()
        except (HttpRequestError, aiohttp.ClientError) as error:
            raise ValueError(f"--sglang-router-ip/-port: {self.url} is not an sglang-router: {error}") from error
        if others:
            raise ValueError(
                f"the router {self.url} has engines already ({', '.join(sorted(others))}), which this run would not "
                "update. Instead: take them out, or use a router of the run's own (drop --rollout-external-router)"
            )

    async def add_engines(self, engine_urls: list[str]) -> None:
        self._added += engine_urls
        await super().add_engines(engine_urls)

    async def watch(self) -> None:
        """Never returns; raises ProcessDied when the router has not answered for half a minute."""
        await self.wait_silent(_EXTERNAL_SILENT_SECS)
        raise ProcessDied(f"the external router {self.url} has not answered for {_EXTERNAL_SILENT_SECS:g} s")

    async def stop(self) -> None:
        """Take the run's engines out, where the router still answers."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):  # it is gone: nothing is left to take out
            async with asyncio.timeout(_STOP_SECS):
                await self.remove_engines(self._added)


def make_router(args: Namespace) -> Router | ExternalRouter:
    """The router of the run, not yet started."""
    return ExternalRouter(args) if getattr(args, "rollout_external_router", False) else Router(args)


def router_command(args: Namespace, ip: str, port: int) -> list[str]:
    """What starts the router. The user's `--router-*` flags come last, so that they win over the defaults here."""
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", ip, "--port", str(port)]
    if args.router_prometheus_port is None:
        command += ["--prometheus-host", ip, "--prometheus-port", str(find_available_port(0))]
    command += ["--request-timeout-secs", str(args.sglang_router_request_timeout_secs)]
    # Our own client decides what is worth a retry; the router would repeat requests that already ran.
    command += ["--disable-retries", "--disable-circuit-breaker", "--shutdown-grace-period-secs", "1"]
    command += ["--worker-startup-check-interval", "1", "--log-level", "warn"]
    command += ["--health-check-endpoint", HEALTH_CHECK_ENDPOINT]
    if args.sglang_router_policy:
        command += ["--policy", args.sglang_router_policy]
    return command + router_command_flags(args)
