"""A resource that belongs to one event loop: opened by its first use there, closed when that loop shuts down."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

T = TypeVar("T")


class LoopBound(Generic[T]):
    """One resource for each event loop that asks for it; no two loops ever share one.

    Closing rides on the loop itself: the resource's lifetime is an async generator, and every orderly end of a loop
    (`asyncio.run`, `asyncio.Runner`, `AsyncLoopThread.close`) closes the generators that were started on it, after
    it has cancelled the tasks. A forked child never touches what its parent opened.
    """

    def __init__(self, open_: Callable[[], T], close: Callable[[T], Awaitable[None]]) -> None:
        """`open_` is called on the loop and does not wait; `close` is awaited there, once."""
        self._open = open_
        self._close = close
        self._pid = os.getpid()
        self._inherited: list[object] = []
        self._resources: dict[asyncio.AbstractEventLoop, T] = {}
        self._lifetimes: dict[asyncio.AbstractEventLoop, AsyncGenerator[T, None]] = {}

    def peek(self) -> T | None:
        """The running loop's resource, or None where it has not been opened."""
        return self._resources.get(asyncio.get_running_loop())

    async def get(self) -> T:
        """The running loop's resource, opened by the first call."""
        if self._pid != os.getpid():
            self._forget_the_parents()
        loop = asyncio.get_running_loop()
        if loop not in self._resources:
            self._drop_dead_loops()
            self._lifetimes[loop] = lifetime = self._lifetime(loop)
            return await anext(lifetime)  # runs without waiting up to the yield
        return self._resources[loop]

    async def close(self) -> None:
        """Close the running loop's resource, if it is open. The next `get()` opens another."""
        lifetime = self._lifetimes.get(asyncio.get_running_loop())
        if lifetime is not None:
            await lifetime.aclose()

    async def _lifetime(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[T, None]:
        resource = self._resources[loop] = self._open()
        try:
            yield resource
        finally:
            self._resources.pop(loop, None)
            self._lifetimes.pop(loop, None)
            await self._close(resource)

    def _drop_dead_loops(self) -> None:
        for loop in [loop for loop in self._resources if loop.is_closed()]:
            del self._resources[loop], self._lifetimes[loop]

    def _forget_the_parents(self) -> None:
        self._inherited += [self._resources, self._lifetimes]
        self._pid = os.getpid()
        self._resources, self._lifetimes = {}, {}
