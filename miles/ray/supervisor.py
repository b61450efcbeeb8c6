"""Waiting for the run's actors without ever waiting for a dead one.

consumes   results of actor calls, and one endless `watch` (or repeated `ping`) per actor
waits for  the result, any actor's death, or a request to stop - whichever comes first
raises     RunFailed with one message that names the process and its log, or StopRequested
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayActorError, RayTaskError

from miles.utils.processes import ProcessDied, log_tail

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from pathlib import Path

    from ray.actor import ActorHandle

_PING_SECS = 0.5
# A dead engine is often noticed first by whoever talks to it. So much later its own watcher has noticed too.
_BLAME_SECS = 2.0


class RunFailed(RuntimeError):
    """The run cannot go on. The message is meant for the user as it is."""


class StopRequested(BaseException):
    """The user asked the run to stop (Ctrl-C or SIGTERM). Not an error: nothing may catch it as one."""


class Supervisor:
    """Knows every actor of the run and fails every wait of the driver as soon as one of them dies."""

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop = asyncio.ensure_future(stop.wait())
        self._watchers: dict[asyncio.Task[None], tuple[str, Path]] = {}
        self._pids: dict[str, int] = {}

    def watch(self, name: str, actor: ActorHandle, log_path: Path, *, endless: bool) -> None:
        """Watch `actor`: through its own endless `watch`, or by repeated `ping` where it runs one call at a time."""
        coroutine = _await_ref(actor.watch.remote()) if endless else _ping_forever(actor)
        self._watchers[asyncio.create_task(coroutine, name=f"watch {name}")] = (name, log_path)

    def learn_pids(self, pids: dict[str, int]) -> None:
        """Process ids by the names given to `watch`, for the messages."""
        self._pids |= pids

    async def wait(self, awaitable: Awaitable[Any]) -> Any:
        """The result of `awaitable` (an object reference, or a coroutine over several).

        Raises RunFailed where a process died, StopRequested where the user asked for the end, else what the call
        raised.
        """
        call = asyncio.ensure_future(_await_ref(awaitable))
        try:
            await asyncio.wait({call, self._stop, *self._watchers}, return_when=asyncio.FIRST_COMPLETED)
            if self._stop.done():
                raise StopRequested
            if call.done() and call.exception() is None:
                return call.result()
            if call.done():
                await self._give_watchers_time_to_blame()
            self.raise_if_died()
            return await call
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    def raise_if_died(self) -> None:
        """Raise RunFailed where an actor, or a process that it owns, has died."""
        for watcher, (name, log_path) in self._watchers.items():
            if watcher.done() and not watcher.cancelled():
                raise RunFailed(self._obituary(name, log_path, watcher.exception()))

    async def close(self) -> None:
        tasks = [*self._watchers, self._stop]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _obituary(self, name: str, log_path: Path, error: BaseException | None) -> str:
        cause = original_error(error)
        if isinstance(cause, ProcessDied):
            return str(cause)
        if isinstance(cause, RayActorError):
            pid = f" (pid {self._pids[name]})" if name in self._pids else ""
            return f"{name}{pid} died; see {log_path}{log_tail(log_path)}"
        return f"{name} failed: {type(cause).__name__}: {cause}; see {log_path}"

    async def _give_watchers_time_to_blame(self) -> None:
        if self._watchers:
            await asyncio.wait(self._watchers, timeout=_BLAME_SECS, return_when=asyncio.FIRST_COMPLETED)


async def _await_ref(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


async def _ping_forever(actor: ActorHandle) -> None:
    while True:
        await actor.ping.remote()
        await asyncio.sleep(_PING_SECS)


def original_error(error: BaseException | None) -> BaseException | None:
    """The exception that the actor's method raised, without Ray's wrapping."""
    return error.cause if isinstance(error, RayTaskError) and error.cause is not None else error
