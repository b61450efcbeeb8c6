"""Waiting for the run's actors without ever waiting for a dead one.

consumes   results of actor calls, one endless `watch` (or repeated `ping`) per actor, the heartbeats of their
           processes, and Ray's own processes
waits for  the result, any death, a process that has stopped without dying, or a request to stop - whichever comes first
raises     RunFailed with one message that names the process and its log, or StopRequested
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayActorError, RayTaskError

from miles.ray.heartbeats import Heartbeats
from miles.ray.ray_processes import gcs_lost, ray_lost
from miles.ray.silence import DEFAULT_LIMIT_SECS
from miles.ray.waits import result_of
from miles.utils.processes import ProcessDied, log_tail

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from pathlib import Path

    from ray.actor import ActorHandle

    from miles.ray.ray_processes import RayProcess

_PING_SECS = 0.5
# A dead engine is often noticed first by whoever talks to it. So much later its own watcher has noticed too.
_BLAME_SECS = 2.0


class RunFailed(RuntimeError):
    """The run cannot go on. The message is meant for the user as it is."""


class StopRequested(BaseException):
    """The user asked the run to stop (Ctrl-C or SIGTERM). Not an error: nothing may catch it as one."""


class Supervisor:
    """Knows every actor of the run and fails every wait of the driver as soon as one of them dies, or has been silent
    for `silent_secs`."""

    def __init__(self, stop: asyncio.Event, *, silent_secs: float = DEFAULT_LIMIT_SECS) -> None:
        self._stop = asyncio.ensure_future(stop.wait())
        self._watchers: dict[asyncio.Task[None], tuple[str, Path]] = {}
        self._ray_processes: list[RayProcess] = []
        self._ray_watcher: asyncio.Task[str] | None = None
        self._silent_secs = silent_secs
        self._heartbeats = Heartbeats(silent_secs)
        self._silence = asyncio.ensure_future(self._heartbeats.wait_lost())

    def watch_ray(self, processes: list[RayProcess], gcs_address: str | None = None) -> None:
        """Watch what of Ray the run stands on: its own processes, whose end explains every other one at that moment, or
        the control store of a cluster that it has joined."""
        self._ray_processes = processes
        wait = ray_lost(processes, limit_secs=self._silent_secs) if gcs_address is None else gcs_lost(gcs_address)
        self._ray_watcher = asyncio.create_task(wait, name="watch ray")

    def watch(self, name: str, actor: ActorHandle, log_path: Path, *, endless: bool) -> None:
        """Watch `actor`: through its own endless `watch`, or by repeated `ping` where it runs one call at a time."""
        coroutine = result_of(actor.watch.remote()) if endless else _ping_forever(actor)
        self._watchers[asyncio.create_task(coroutine, name=f"watch {name}")] = (name, log_path)

    def listen(self, name: str, actor: ActorHandle, log_path: Path) -> None:
        """Listen to the heart of this actor's process, from its start on."""
        self._heartbeats.listen(name, result_of(actor.heart.remote()), log_path)

    async def wait(self, awaitable: Awaitable[Any]) -> Any:
        """The result of `awaitable` (an object reference, or a coroutine over several).

        Raises RunFailed where a process died, StopRequested where the user asked for the end, else what the call
        raised.
        """
        call = asyncio.ensure_future(result_of(awaitable))
        try:
            await asyncio.wait({call, self._stop, *self._all_watchers()}, return_when=asyncio.FIRST_COMPLETED)
            if self._stop.done():
                raise StopRequested
            if call.done() and call.exception() is None:
                return call.result()
            if call.done():
                await self._give_watchers_time_to_blame()
            self.raise_if_died()
            self._raise_if_ray_is_stopped()
            return await call
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    def raise_if_died(self) -> None:
        """Raise RunFailed where a process of Ray, an actor, or a process that it owns, has died or stopped."""
        for death in (process.death() for process in self._ray_processes):
            if death is not None:
                raise RunFailed(death)
        if self._ray_watcher is not None and self._ray_watcher.done() and not self._ray_watcher.cancelled():
            raise RunFailed(self._ray_watcher.result())
        for watcher, (name, log_path) in self._watchers.items():
            if watcher.done() and not watcher.cancelled():
                self._raise_if_ray_is_stopped()
                raise RunFailed(self._obituary(name, log_path, watcher.exception()))
        if self._silence.done() and not self._silence.cancelled():
            raise RunFailed(self._silence.result())

    def _raise_if_ray_is_stopped(self) -> None:
        """A raylet that is stopped counts as dead after a while, and every actor with it."""
        for stop in (process.stop() for process in self._ray_processes):
            if stop is not None:
                raise RunFailed(stop)

    async def close(self) -> None:
        tasks = [*self._all_watchers(), self._stop]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._heartbeats.close()

    def _obituary(self, name: str, log_path: Path, error: BaseException | None) -> str:
        cause = original_error(error)
        if isinstance(cause, ProcessDied):
            return str(cause)
        if isinstance(cause, RayActorError):
            how = how_it_died(str(cause), self._heartbeats.killing_signal(name))
            return f"{self._heartbeats.full_name(name)} {how}; see {log_path}{log_tail(log_path)}"
        return f"{name} failed: {type(cause).__name__}: {cause}; see {log_path}"

    async def _give_watchers_time_to_blame(self) -> None:
        """A death is known soon. Whoever does not answer just now has most likely made the call fail: wait for it."""
        watchers = self._all_watchers()
        await asyncio.wait(watchers, timeout=_BLAME_SECS, return_when=asyncio.FIRST_COMPLETED)
        settled = asyncio.ensure_future(self._heartbeats.wait_settled())
        try:
            await asyncio.wait({settled, self._stop, *watchers}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            settled.cancel()
            await asyncio.gather(settled, return_exceptions=True)

    def _all_watchers(self) -> list[asyncio.Task[Any]]:
        ray = [self._ray_watcher] if self._ray_watcher is not None else []
        return [*self._watchers, self._silence, *ray]


async def _ping_forever(actor: ActorHandle) -> None:
    while True:
        await actor.ping.remote()
        await asyncio.sleep(_PING_SECS)


def original_error(error: BaseException | None) -> BaseException | None:
    """The exception that the actor's method raised, without Ray's wrapping."""
    return error.cause if isinstance(error, RayTaskError) and error.cause is not None else error


def how_it_died(ray_says: str, killed_by: str | None) -> str:
    """How an actor's process ended: by what Ray has done or seen, else by the signal, where one is known."""
    if "due to the node running low on memory" in ray_says or "NODE_OUT_OF_MEMORY" in ray_says:
        return "was killed by Ray, for its node ran low on memory"
    if "its node has died" in ray_says:
        return "died with its node"
    return f"was killed by {killed_by}" if killed_by else "died"
