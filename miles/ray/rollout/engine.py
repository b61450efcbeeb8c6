"""Engines as their owner sees them: started, watched and stopped as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray.exceptions import RayActorError

from miles.ray.rollout.engine_actor import EngineActor
from miles.utils.processes import ProcessDied, log_tail

if TYPE_CHECKING:
    from argparse import Namespace

    from miles.ray.placement_group import Bundles

_ENGINE_GPU_SHARE = 0.2


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


class RayEngine:
    """Engine `index` in an actor of the run. A new object on the same bundle replaces one whose actor died."""

    def __init__(self, args: Namespace, index: int, bundles: Bundles, kind: str = "engine") -> None:
        self.name = f"{kind}-{index}"
        self._logs = Path(args.run_dir) / "logs"
        actor_class: Any = ray.remote(EngineActor)
        bundle = index * int(args.rollout_num_gpus_per_engine)
        options = bundles.actor_options(bundle, gpu_share=_ENGINE_GPU_SHARE)
        self.actor = actor_class.options(**options).remote(args, index, kind)

    async def start(self) -> str:
        return str(await self.actor.start.remote())

    async def watch(self) -> None:
        try:
            await self.actor.watch.remote()
        except RayActorError as error:
            log = self._logs / f"{self.name}.log"
            raise ProcessDied(f"the actor that owns {self.name} died; see {log}{log_tail(log)}") from error

    async def stop(self) -> None:
        await self.actor.stop.remote()

    async def pids(self) -> dict[str, int]:
        pids = await self.actor.pids.remote()
        return {f"{self.name}-actor": pids["actor"], self.name: pids["server"]}

    def kill(self) -> None:
        ray.kill(self.actor)
