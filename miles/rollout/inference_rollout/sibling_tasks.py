"""Tasks that stand or fall together: one fails, the others are cancelled and settled, and its error is raised.

`asyncio.gather` leaves the siblings of a failure running, and `asyncio.TaskGroup` wraps the error in a group; a plug-in
author wants neither.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any, TypeVar

from miles.utils.user_calls import UserFunctionError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

T = TypeVar("T")


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, T]], names: Iterable[object] = ()) -> list[T]:
    """The results, in order. The first failure cancels the rest, waits until all have ended, and is raised.

    Cancelling the caller does the same. A child that ends cancelled although nobody here cancelled it is a failure
    (UserFunctionError), so that it is never mistaken for the caller's own cancellation. The `str` of `names` tells the
    children apart in that error, and names their tasks.
    """
    children = list(coroutines)
    siblings = _Siblings()
    named = itertools.zip_longest(children, itertools.islice(names, len(children)))
    loop = asyncio.get_running_loop()
    tasks = [
        loop.create_task(siblings.run(child, name), name=None if name is None else str(name)) for child, name in named
    ]
    if not tasks:
        return []
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failure = next((f for f in map(failure_of, tasks) if f is not None), None)
        if failure is not None:
            raise failure
    except BaseException:
        siblings.stopping = True
        await cancel_and_settle(tasks)
        for child in children:
            child.close()  # one that was cancelled before its first step has not been awaited
        raise
    return [task.result() for task in tasks]


class _Siblings:
    """Tells the cancellation of a child by its gathering from one that came from within the child."""

    def __init__(self) -> None:
        self.stopping = False

    async def run(self, child: Coroutine[Any, Any, T], name: object) -> T:
        try:
            return await child
        except asyncio.CancelledError as error:
            if self.stopping:
                raise
            who = getattr(child, "__qualname__", child) if name is None else name
            raise UserFunctionError(
                f"{who} was cancelled from within: a user function cancelled its own task, or let the cancellation of "
                "something else escape"
            ) from error


def failure_of(task: asyncio.Future[Any]) -> BaseException | None:
    """Why a task has failed; None while it runs and where it succeeded. To have been cancelled is a failure."""
    if not task.done():
        return None
    if task.cancelled():
        return RuntimeError(f"{task!r} was cancelled from within")
    return task.exception()


async def cancel_and_settle(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel the tasks and wait until each has ended; their results and errors are dropped.

    The wait goes on to its end when the caller is cancelled meanwhile; the cancellation is raised afterwards.
    """
    pending = {task for task in tasks if not task.done()}
    for task in pending:
        task.cancel()
    interrupted: asyncio.CancelledError | None = None
    while pending:
        try:
            _, pending = await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            interrupted = error
            pending = {task for task in pending if not task.done()}
    for task in tasks:
        if not task.cancelled():
            task.exception()
    if interrupted is not None:
        raise interrupted
