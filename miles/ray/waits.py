"""Waiting for several things at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine, Iterable


async def result_of(awaitable: Awaitable[Any]) -> Any:
    """As a coroutine, of which a task can be made: Ray's references are none."""
    return await awaitable


async def first_of(waits: Iterable[Coroutine[Any, Any, Any]], *, timeout_secs: float | None = None) -> Any:
    """The result of whichever ends first, of several that end together the first one's; the others are cancelled. None
    where none has ended in time."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_secs, return_when=asyncio.FIRST_COMPLETED)
        return next((task.result() for task in tasks if task.done()), None)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
