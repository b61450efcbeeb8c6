"""sglang-router in a process of its own: spreads generation requests over the engines."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from miles.backends.sglang_utils.flags import router_command_flags
from miles.ray.rollout.engine_actor import wait_healthy
from miles.utils.http_utils import find_available_port, get_host_info
from miles.utils.processes import ChildProcess

if TYPE_CHECKING:
    from argparse import Namespace

_REGISTRATION_TIMEOUT_SECS = 60
_REGISTRATION_POLL_SECS = 0.05


class Router:
    """The router process of the run. `ip` and `port` say where it listens, `name` what it is called."""

    def __init__(self, args: Namespace, name: str = "router") -> None:
        self._name = name
        self.ip = args.sglang_router_ip or get_host_info()[1]
        self.port = int(args.sglang_router_port or find_available_port(0))
        self._args = args
        self._process: ChildProcess | None = None

    @property
    def url(self) -> str:
        return f"http://{self.ip}:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else -1

    async def start(self) -> None:
        """Start the process and wait until it serves."""
        log = Path(self._args.run_dir) / "logs" / f"{self._name}.log"
        self._process = ChildProcess(self._name, self._command(), log)
        await wait_healthy(self._process, f"{self.url}/health")

    async def add_engines(self, engine_urls: list[str]) -> None:
        """Register healthy engines and wait until the router sends them requests."""
        async with aiohttp.ClientSession(self.url) as session:
            for url in engine_urls:
                async with session.post("/workers", json={"url": url}) as response:
                    response.raise_for_status()
            async with asyncio.timeout(_REGISTRATION_TIMEOUT_SECS):
                while await self._healthy_engines(session) < set(engine_urls):  # noqa: ASYNC110 - a remote state
                    await asyncio.sleep(_REGISTRATION_POLL_SECS)

    async def remove_engine(self, url: str) -> None:
        """Send nothing to this engine any more. Nothing where it is not registered."""
        async with aiohttp.ClientSession(self.url) as session, asyncio.timeout(_REGISTRATION_TIMEOUT_SECS):
            while ids := [worker["id"] for worker in await self._workers(session) if worker["url"] == url]:
                for worker_id in ids:
                    async with session.delete(f"/workers/{worker_id}") as response:
                        if response.status != 404:  # gone meanwhile
                            response.raise_for_status()
                await asyncio.sleep(_REGISTRATION_POLL_SECS)

    async def watch(self) -> None:
        """Never returns; raises ProcessDied when the router dies."""
        assert self._process is not None, "watch follows start"
        raise await self._process.wait_died()

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.stop()

    def _command(self) -> list[str]:
        args = self._args
        command = [sys.executable, "-m", "sglang_router.launch_router", "--host", self.ip, "--port", str(self.port)]
        if args.router_prometheus_port is None:
            command += ["--prometheus-host", self.ip, "--prometheus-port", str(find_available_port(0))]
        command += ["--request-timeout-secs", str(args.sglang_router_request_timeout_secs)]
        # Our own client decides what is worth a retry; the router would repeat requests that already ran.
        command += ["--disable-retries", "--disable-circuit-breaker", "--shutdown-grace-period-secs", "1"]
        command += ["--worker-startup-check-interval", "1", "--log-level", "warn"]
        if args.sglang_router_policy:
            command += ["--policy", args.sglang_router_policy]
        return command + router_command_flags(args)  # last: what the user says wins

    async def _healthy_engines(self, session: aiohttp.ClientSession) -> set[str]:
        return {worker["url"] for worker in await self._workers(session) if worker["is_healthy"]}

    @staticmethod
    async def _workers(session: aiohttp.ClientSession) -> list[dict[str, Any]]:
        async with session.get("/workers") as response:
            response.raise_for_status()
            workers: list[dict[str, Any]] = (await response.json())["workers"]
        return workers
