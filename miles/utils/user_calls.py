"""Calls of user functions: async ones on the event loop, ordinary ones off it, and errors that say whose they are.

    await call_user(fn, ...) --async fn--> awaited on the loop, in the caller's task
                             --plain fn--> UserCalls.run_sync --> one thread "miles-user-calls", one call at a time

Plain reward and filter functions may compute for seconds and are rarely thread-safe: off the loop they delay nobody
else's requests, and one at a time they never meet each other. A plain function that returns an awaitable is called off
the loop, and what it returned is awaited on it.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import os
import queue
import sys
import threading
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from miles.utils.loop_bound import LoopBound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

F = TypeVar("F", bound="Callable[..., Any]")

logger = logging.getLogger(__name__)

THREAD_NAME = "miles-user-calls"
CLOSE_GRACE_SECS = 1.0


class UserFunctionError(RuntimeError):
    """A user's function broke its contract in a way that no exception of its own tells. Names function and argument."""


class _Call:
    """One call on its way to the thread; `outcome` is (result, None) or (None, error)."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self._fn, self._args, self._kwargs = fn, args, kwargs
        self.outcome: asyncio.Future[tuple[Any, BaseException | None]] = self._loop.create_future()

    def run(self) -> None:
        """On the thread. The one place that turns what user code raises into data: the loop raises it again."""
        if self.outcome.cancelled():
            return
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = (self._context.run(self._fn, *self._args, **self._kwargs), None)
        except BaseException as error:  # SystemExit, too: it must not end the thread that everybody shares
            outcome = (None, error)
        try:
            self._loop.call_soon_threadsafe(self._deliver, outcome)
        except RuntimeError:  # the loop has closed: nobody waits any more
            logger.warning("%s returned after its event loop had closed", name_of(self._fn))

    def _deliver(self, outcome: tuple[Any, BaseException | None]) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class UserCalls:
    """One thread that runs plain user functions one after the other. Starts with the first call; `close()` ends it.

    The thread is a daemon: a user function that never returns cannot keep the process from ending.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._ended: asyncio.Event | None = None

    async def run_sync(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`fn(*args, **kwargs)`, off the loop, after the calls before it; raises what it raised.

        Cancelled while it waits for its turn, the call is left out; cancelled while it runs, its result is dropped.
        Raises RuntimeError after `close()`.
        """
        if self._closed:
            raise RuntimeError(f"{name_of(fn)} was called after the thread for user functions was closed")
        call = _Call(fn, args, kwargs)
        if self._thread is None:
            self._ended = asyncio.Event()
            self._thread = threading.Thread(
                target=_serve,
                args=(self._calls, asyncio.get_running_loop(), self._ended),
                name=THREAD_NAME,
                daemon=True,
            )
            self._thread.start()
        self._calls.put(call)
        result, error = await call.outcome
        if error is not None:
            raise error
        return result

    async def close(self) -> None:
        """End the thread once the running call has ended, or leave it behind after CLOSE_GRACE_SECS. Twice is fine."""
        self._closed = True
        if self._thread is None or self._ended is None:
            return
        self._calls.put(None)
        try:
            async with asyncio.timeout(CLOSE_GRACE_SECS):
                await self._ended.wait()
        except TimeoutError:
            logger.error("a user function still runs %g s after its run has ended; left behind", CLOSE_GRACE_SECS)
            return
        self._thread.join()  # it has said that it is done


def _serve(calls: queue.SimpleQueue[_Call | None], loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
    while (call := calls.get()) is not None:
        call.run()
    try:
        loop.call_soon_threadsafe(ended.set)
    except RuntimeError:  # the loop has closed meanwhile
        pass


class InlineUserCalls(UserCalls):
    """Calls at once, on the loop: for simulations, where nothing may happen outside of virtual time."""

    async def run_sync(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)


_of_the_loop = LoopBound(UserCalls, UserCalls.close)  # each loop has a thread of its own, closed with the loop
_replaced: contextvars.ContextVar[UserCalls | None] = contextvars.ContextVar("miles_user_calls", default=None)


@contextmanager
def use_user_calls(calls: UserCalls) -> Iterator[UserCalls]:
    """Run plain user functions through `calls` in this block and in the tasks that are started in it."""
    token = _replaced.set(calls)
    try:
        yield calls
    finally:
        _replaced.reset(token)


def on_the_loop(fn: F) -> F:
    """Mark a plain function as quick: `call_user` calls it on the loop, which saves the way to the thread and back."""
    fn.runs_on_the_loop = True  # type: ignore[attr-defined]
    return fn


async def call_user(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a user's function; see the module docstring for where it runs. Raises what it raises."""
    if is_async(fn) or getattr(fn, "runs_on_the_loop", False):
        result = fn(*args, **kwargs)
    else:
        calls = _replaced.get() or await _of_the_loop.get()
        result = await calls.run_sync(fn, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result


class UserCode:
    """A block that runs user code: `with UserCode("reward function", fn, "sample 3"): ...`.

    What is raised inside comes out as the same object, with a note that names function, argument, file and line. Three
    things become a UserFunctionError with the original as its cause, because on an event loop they mean something else
    than their author can have wanted: a CancelledError although nobody cancelled this task, StopIteration, SystemExit.
    """

    def __init__(self, kind: str, fn: Any, argument: Any) -> None:
        """`argument`: what the function worked on; its `str` is taken only where something is raised."""
        self._kind, self._fn, self._argument = kind, fn, argument

    def __str__(self) -> str:
        return f"{self._kind} {name_of(self._fn)}, called for {self._argument},"

    def __enter__(self) -> UserCode:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if exc is None or isinstance(exc, GeneratorExit | KeyboardInterrupt | UserFunctionError):
            return
        if isinstance(exc, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and task.cancelling() == 0:
                raise UserFunctionError(f"{self} let a cancellation escape, though nobody had cancelled it") from exc
            return
        if isinstance(exc, StopIteration | SystemExit):
            raise UserFunctionError(f"{self} raised {exc!r}") from exc
        exc.add_note(f"{self} raised this at {_place(self._fn, tb)}")


def _place(fn: Any, tb: TracebackType | None) -> str:
    """`plug.py:37`: where the function's own file was left last, else where the error was raised."""
    own = getattr(sys.modules.get(_named(fn).__module__), "__file__", None)
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(tb)]
    file, line = ([at for at in frames if at[0] == own] or frames)[-1]
    here = os.getcwd() + os.sep
    return f"{file.removeprefix(here)}:{line}"


def is_async(fn: Callable[..., Any]) -> bool:
    """Whether calling `fn` makes a coroutine: an async function, or an object with an async `__call__`."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


def name_of(fn: Any) -> str:
    """The dotted name of a function, or of an object's class."""
    named = _named(fn)
    return f"{named.__module__}.{named.__qualname__}"


def _named(fn: Any) -> Any:
    return fn if hasattr(fn, "__qualname__") else type(fn)
