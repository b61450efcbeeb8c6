"""The driver's end of the evaluation actor: an actor that dies costs one evaluation, the next one gets a new actor."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError

from miles.ray.eval.manager import EvalManager
from miles.ray.eval.types import EvalOutcome

if TYPE_CHECKING:
    from argparse import Namespace

    from ray.actor import ActorHandle

    from miles.ray.placement_group import Bundles

logger = logging.getLogger(__name__)

_MAX_CALLS = 64


class EvalClient:
    """An EvalBackend that evaluates in an `EvalManager` actor."""

    def __init__(self, args: Namespace, bundles: Bundles) -> None:
        self._args = args
        self._bundles = bundles
        self._actor: ActorHandle | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> dict[str, int]:
        actor_class: Any = ray.remote(EvalManager)
        actor = actor_class.options(num_cpus=1, max_concurrency=_MAX_CALLS).remote(self._args, self._bundles)
        try:
            pids: dict[str, int] = await actor.start.remote()
        except BaseException:
            ray.kill(actor)
            raise
        self._actor = actor
        return pids

    async def evaluate(self, rollout_id: int, hf_dir: str, version: str) -> EvalOutcome:
        async with self._starting:
            if self._actor is None:
                await self.start()
            actor = self._actor
        assert actor is not None, "start makes one or raises"
        try:
            outcome: EvalOutcome = await actor.evaluate.remote(rollout_id, hf_dir, version)
        except RayActorError as error:
            if self._actor is actor:  # else somebody else has replaced it already
                self._actor = None
            logger.info("the evaluation actor died: %s", error)
            log = Path(self._args.run_dir) / "logs" / "eval_manager.log"
            return EvalOutcome(skipped="crashed", message=f"the evaluation actor died; see {log}")
        return outcome

    async def close(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None:
            await actor.dispose.remote()
