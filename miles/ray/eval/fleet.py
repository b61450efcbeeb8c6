"""Engines that only evaluate, brought to exactly one snapshot before each evaluation.

pin(dir, version):  all healthy? --no--> new servers
                    every engine loads `dir` as `version` --> each tells its version --> so does the router
"""

from __future__ import annotations

import asyncio
import logging
from functools import cached_property
from typing import TYPE_CHECKING, Any

from miles.rollout._weight_version import query_model_info
from miles.rollout.checkpoint_eval import EvalSkipped
from miles.rollout.inference_rollout.inference_rollout_common import GenerateState
from miles.utils.http_utils import HttpRequestError, get, post

if TYPE_CHECKING:
    from argparse import Namespace

    from miles.ray.eval.servers import EvalServers

logger = logging.getLogger(__name__)

PROBE_SECS = 10.0
LOAD_SECS = 1800.0
ATTEMPTS = 2


class FleetError(RuntimeError):
    """The engines are not what they should be. The message says which one, and how."""


class EvalFleet:
    """`args`: those of the fleet, with its router's address."""

    def __init__(self, args: Namespace, servers: EvalServers) -> None:
        self._args = args
        self._servers = servers
        self._urls: list[str] = []

    @property
    def router_url(self) -> str:
        return f"http://{self._args.sglang_router_ip}:{self._args.sglang_router_port}"

    @cached_property
    def state(self) -> GenerateState:
        """What generation on these engines shares; it has the fleet's own slots."""
        return GenerateState(self._args)

    async def start(self) -> None:
        self._urls = await self._servers.start()

    async def stop(self) -> None:
        self._urls = []
        await self._servers.stop()

    async def pids(self) -> dict[str, int]:
        return await self._servers.pids()

    async def pin(self, checkpoint_dir: str, version: str) -> GenerateState:
        """Bring every engine to the weights in `checkpoint_dir`, named `version`; what to generate with.

        Servers that died or hang are replaced. Raises EvalSkipped where the engines cannot be brought there.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                await self._recover()
                await asyncio.gather(*(self._load(url, checkpoint_dir, version) for url in self._urls))
                await self._check(version)
            except (HttpRequestError, FleetError, TimeoutError) as error:
                logger.warning("the evaluation engines do not have %s (attempt %d): %r", checkpoint_dir, attempt, error)
                if attempt == ATTEMPTS:
                    raise EvalSkipped("pin_failed", f"{type(error).__name__}: {error}") from error
            else:
                return self.state
        raise AssertionError("the last attempt returns or raises")

    async def _recover(self) -> None:
        try:
            async with asyncio.timeout(PROBE_SECS):
                await asyncio.gather(*(get(f"{url}/health") for url in [self.router_url, *self._urls]))
            if self._urls:
                return
        except (HttpRequestError, TimeoutError) as error:
            logger.warning("the evaluation engines are started anew: %r", error)
        await self.stop()
        await self.start()

    async def _load(self, url: str, checkpoint_dir: str, version: str) -> None:
        body = {"model_path": checkpoint_dir, "weight_version": version, "flush_cache": True}
        async with asyncio.timeout(LOAD_SECS):
            answer = await post(f"{url}/update_weights_from_disk", body)
        if not (isinstance(answer, dict) and answer.get("success")):
            raise FleetError(f"{url} did not load {checkpoint_dir}: {answer!r}")

    async def _check(self, version: str) -> None:
        """Every engine, and whichever the router asks, says that it has `version`."""
        async with asyncio.timeout(PROBE_SECS):
            infos = await asyncio.gather(*(query_model_info(get, url) for url in [*self._urls, self.router_url]))
        for url, info in zip([*self._urls, self.router_url], infos, strict=True):
            if str(_version_of(info)) != version:
                raise FleetError(f"{url} has the weights {_version_of(info)!r} instead of {version!r}")


def _version_of(info: Any) -> Any:
    return info.get("weight_version") if isinstance(info, dict) else info
