"""The shared rollout event loop: one asyncio loop on one named thread, for code that blocks and code that awaits.

    a blocking caller                          thread "miles-rollout-loop"
      run(coro) ---- call_soon_threadsafe ---->  a task, under the caller's context variables
        waits <------ result or exception -----  the task has ended
        interrupted -------- cancel ---------->  the task is cancelled, and awaited, before run() returns

The shared loop starts with its first use. Whoever needs it for longer holds it (`use_async_loop`); it ends, joined,
when the last holder lets go, or at once with `close_async_loop`. Ending cancels and awaits every task that is left
and says which they were; nothing is left to the interpreter's exit.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import inspect
import logging
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from miles.utils.loop_lag import LoopLagWatch

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

T = TypeVar("T")

logger = logging.getLogger(__name__)

LOOP_THREAD_NAME = "miles-rollout-loop"
CLOSE_TIMEOUT_SECS = 10.0


class AsyncLoopThread:
    """An event loop on a thread of its own, running from construction to `close()`.

    The thread is a daemon: a program that forgets to close it can still exit.
    """

    def __init__(self, name: str = LOOP_THREAD_NAME) -> None:
        self.name = name
        self.loop = asyncio.new_event_loop()
        self._executor = ThreadPoolExecutor(thread_name_prefix=f"{name}-worker")
        self.loop.set_default_executor(self._executor)
        self._lock = threading.Lock()
        self._accepts_work = True
        self._stopping = False
        self._lag_watch: LoopLagWatch | None = None
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """True from the moment that `close()` was called: no more work is accepted."""
        return not self._accepts_work

    @property
    def in_loop_thread(self) -> bool:
        """Whether the caller is on the loop's own thread, where blocking on the loop could never end."""
        return threading.current_thread() is self._thread

    def watch_lag(self, warn_secs: float) -> None:
        """Report when the loop stands still for longer than `warn_secs` (0: do not watch), until it is closed."""
        with self._lock:
            if self._lag_watch is not None or not self._accepts_work or warn_secs == 0:
                return
            self._lag_watch = LoopLagWatch(warn_secs)
            self.loop.call_soon_threadsafe(self._lag_watch.start)

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run `coro` on the loop; block until it has ended and return its result or raise its exception.

        Anything that interrupts the waiting thread (KeyboardInterrupt) cancels the coroutine and waits, for at most
        CLOSE_TIMEOUT_SECS, until its cleanup is done. Raises RuntimeError, and never starts `coro`, when called from
        the loop's own thread or after `close()`; RuntimeError too where `close()` cancelled the coroutine, and
        concurrent.futures.CancelledError where somebody else did.
        """
        if not inspect.iscoroutine(coro):
            raise TypeError(f"run() takes a coroutine, got {type(coro).__name__}")
        if self.in_loop_thread:
            coro.close()
            raise RuntimeError(
                f"run() was called on thread {self.name!r} itself, which would wait for itself: await it"
            )
        job: _Job[T] = _Job(coro)
        try:
            self._submit(job)
            return job.outcome.result()
        except concurrent.futures.CancelledError:
            if self.closed:
                raise RuntimeError(f"the event loop {self.name!r} was closed while {job.name} was running") from None
            raise
        except BaseException:
            self._cancel(job)
            raise

    def close(self, timeout: float = CLOSE_TIMEOUT_SECS) -> list[str]:
        """Cancel and await what is left on the loop, stop it and join its thread; return the names of those tasks.

        A second call returns [] at once. Raises RuntimeError on the loop's own thread, and where the thread does not
        end in `timeout` seconds because something on it blocks or refuses to be cancelled.
        """
        if self.in_loop_thread:
            raise RuntimeError(f"the event loop {self.name!r} cannot be closed from its own thread")
        with self._lock:
            if not self._accepts_work:
                return []
            self._accepts_work = False
        if self._lag_watch is not None:
            self._lag_watch.close()
        deadline = time.monotonic() + timeout
        job = _Job(self._shut_down(timeout))
        job.outcome.add_done_callback(self._stop)
        self.loop.call_soon_threadsafe(job.start)
        try:
            leftover = job.outcome.result(timeout)
        except concurrent.futures.TimeoutError:
            raise RuntimeError(f"the event loop {self.name!r} did not end in {timeout:g} s: it is blocked") from None
        self._thread.join(max(0.1, deadline - time.monotonic()))
        if self._thread.is_alive():
            raise RuntimeError(f"thread {self.name!r} did not end in {timeout:g} s")
        self._close_executor(max(0.1, deadline - time.monotonic()))
        if leftover:
            logger.warning("closed %s with %d task(s) left: %s", self.name, len(leftover), ", ".join(leftover))
        return leftover

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._stopping:
            try:
                self.loop.run_forever()
            except (KeyboardInterrupt, SystemExit) as error:
                # asyncio lets these two out of the loop. They are the task's outcome, and run() raises them in the
                # thread that waits for it; the loop goes on for everybody else.
                logger.warning("a task on %s raised %s", self.name, type(error).__name__)
        self.loop.close()

    def _stop(self, _outcome: object) -> None:
        """Called on the loop's thread once everything on it has ended."""
        self._stopping = True
        self.loop.stop()

    def _submit(self, job: _Job[Any]) -> None:
        with self._lock:
            if self._accepts_work:
                self.loop.call_soon_threadsafe(job.start)
                return
        job.discard()
        raise RuntimeError(f"the event loop {self.name!r} is closed")

    def _cancel(self, job: _Job[Any]) -> None:
        if job.outcome.done():
            return
        try:
            self.loop.call_soon_threadsafe(job.cancel)
        except RuntimeError:  # the loop has closed meanwhile, and has cancelled the task
            return
        if not concurrent.futures.wait([job.outcome], CLOSE_TIMEOUT_SECS).done:
            logger.error("%s has not ended %g s after it was cancelled", job.name, CLOSE_TIMEOUT_SECS)

    async def _shut_down(self, patience: float) -> list[str]:
        """Cancel and await every other task, again for those that cleanup starts, then close async generators."""
        deadline = self.loop.time() + patience * 0.8  # the rest is for the join
        me = asyncio.current_task()
        leftover: dict[str, None] = {}
        while (tasks := {task for task in asyncio.all_tasks() if task is not me}) and self.loop.time() < deadline:
            leftover |= dict.fromkeys(sorted(task.get_name() for task in tasks))
            for task in tasks:
                task.cancel(f"{self.name} is closing")
            done, pending = await asyncio.wait(tasks, timeout=deadline - self.loop.time())
            for task in done:
                self._report_failure(task)
            for task in pending:
                logger.error("task %s on %s refuses to be cancelled", task.get_name(), self.name)
        await self.loop.shutdown_asyncgens()
        return list(leftover)

    def _report_failure(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("task %s failed while %s was closing", task.get_name(), self.name, exc_info=error)

    def _close_executor(self, timeout: float) -> None:
        """Join the loop's worker threads, but for a bounded time: a thread cannot be interrupted."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        joiner = threading.Thread(target=self._executor.shutdown, name=f"{self.name}-joiner", daemon=True)
        joiner.start()
        joiner.join(timeout)
        if joiner.is_alive():
            logger.error("a blocking call on a worker thread of %s still runs after %g s", self.name, timeout)


class _Job(Generic[T]):
    """A coroutine on its way to the loop; `outcome` is set once its task has ended, cleanup included."""

    def __init__(self, coro: Coroutine[Any, Any, T]) -> None:
        self.coro = coro
        self.name = getattr(coro, "__qualname__", repr(coro))
        self.outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._context = contextvars.copy_context()
        self._task: asyncio.Task[T] | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self.coro, name=self.name, context=self._context)
        self._task.add_done_callback(self._settle)

    def cancel(self) -> None:
        if self._task is None:  # interrupted before it was handed over
            self.discard()
        else:
            self._task.cancel()

    def discard(self) -> None:
        """Give up a coroutine that was never started."""
        self.coro.close()
        self.outcome.cancel()
        self.outcome.set_running_or_notify_cancel()

    def _settle(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.outcome.cancel()
            self.outcome.set_running_or_notify_cancel()
        elif (error := task.exception()) is not None:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(task.result())


class _SharedLoop:
    """Holds the one loop thread that a process shares, and counts who holds it.

    A forked child inherits the object but not the thread: it forgets the loop (without closing it, the descriptors
    belong to the parent too) and starts its own when it needs one.
    """

    def __init__(self) -> None:
        self._inherited: list[AsyncLoopThread] = []
        self._thread: AsyncLoopThread | None = None
        self._forget()

    def _forget(self) -> None:
        if self._thread is not None:
            self._inherited.append(self._thread)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._holders = 0
        self._thread = None

    def get(self, *, hold: bool = False) -> AsyncLoopThread:
        if self._pid != os.getpid():
            self._forget()
        with self._lock:
            if self._thread is None or self._thread.closed:
                self._thread = AsyncLoopThread()
                self._holders = 0
            self._holders += hold
            return self._thread

    def release(self, thread: AsyncLoopThread) -> None:
        with self._lock:
            if self._thread is not thread:
                return  # closed explicitly in the meantime
            self._holders -= 1
            if self._holders > 0:
                return
            self._thread = None
        thread.close()

    def close(self) -> list[str]:
        if self._pid != os.getpid():
            self._forget()
        with self._lock:
            thread, self._thread = self._thread, None
        return thread.close() if thread is not None else []


_shared_loop = _SharedLoop()  # this module's only state


def get_async_loop() -> AsyncLoopThread:
    """The process's shared loop thread, started by the first call and again by the first one after it was closed."""
    return _shared_loop.get()


@contextmanager
def use_async_loop() -> Iterator[AsyncLoopThread]:
    """Hold the shared loop: it is there for the whole block, and closes when its last holder leaves."""
    thread = _shared_loop.get(hold=True)
    try:
        yield thread
    finally:
        _shared_loop.release(thread)


def close_async_loop() -> list[str]:
    """Close the shared loop, whoever holds it; the names of the tasks that were cancelled. Nothing happens where there
    is none."""
    return _shared_loop.close()


def run(coro: Coroutine[Any, Any, T]) -> T:
    """Run `coro` on the shared rollout loop and block until it has ended; see `AsyncLoopThread.run`.

    A bad call (from the loop's own thread) raises RuntimeError and closes `coro` unstarted.
    """
    return get_async_loop().run(coro)


async def eager_create_task(coro: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
    """Create a task that has already run up to its first wait when this returns.

    The caller owns the task. If the caller is cancelled here, so is the task.
    """
    if sys.version_info >= (3, 12):
        return asyncio.Task(coro, loop=asyncio.get_running_loop(), name=name, eager_start=True)
    task = asyncio.create_task(coro, name=name)
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        task.cancel()
        raise
    return task
