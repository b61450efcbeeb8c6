"""The owner of the tasks that generate groups: it starts, counts and ends them, and keeps the first failure."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from miles.rollout._fully_async_groups import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from miles.rollout._fully_async_ledger import GroupKey

logger = logging.getLogger(__name__)


class GroupTasks:
    """The groups in generation: one task each, in the order of submission.

        async def work(key):
            try: ...
            except BaseException as error:
                if tasks.note_failure(key, error): raise
            finally:
                tasks.running.pop(key, None)

    `failure` is the first error of a task, None as long as all is well; further ones are logged. A task that ends
    cancelled although nobody stopped the tasks is a failure, too. `on_failure` is called after that was noted.
    """

    def __init__(self, on_failure: Callable[[GroupKey], None]) -> None:
        self.failure: BaseException | None = None
        self.stopping = False  # from now on the tasks are being cancelled: how they end is no failure
        self.running: dict[GroupKey, asyncio.Task[None]] = {}
        """A task takes itself out in its last step."""

        self._on_failure = on_failure

    def start(self, key: GroupKey, work: Coroutine[Any, Any, None]) -> None:
        """Start the group's task, which does `work` as above."""
        self.running[key] = asyncio.get_running_loop().create_task(work, name="fully-async group")

    def note_failure(self, key: GroupKey, error: BaseException) -> bool:
        """Make data of what the group's task raised: the worker raises it. Whether the task must raise it, too, as it
        is being stopped, or the process ends."""
        if isinstance(error, asyncio.CancelledError):
            if self.stopping:
                return True
            leak = _leak(key)
            leak.__cause__ = error
            self._keep(leak, key)
            return False
        self._keep(error, key)
        return isinstance(error, KeyboardInterrupt | SystemExit)

    async def stop(self, grace_secs: float, *others: asyncio.Future[Any]) -> None:
        """Cancel every task, and `others` with them, and wait until they have ended, for at most `grace_secs`.

        What has not ended by then, because user code holds on to its cancellation, is logged and left behind.
        """
        self.stopping = True
        left = await _cancel_and_wait([*self.running.values(), *others], grace_secs)
        if left:
            names = ", ".join(sorted(self._names(left)))
            logger.error("%d task(s) still run %g s after they were cancelled: %s", len(left), grace_secs, names)

    def notice_lost(self) -> None:
        """Make a failure of each task that has ended without a step of its own: cancelled before its first one. Looks
        at every task."""
        for key, task in list(self.running.items()):
            if task.done():
                del self.running[key]
                self._keep(_leak(key), key)

    def _keep(self, error: BaseException, key: GroupKey) -> None:
        if self.failure is None and not self.stopping:
            self.failure = error
            logger.error("generating %s failed, which ends the rollout: %r", describe(key.prompt_group), error)
        else:  # one error can be raised; the others are not swallowed either
            logger.error("generating %s failed, too", describe(key.prompt_group), exc_info=error)
        self._on_failure(key)

    def _names(self, tasks: set[asyncio.Future[Any]]) -> Iterable[str]:
        groups = {task: key.prompt_group for key, task in self.running.items()}
        for task in tasks:
            if task in groups:
                yield f"fully-async {describe(groups[task])}"
            else:
                yield task.get_name() if isinstance(task, asyncio.Task) else repr(task)


def _leak(key: GroupKey) -> RuntimeError:
    return RuntimeError(
        f"generating {describe(key.prompt_group)} ended cancelled, though the rollout did not cancel it: a generate or "
        "reward function let the cancellation of something else escape"
    )


async def _cancel_and_wait(tasks: Iterable[asyncio.Future[Any]], grace_secs: float) -> set[asyncio.Future[Any]]:
    """Those that have not ended `grace_secs` after their cancellation."""
    pending = {task for task in tasks if not task.done()}
    for task in pending:
        task.cancel()
    if not pending:
        return set()
    _, left = await asyncio.wait(pending, timeout=grace_secs)
    return left
