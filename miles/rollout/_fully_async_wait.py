"""How a call of the fully-async rollout waits for a finished group: never for a dead worker, never silently.

waits for       a group, the worker's end, the end of the data
while it waits  a warning with numbers from time to time, and the end of patience where a flag sets one
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from miles.rollout._fully_async_errors import describe_oldest, no_progress
from miles.rollout._fully_async_ledger import GroupLedger, Owner

if TYPE_CHECKING:
    from miles.rollout._fully_async_config import FullyAsyncConfig
    from miles.rollout._fully_async_finished import FinishedGroups
    from miles.rollout._fully_async_ledger import GroupKey
    from miles.rollout._fully_async_patience import Patience
    from miles.rollout._fully_async_tasks import GroupTasks
    from miles.rollout._fully_async_trainer import TrainerSide
    from miles.rollout._fully_async_window import Activity
    from miles.rollout._submission_gate import SubmissionGate

logger = logging.getLogger("miles.rollout.fully_async_rollout")


class WaitsForGroups:
    """The waiting half of `FullyAsyncRolloutFn`, which owns everything that is named here."""

    config: FullyAsyncConfig
    ledger: GroupLedger
    submission_gate: SubmissionGate
    _activity: Activity
    _closed: bool
    _end_waiters: set[asyncio.Future[None]]
    _finished: FinishedGroups
    _group_tasks: GroupTasks
    _trainer: TrainerSide
    _worker: asyncio.Future[Any] | None

    def _look_again(self) -> None:
        raise NotImplementedError

    def _new_patience(self, now: float) -> Patience:
        raise NotImplementedError

    async def _engine_urls(self) -> list[str]:
        raise NotImplementedError

    async def _next_group(self, kept: int = 0) -> GroupKey | None:
        """The oldest finished group; waits for one, and returns None where none will come because the data has ended.
        Raises as soon as the worker has ended, queued groups or not."""
        self._raise_if_worker_ended()
        ready = self._finished.ready()
        return ready or await self._finished.wait(partial(self._wait_for, kept), self._trainer.version)

    async def _wait_for(self, kept: int, getting: asyncio.Future[Any]) -> bool:
        """Until the group is there: true. False where the data has ended before."""
        assert self._worker is not None
        loop = asyncio.get_running_loop()
        patience = self._new_patience(loop.time())
        end_of_data: asyncio.Future[None] = loop.create_future()
        self._end_waiters.add(end_of_data)
        self._activity.waiting.begin(loop.time())
        self._look_again()
        try:
            while True:
                await asyncio.wait(
                    {getting, self._worker, end_of_data},
                    timeout=patience.next_look(loop.time()),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                self._raise_if_worker_ended()
                if getting.done() or end_of_data.done():
                    return getting.done()
                self._look_at(patience, loop.time(), kept)
                if patience.is_over(now := loop.time()):
                    stuck = self.ledger.held_by(Owner.IN_FLIGHT)
                    raise no_progress(patience.waited(now), stuck, now, await self._engine_urls())
        finally:
            self._activity.waiting.end(loop.time())
            self._end_waiters.discard(end_of_data)

    def _look_at(self, patience: Patience, now: float, kept: int) -> None:
        """Nothing has come for a while: warn from time to time."""
        self._group_tasks.notice_lost()
        self._raise_if_worker_ended()
        if not self.submission_gate.is_open:
            patience.renew(now)
        if patience.should_warn(now) and not patience.is_over(now):
            in_flight = self.ledger.held_by(Owner.IN_FLIGHT)
            logger.warning(
                "no finished group for %.0f s: %d of %d groups kept, %d queued, %d of %d in flight%s",
                patience.waited(now),
                kept,
                self.config.rollout_batch_size,
                self._finished.size,
                len(in_flight),
                self.config.most_groups_in_flight,
                describe_oldest(in_flight, now),
            )

    def _raise_if_worker_ended(self) -> None:
        assert self._worker is not None
        if self._group_tasks.failure is not None:  # even while the worker is still settling the other tasks
            raise self._group_tasks.failure
        if self._closed:
            raise RuntimeError("this FullyAsyncRolloutFn was closed while a batch was being collected")
        if not self._worker.done():
            return
        if self._worker.cancelled():
            raise RuntimeError("the fully-async worker was cancelled, though nobody closed the rollout function")
        raise self._worker.exception() or RuntimeError("the fully-async worker returned, though it must never end")
