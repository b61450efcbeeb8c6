"""Engines as their owner sees them: started, watched and stopped as a whole, wherever their processes are.

RayEngine       starts servers in Ray actors, one for each machine that the engine spans
ExternalEngine  a server by address, which somebody else started and ends
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray.exceptions import RayActorError

from miles.ray.rollout.engine_actor import EngineActor
from miles.ray.rollout.engine_size import EngineSize
from miles.ray.waits import result_of
from miles.utils.http_utils import HttpRequestError, get, wait_http_ok
from miles.utils.network import engine_url
from miles.utils.processes import ProcessDied, log_tail

if TYPE_CHECKING:
    from argparse import Namespace

    from miles.ray.placement_group import Bundles

_EXTERNAL_START_SECS = 60.0
_PROBE_INTERVAL_SECS = 10.0
_PROBE_SECS = 30.0
_PROBES_UNTIL_DEAD = 3


class Engine(Protocol):
    """One engine. `name` is what errors and process lists call it."""

    name: str

    async def start(self) -> str:
        """Bring it up and return its URL once it is healthy. Raises ProcessDied, or ValueError for a wrong engine."""

    async def watch(self) -> None:
        """Never returns; raises ProcessDied when the engine is gone."""

    async def stop(self) -> None:
        """End it, as far as it is the run's own."""

    async def pids(self) -> dict[str, int]:
        """Process ids by name; empty for an engine of somebody else."""

    def kill(self) -> None:
        """End its actors at once, whatever state they are in; their servers end with them."""


def make_engine(args: Namespace, index: int, bundles: Bundles, kind: str = "engine") -> Engine:
    """Engine `index`, not yet started; another one in the place of one that has died."""
    if kind == "engine" and getattr(args, "rollout_external", False):
        return ExternalEngine(args, f"{kind}-{index}", external_engine_urls(args)[index])
    return RayEngine(args, index, bundles, kind)


def external_engine_urls(args: Namespace) -> list[str]:
    """The addresses of --rollout-external-engine-addrs as URLs."""
    return [engine_url(address) for address in args.rollout_external_engine_addrs]


class RayEngine:
    """Engine `index` in actors of the run. A new object on the same bundles replaces one whose actors died."""

    def __init__(self, args: Namespace, index: int, bundles: Bundles, kind: str = "engine") -> None:
        self.name = f"{kind}-{index}"
        self._logs = Path(args.run_dir) / "logs"
        nodes = EngineSize.from_args(args).nodes
        actor_class: Any = ray.remote(EngineActor)
        self.actors = [
            actor_class.options(**bundles.actor_options(index * nodes + node)).remote(args, index, kind, node)
            for node in range(nodes)
        ]

    async def start(self) -> str:
        head, *others = self.actors
        if not others:
            return str(await head.start.remote())
        address = await head.meeting_point.remote()
        url = asyncio.ensure_future(result_of(head.start.remote(address)))
        try:
            await asyncio.gather(*(actor.start.remote(address) for actor in others))
            return str(await _first(url, [self._watch_node(node) for node in range(1, len(self.actors))]))
        finally:
            url.cancel()

    async def watch(self) -> None:
        never = asyncio.get_running_loop().create_future()
        await _first(never, [self._watch_node(node) for node in range(len(self.actors))])

    async def stop(self) -> None:
        await asyncio.gather(*(actor.stop.remote() for actor in self.actors))

    async def pids(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for node, pids in enumerate(await asyncio.gather(*(actor.pids.remote() for actor in self.actors))):
            name = self._node_name(node)
            found |= {f"{name}-actor": pids["actor"], name: pids["server"]}
        return found

    def kill(self) -> None:
        for actor in self.actors:
            ray.kill(actor)

    def _node_name(self, node: int) -> str:
        return self.name if node == 0 else f"{self.name}-node-{node}"

    async def _watch_node(self, node: int) -> None:
        try:
            await self.actors[node].watch.remote()
        except RayActorError as error:
            name = self._node_name(node)
            log = self._logs / f"{name}.log"
            raise ProcessDied(f"the actor that owns {name} died; see {log}{log_tail(log)}") from error


class ExternalEngine:
    """A server that runs already, at `url`."""

    def __init__(self, args: Namespace, name: str, url: str) -> None:
        self.name = name
        self._url = url
        self._ranks = int(args.rollout_num_gpus_per_engine)

    async def start(self) -> str:
        """Check that it answers and is what the flags say; raises ValueError where it is not."""
        try:
            await wait_http_ok(f"{self._url}/health", timeout=_EXTERNAL_START_SECS)
            info = await get(f"{self._url}/server_info")
        except HttpRequestError as error:
            raise ValueError(
                f"--rollout-external-engine-addrs: {self._url} is not a healthy engine: {error}"
            ) from error
        ranks = int(info.get("tp_size", 1))
        if ranks != self._ranks:
            raise ValueError(
                f"--rollout-num-gpus-per-engine is {self._ranks}, and the external engine {self._url} has {ranks} "
                "ranks (tp_size), each of which takes part in a weight update. Instead: the engine's own number"
            )
        return self._url

    async def watch(self) -> None:
        failures = 0
        while True:
            await asyncio.sleep(_PROBE_INTERVAL_SECS)
            try:
                async with asyncio.timeout(_PROBE_SECS):
                    await get(f"{self._url}/model_info")  # unlike /health it answers while the engine is paused
                failures = 0
            except (HttpRequestError, TimeoutError) as error:
                failures += 1
                if failures >= _PROBES_UNTIL_DEAD:
                    raise ProcessDied(
                        f"the external engine {self._url} has not answered {failures} times in a row: {error}"
                    ) from error

    async def stop(self) -> None: ...

    async def pids(self) -> dict[str, int]:
        return {}

    def kill(self) -> None: ...


async def _first(wanted: asyncio.Future[Any], watchers: list[Any]) -> Any:
    """What `wanted` gives, unless one of the watchers raises first."""
    tasks = [asyncio.ensure_future(watcher) for watcher in watchers]
    try:
        done, _ = await asyncio.wait({wanted, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        return await (wanted if wanted in done else done.pop())
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
