"""The driver's end of the evaluation actor: an actor that dies costs one evaluation, the next one gets a new actor.

One that lives and does not answer for --heartbeat-timeout-secs is killed: the run's end would wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError

from miles.ray.eval.manager import EvalManager
from miles.ray.eval.types import EvalOutcome
from miles.ray.heartbeats import Heartbeats
from miles.ray.silence import DEFAULT_LIMIT_SECS
from miles.ray.waits import result_of

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
        self._hearts: Heartbeats | None = None
        self._log = Path(args.run_dir) / "logs" / "eval_manager.log"
        self._starting = asyncio.Lock()

    async def start(self) -> dict[str, int]:
        actor_class: Any = ray.remote(EvalManager)
        actor = actor_class.options(num_cpus=1, max_concurrency=_MAX_CALLS).remote(self._args, self._bundles)
        try:
            pids: dict[str, int] = await actor.start.remote()
        except BaseException:
            ray.kill(actor)
            raise
        await self._listen_to(actor)
        return pids

    async def _listen_to(self, actor: ActorHandle) -> None:
        await self._stop_listening()
        self._actor = actor
        self._hearts = Heartbeats(getattr(self._args, "heartbeat_timeout_secs", DEFAULT_LIMIT_SECS))
        self._hearts.listen("eval_manager", result_of(actor.heart.remote()), self._log)

    async def _stop_listening(self) -> None:
        if self._hearts is not None:
            await self._hearts.close()

    async def evaluate(self, rollout_id: int, hf_dir: str, version: str) -> EvalOutcome:
        async with self._starting:
            if self._actor is None:
                await self.start()
            actor = self._actor
        assert actor is not None and self._hearts is not None, "start makes both or raises"
        call = asyncio.ensure_future(result_of(actor.evaluate.remote(rollout_id, hf_dir, version)))
        lost = asyncio.ensure_future(self._hearts.wait_lost())
        try:
            await asyncio.wait({call, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                self._drop(actor)
                ray.kill(actor)
                return EvalOutcome(skipped="crashed", message=lost.result())
            outcome: EvalOutcome = call.result()
        except RayActorError as error:
            self._drop(actor)
            logger.info("the evaluation actor died: %s", error)
            return EvalOutcome(skipped="crashed", message=f"the evaluation actor died; see {self._log}")
        finally:
            for task in (call, lost):
                task.cancel()
            await asyncio.gather(call, lost, return_exceptions=True)
        return outcome

    def _drop(self, actor: ActorHandle) -> None:
        if self._actor is actor:  # else somebody else has replaced it already
            self._actor = None

    async def close(self) -> None:
        await self._stop_listening()
        actor, self._actor = self._actor, None
        if actor is not None:
            await actor.dispose.remote()
