"""Listens to the processes of a run from the driver, and says when one has stopped without dying.

    each process   consumes   answers to looks, one every few seconds
                   waits for  its address, then the next look
                   produces   what `Silence` decides by; the first one that is lost ends `wait_lost`

A rank that waits in a collective for a rank that is stopped goes on answering: only the latter is named.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray.exceptions import RayError

from miles.ray.silence import Silence
from miles.utils.heartbeat import CannotAsk, hears
from miles.utils.process_state import ExitWatch, how_stopped
from miles.utils.processes import log_tail

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from pathlib import Path

    from miles.utils.heartbeat import Heart

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Known:
    heart: Heart
    log_path: Path
    exit: ExitWatch | None
    """None where the process ids of its machine are others than ours."""

    @property
    def who(self) -> str:
        return f"pid {self.heart.pid} on {self.heart.node}"


class Heartbeats:
    """See the module docstring. `limit_secs`: so long may a process be silent."""

    def __init__(self, limit_secs: float) -> None:
        self._silence = Silence(limit_secs)
        self._known: dict[str, _Known] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._looked = asyncio.Condition()

    def listen(self, name: str, heart: Awaitable[Heart], log_path: Path) -> None:
        """Listen to this process once its address is there."""
        self._tasks.append(asyncio.create_task(self._listen(name, heart, log_path), name=f"listen to {name}"))

    async def wait_lost(self) -> str:
        """Wait until a process is lost; says which, and how."""
        async with self._looked:
            await self._looked.wait_for(self._silence.lost)
        return self.obituary()

    async def wait_settled(self) -> None:
        """Return once every process has answered, or one is lost."""
        async with self._looked:
            await self._looked.wait_for(lambda: self._silence.lost() or not self._silence.suspects())

    def obituary(self) -> str:
        """The most silent process with its node and its log, and who else is silent."""
        first, *others = self._silence.suspects()
        known = self._known[first]
        how = how_stopped(known.heart.pid) if known.exit is not None else None
        also = "".join(f"\n    also silent: {self.full_name(name)}" for name in others)
        return (
            f"{self.full_name(first)} has not answered for {self._silence.limit_secs:g} s (--heartbeat-timeout-secs): "
            f"{how or 'it is stopped, hangs, or its machine is out of reach'}; see {known.log_path}"
            f"{log_tail(known.log_path)}{also}"
        )

    def killing_signal(self, name: str) -> str | None:
        """The signal that has ended this process, which was just seen to die; None where that cannot be known."""
        known = self._known.get(name)
        return known.exit.signal() if known is not None and known.exit is not None else None

    def full_name(self, name: str) -> str:
        """With its process id and its node, where they are known."""
        return f"{name} ({self._known[name].who})" if name in self._known else name

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for known in self._known.values():
            if known.exit is not None:
                known.exit.close()

    async def _listen(self, name: str, heart: Awaitable[Heart], log_path: Path) -> None:
        with contextlib.suppress(RayError):  # it died, or could not be made: whoever watches it tells
            address = await heart
            exit = ExitWatch(address.pid) if address.is_in_our_pid_space else None
            self._known[name] = _Known(address, log_path, exit)
            await self._look_for_ever(name, address)

    async def _look_for_ever(self, name: str, heart: Heart) -> None:
        silence, clock = self._silence, asyncio.get_running_loop().time
        silence.begin(name, clock())
        is_told = was_heard = False
        while True:
            began = clock()
            try:
                heard = await hears(heart, timeout_secs=silence.look_secs)
            except ConnectionRefusedError:  # its watcher tells, or the call that it has failed
                if not was_heard:  # or a firewall refuses in its place
                    _warn_of_firewall(name, heart)
                await self._forget(name)
                return
            except CannotAsk as error:  # nobody has listened: such time does not count
                logger.warning("%s could not be asked for a heartbeat: %s", name, error)
                await asyncio.sleep(silence.look_secs)
                continue
            was_heard |= heard
            async with self._looked:
                silence.learn(name, heard=heard, now=clock())
                self._looked.notify_all()
            if silence.never_heard(name) and not is_told:
                is_told = True
                _warn_of_firewall(name, heart)
            await asyncio.sleep(max(0.0, silence.look_secs - (clock() - began)))

    async def _forget(self, name: str) -> None:
        async with self._looked:
            self._silence.forget(name)
            self._looked.notify_all()


def _warn_of_firewall(name: str, heart: Heart) -> None:
    logger.warning(
        "%s never answered at %s:%d: that it has stopped would not be noticed. A firewall between the nodes must let "
        "heartbeats through",
        *(name, heart.host, heart.port),
    )
