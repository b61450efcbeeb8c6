"""The owner of the tasks that generate groups: it starts, names, counts and ends them, and keeps the first failure."""

from __future__ import annotations

import asyncio
import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miles.rollout._fully_async_groups import PromptGroup, describe

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    Work = Callable[[PromptGroup], Coroutine[Any, Any, None]]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class InFlightGroup:
    """A prompt group in generation, and when that began (loop time, seconds)."""

    prompt_group: PromptGroup
    submitted_at: float


class GroupTasks:
    """The groups in flight: one task each, in the order of submission.

    A group is in flight until its work has returned, to the very step: it is never counted here and in the queue at
    once. `failure` is the first error of a task, None as long as all is well; further ones are logged. A task that ends
    cancelled although nobody stopped the tasks is a failure, too.
    """

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.stopping = False  # from now on the tasks are being cancelled: how they end is no failure
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_flight: dict[asyncio.Task[None] | None, InFlightGroup] = {}
        self._one_left = asyncio.Event()

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def oldest(self) -> InFlightGroup | None:
        return next(iter(self._in_flight.values()), None)

    def start(self, prompt_group: PromptGroup, work: Work) -> None:
        """Start a task that awaits `work(prompt_group)`."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._run(work, prompt_group), name=f"fully-async {describe(prompt_group)}")
        self._tasks.add(task)
        self._in_flight[task] = InFlightGroup(prompt_group, submitted_at=loop.time())
        task.add_done_callback(functools.partial(self._on_done, prompt_group))

    async def wait_until_one_leaves(self) -> None:
        """Until a group is no longer in flight, well or badly, after this call began."""
        self._one_left.clear()
        await self._one_left.wait()

    async def stop(self, grace_secs: float, *others: asyncio.Future[Any]) -> None:
        """Cancel every task, and `others` with them, and wait until they have ended, for at most `grace_secs`.

        What has not ended by then, because user code holds on to its cancellation, is logged and left behind.
        """
        self.stopping = True
        await _cancel_and_wait([*self._tasks, *others], grace_secs)

    async def _run(self, work: Work, prompt_group: PromptGroup) -> None:
        await work(prompt_group)
        self._leave(asyncio.current_task())

    def _leave(self, task: asyncio.Task[None] | None) -> None:
        if self._in_flight.pop(task, None) is not None:
            self._one_left.set()

    def _on_done(self, prompt_group: PromptGroup, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = self._error_of(task, prompt_group)
        if error is not None:
            self._keep(error, prompt_group)
        self._leave(task)  # where the work did not return

    def _keep(self, error: BaseException, prompt_group: PromptGroup) -> None:
        if self.failure is None and not self.stopping:
            self.failure = error
            logger.error("generating %s failed, which ends the rollout: %r", describe(prompt_group), error)
        else:  # one error can be raised; the others are not swallowed either
            logger.error("generating %s failed, too", describe(prompt_group), exc_info=error)

    def _error_of(self, task: asyncio.Task[None], prompt_group: PromptGroup) -> BaseException | None:
        try:
            return task.exception()
        except asyncio.CancelledError as cancellation:
            if self.stopping:
                return None
            leak = RuntimeError(
                f"generating {describe(prompt_group)} ended cancelled, though the rollout did not cancel it: a "
                "generate or reward function let the cancellation of something else escape"
            )
            leak.__cause__ = cancellation
            return leak


async def _cancel_and_wait(tasks: Iterable[asyncio.Future[Any]], grace_secs: float) -> None:
    pending = {task for task in tasks if not task.done()}
    for task in pending:
        task.cancel()
    if not pending:
        return
    _, left = await asyncio.wait(pending, timeout=grace_secs)
    if left:
        names = ", ".join(sorted(task.get_name() if isinstance(task, asyncio.Task) else repr(task) for task in left))
        logger.error("%d task(s) still run %g s after they were cancelled: %s", len(left), grace_secs, names)
