"""Training steps and checkpoints: what is told to the trainer and what to the rollout side, and in which order.

    train(n)    trainer's step on batch n --done--> acknowledge(n)          its groups count as trained
                                          --failed--> give_back(n)          they do not
    save(n)     rollout side stages its part --> trainer writes its own, takes that part, and publishes the set

What has begun is finished, or fails, on its own: a caller that stops waiting does not stop it. `finish` waits for it
and leaves a set of the last finished step.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from miles.ray.resume import same_directory

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Coroutine

    from miles.ray.train_group import TrainGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Steps:
    """See the module docstring. `manager` is the RolloutManager's actor handle."""

    def __init__(self, args: Namespace, manager: Any, trainers: TrainGroup) -> None:
        self._args = args
        self._manager = manager
        self._trainers = trainers
        self._under_way: asyncio.Task[Any] | None = None
        self._last_trained: int | None = None
        self._last_saved: int | None = None

    async def train(self, rollout_id: int, data_ref: Any) -> dict[str, float]:
        """One training step; returns its metrics."""
        return await self._begin(self._train(rollout_id, data_ref))

    async def save(self, rollout_id: int) -> None:
        """Publish the set after this rollout."""
        await self._begin(self._save(rollout_id))

    async def export_left_out(self, rollout_id: int) -> None:
        """Export the loaded set of this rollout, which the run goes on from, where a kill after it has prevented that.

        Without {rollout_id} in the name nothing tells which set an export is of, so it is written again.
        """
        name: str | None = self._args.save_hf
        goes_on = self._args.save and self._args.load and same_directory(self._args.save, self._args.load)
        if not name or not goes_on:
            return
        directory = name.format(rollout_id=rollout_id)
        if directory == name or not await asyncio.to_thread(Path(directory).exists):
            await self._begin(self._trainers.export_hf(directory))

    async def finish(self) -> None:
        """Wait for what is under way; then publish a set of the last finished step, unless there is one."""
        if self._under_way is not None:
            await self._under_way
        if self._args.save and self._last_trained is not None and self._last_trained != self._last_saved:
            await self.save(self._last_trained)
        await self._trainers.finish_saving()

    async def close(self) -> None:
        """Stop waiting for what is under way."""
        if self._under_way is not None:
            self._under_way.cancel()
            await asyncio.gather(self._under_way, return_exceptions=True)

    async def _begin(self, coroutine: Coroutine[Any, Any, T]) -> T:
        assert self._under_way is None or self._under_way.done()
        self._under_way = task = asyncio.ensure_future(coroutine)
        return await asyncio.shield(task)

    async def _train(self, rollout_id: int, data_ref: Any) -> dict[str, float]:
        try:
            metrics = await self._trainers.train(rollout_id, data_ref)
        except Exception:
            await self._give_back(rollout_id)
            raise
        await self._manager.acknowledge.remote(rollout_id)
        self._last_trained = rollout_id
        return metrics

    async def _give_back(self, rollout_id: int) -> None:
        try:
            await self._manager.give_back.remote(rollout_id)
        except Exception:  # the step's own failure is what the caller must hear of
            logger.exception("rollout %d could not be given back", rollout_id)

    async def _save(self, rollout_id: int) -> None:
        staged = await self._manager.save.remote(rollout_id)
        await self._trainers.save_model(rollout_id, staged)
        self._last_saved = rollout_id
        if self._args.save_hf:
            await self._trainers.export_hf(self._args.save_hf.format(rollout_id=rollout_id))
