"""Waiting for the run's actors without ever waiting for a dead one.

consumes   results of actor calls, one endless `watch` (or repeated `ping`) per actor, and Ray's own processes
waits for  the result, any death, or a request to stop - whichever comes first
raises     RunFailed with one message that names the process and its log, or StopRequested
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayActorError, RayTaskError

from miles.ray.ray_processes import gcs_lost
from miles.utils.processes import ProcessDied, log_tail

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from pathlib import Path

    from ray.actor import ActorHandle

    from miles.ray.ray_processes import RayProcess

_PING_SECS = 0.5
_LOOK_SECS = 0.1
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
        self._ray_processes: list[RayProcess] = []
        self._ray_watcher: asyncio.Task[str] | None = None

    def watch_ray(self, processes: list[RayProcess], gcs_address: str | None = None) -> None:
        """Watch what of Ray the run stands on: its own processes, whose end explains every other one at that moment, or
        the control store of a cluster that it has joined."""
        self._ray_processes = processes
        wait = self._wait_for_the_end_of_ray() if gcs_address is None else gcs_lost(gcs_address)
        self._ray_watcher = asyncio.create_task(wait, name="watch ray")

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
            await asyncio.wait({call, self._stop, *self._all_watchers()}, return_when=asyncio.FIRST_COMPLETED)
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
        """Raise RunFailed where a process of Ray, an actor, or a process that it owns, has died."""
        for death in (process.death() for process in self._ray_processes):
            if death is not None:
                raise RunFailed(death)
        if self._ray_watcher is not None and self._ray_watcher.done() and not self._ray_watcher.cancelled():
            raise RunFailed(self._ray_watcher.result())
        for watcher, (name, log_path) in self._watchers.items():
            if watcher.done() and not watcher.cancelled():
                raise RunFailed(self._obituary(name, log_path, watcher.exception()))

    async def close(self) -> None:
        tasks = [*self._all_watchers(), self._stop]
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
        if watchers := self._all_watchers():
            await asyncio.wait(watchers, timeout=_BLAME_SECS, return_when=asyncio.FIRST_COMPLETED)

    def _all_watchers(self) -> list[asyncio.Task[Any]]:
        return [*self._watchers, *([self._ray_watcher] if self._ray_watcher is not None else [])]

    async def _wait_for_the_end_of_ray(self) -> str:
        while True:
            for death in (process.death() for process in self._ray_processes):
                if death is not None:
                    return death
            await asyncio.sleep(_LOOK_SECS)


async def _await_ref(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


async def _ping_forever(actor: ActorHandle) -> None:
    while True:
        await actor.ping.remote()
        await asyncio.sleep(_PING_SECS)


def original_error(error: BaseException | None) -> BaseException | None:
    """The exception that the actor's method raised, without Ray's wrapping."""
    return error.cause if isinstance(error, RayTaskError) and error.cause is not None else error
