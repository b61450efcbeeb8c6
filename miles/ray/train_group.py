"""All trainer ranks as one: every call goes to each of them, results that are equal everywhere come from rank 0."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from miles.ray.cluster import num_trainers
from miles.ray.supervisor import original_error
from miles.ray.train_actor import TrainActor
from miles.ray.waits import result_of

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Awaitable, Sequence

    from miles.ray.placement_group import Bundles
    from miles.ray.rollout.rollout_manager import Box
    from miles.ray.supervisor import Supervisor

# Ranks that wait for the same one give up within moments of each other.
_GRACE_SECS = 5.0


class TrainGroup:
    """The trainer actors of a run."""

    def __init__(self, args: Namespace, bundles: Bundles) -> None:
        self._logs = Path(args.run_dir) / "logs"
        world_size = num_trainers(args)
        actor_class = ray.remote(TrainActor)
        self.actors = [
            actor_class.options(**bundles.actor_options(rank)).remote(args, rank, world_size)
            for rank in range(world_size)
        ]

    def watch(self, supervisor: Supervisor) -> None:
        for rank, actor in enumerate(self.actors):
            name, log = f"trainer-{rank}", self._logs / f"trainer-{rank}.log"
            supervisor.listen(name, actor, log)
            supervisor.watch(name, actor, log, endless=False)

    async def init(self, checkpoint: str | None) -> int:
        """Build every rank from this checkpoint set (None: the initial weights); returns the rollout to start with."""
        address = await self.actors[0].rendezvous_address.remote()
        return int((await self._call("init", *address, checkpoint))[0])

    async def connect_engines(self, engine_urls: list[str]) -> None:
        await self._call("connect_engines", engine_urls)

    async def train(self, rollout_id: int, data_ref: list[Box]) -> dict[str, float]:
        """One training step; returns its metrics."""
        metrics: dict[str, float] = (await self._call("train", rollout_id, data_ref))[0]
        return metrics

    async def update_weights(self, *, again: bool = False) -> tuple[int, dict[str, float]]:
        """Send the weights to every connected engine as a new version, or `again` as the last one; returns version and
        metrics."""
        version, metrics = (await self._call("update_weights", again))[0]
        return version, metrics

    async def save_model(self, rollout_id: int, rollout_state: str) -> None:
        """Write a checkpoint set; the staged file at `rollout_state` becomes its rollout part."""
        await self._call("save", rollout_id, rollout_state)

    async def finish_saving(self) -> None:
        """Wait for the set that is still being written (--async-save)."""
        await self._call("finish_saving")

    async def export_hf(self, directory: str) -> None:
        await self._call("export_hf", directory)

    async def pids(self) -> dict[str, int]:
        """Process ids by name."""
        return {f"trainer-{rank}": pid for rank, pid in enumerate(await self._call("pid"))}

    async def close(self) -> None:
        await self._call("close")

    async def _call(self, method: str, *args: Any) -> list[Any]:
        return await of_all_ranks([getattr(actor, method).remote(*args) for actor in self.actors])


async def of_all_ranks(calls: Sequence[Awaitable[Any]], *, grace_secs: float = _GRACE_SECS) -> list[Any]:
    """What each rank returns. Raises the first failure. Where that is the timeout of a collective, a note on it names
    the ranks that have not failed: the others have waited for them."""
    tasks = [asyncio.ensure_future(result_of(call)) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    except Exception as error:
        cause = original_error(error)
        if cause is not None and is_collective_timeout(cause):
            await asyncio.wait(tasks, timeout=grace_secs)
            for rank in (rank for rank, task in enumerate(tasks) if not task.done()):
                cause.add_note(f"trainer-{rank} has not failed: the others have most likely waited for it; see its log")
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def is_collective_timeout(error: BaseException) -> bool:
    """Whether this is what gloo or NCCL raise in a rank that has waited for another one in vain."""
    text = str(error).lower()
    in_vain = "timed out" in text and ("gloo" in text or "nccl" in text)
    return isinstance(error, RuntimeError) and (in_vain or "application timeout caused pair closure" in text)
