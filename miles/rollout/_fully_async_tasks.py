"""The owner of the tasks that generate groups: it starts, counts and ends them, and keeps the first failure."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from miles.rollout._fully_async_groups import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from miles.rollout._fully_async_ledger import GroupKey

    Work = Callable[[GroupKey], Coroutine[Any, Any, None]]

logger = logging.getLogger(__name__)


class GroupTasks:
    """The groups in generation: one task each, in the order of submission.

    `failure` is the first error of a task, None as long as all is well; further ones are logged. A task that ends
    cancelled although nobody stopped the tasks is a failure, too. `on_failure` is called after that was noted.
    """

    def __init__(self, work: Work, on_failure: Callable[[GroupKey], None]) -> None:
        self.failure: BaseException | None = None
        self.stopping = False  # from now on the tasks are being cancelled: how they end is no failure
        self._work = work
        self._on_failure = on_failure
        self._keys: dict[asyncio.Future[Any], GroupKey] = {}  # a task leaves in its last step

    def start(self, key: GroupKey) -> None:
        """Start a task that awaits `work(key)`."""
        task = asyncio.get_running_loop().create_task(self._run(key), name="fully-async group")
        self._keys[task] = key

    async def stop(self, grace_secs: float, *others: asyncio.Future[Any]) -> None:
        """Cancel every task, and `others` with them, and wait until they have ended, for at most `grace_secs`.

        What has not ended by then, because user code holds on to its cancellation, is logged and left behind.
        """
        self.stopping = True
        left = await _cancel_and_wait([*self._keys, *others], grace_secs)
        if left:
            names = ", ".join(sorted(self._name(task) for task in left))
            logger.error("%d task(s) still run %g s after they were cancelled: %s", len(left), grace_secs, names)

    def notice_lost(self) -> None:
        """Make a failure of each task that has ended without a step of its own: cancelled before its first one. Looks
        at every task."""
        for task, key in list(self._keys.items()):
            if task.done():
                del self._keys[task]
                self._keep(_leak(key), key)

    async def _run(self, key: GroupKey) -> None:
        """The one place where what a task raises becomes data: the worker raises it."""
        try:
            await self._work(key)
        except asyncio.CancelledError as cancellation:
            leak = self._cancelled(cancellation, key)
            if leak is None:
                raise
            self._keep(leak, key)
        except BaseException as error:
            self._keep(error, key)
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
        finally:
            self._keys.pop(asyncio.current_task(), None)  # type: ignore[arg-type]

    def _cancelled(self, cancellation: asyncio.CancelledError, key: GroupKey) -> BaseException | None:
        """What it means that a task was cancelled: nothing, where the tasks are being stopped."""
        if self.stopping:
            return None
        leak = _leak(key)
        leak.__cause__ = cancellation
        return leak

    def _keep(self, error: BaseException, key: GroupKey) -> None:
        if self.failure is None and not self.stopping:
            self.failure = error
            logger.error("generating %s failed, which ends the rollout: %r", describe(key.prompt_group), error)
        else:  # one error can be raised; the others are not swallowed either
            logger.error("generating %s failed, too", describe(key.prompt_group), exc_info=error)
        self._on_failure(key)

    def _name(self, task: asyncio.Future[Any]) -> str:
        key = self._keys.get(task)
        if key is not None:
            return f"fully-async {describe(key.prompt_group)}"
        return task.get_name() if isinstance(task, asyncio.Task) else repr(task)


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
