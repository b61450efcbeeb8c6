"""The engines that only evaluate, and the router in front of them."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import TYPE_CHECKING, Protocol

from miles.ray.rollout.engine import make_engine
from miles.ray.rollout.engine_size import EngineSize
from miles.ray.rollout.router import Router
from miles.utils.http_utils import find_available_port, get_host_info

if TYPE_CHECKING:
    from miles.ray.placement_group import Bundles
    from miles.ray.rollout.engine import Engine

_STOP_SECS = 5.0


class EvalServers(Protocol):
    """Engines and their router. `start` after `stop` brings up new ones behind the same router address."""

    async def start(self) -> list[str]:
        """Bring everything up and return the engines' URLs."""

    async def stop(self) -> None:
        """End everything, whatever state it is in."""

    async def pids(self) -> dict[str, int]:
        """Process ids by name."""


def fleet_args(args: Namespace) -> Namespace:
    """The run's flags as evaluation on engines of its own sees them: its router, its number of engines."""
    own = {
        "sglang_router_ip": get_host_info()[1],
        "sglang_router_port": find_available_port(0),
        "router_prometheus_port": None,  # the user's is taken by the router of training
        "rollout_external": False,
        "rollout_external_router": False,
        "rollout_num_gpus": args.eval_num_gpus,
        "rollout_num_gpus_per_engine": args.eval_num_gpus_per_engine,
    }
    return Namespace(**{**vars(args), **own})


class RayEvalServers:
    """Engine actors on the run's evaluation bundles. `args`: from `fleet_args`."""

    def __init__(self, args: Namespace, bundles: Bundles) -> None:
        self._args = args
        self._bundles = bundles
        self._router: Router | None = None
        self._engines: list[Engine] = []

    async def start(self) -> list[str]:
        self._router = Router(self._args, name="eval-router")
        self._engines = [
            make_engine(self._args, i, self._bundles, kind="eval-engine")
            for i in range(EngineSize.from_args(self._args).count)
        ]
        started = asyncio.gather(*(engine.start() for engine in self._engines))
        urls, _ = await asyncio.gather(started, self._router.start())
        await self._router.add_engines(urls)
        return urls

    async def stop(self) -> None:
        router, engines = self._router, self._engines
        self._router, self._engines = None, []
        ends = [_ended(engine) for engine in engines]
        if router is not None:
            ends.append(router.stop())
        await asyncio.gather(*ends, return_exceptions=True)  # a dead actor is as good as a stopped one
        for engine in engines:
            engine.kill()

    async def pids(self) -> dict[str, int]:
        pids = {"eval-router": self._router.pid if self._router else -1}
        for found in await asyncio.gather(*(engine.pids() for engine in self._engines)):
            pids |= found
        return pids


async def _ended(engine: Engine) -> None:
    async with asyncio.timeout(_STOP_SECS):
        await engine.stop()
