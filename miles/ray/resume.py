"""Which checkpoint set a run goes on from, and what of it the rollout side takes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from miles.utils.checkpoint_set import newest_readable
from miles.utils.console import print_note

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def choose_checkpoint(load: str | None) -> str | None:
    """The set in `--load` that trainer and rollout side go on from; None where there is none."""
    if not load:
        return None
    chosen = await _in_daemon_thread(newest_readable, load)
    if chosen is None:
        print_note(f"--load {load} holds no checkpoint of a run: starting from its beginning")
        return None
    print_note(f"resuming from {chosen}")
    return str(chosen)


def rollout_part(checkpoint: str | None, *, start: int, resumed_at: int) -> str | None:
    """The set whose rollout part a run uses that starts with rollout `start`, where the trainer's part of `checkpoint`
    goes on with `resumed_at`."""
    if checkpoint is None or start == resumed_at:
        return checkpoint
    logger.warning(
        "--start-rollout-id %d is not the loaded checkpoint's %d: its rollout part is left out, and prompts go on from "
        "what the data source itself has kept, or else start from the beginning",
        start,
        resumed_at,
    )
    return None


async def _in_daemon_thread(function: Callable[..., T], *args: Any) -> T:
    """Like `asyncio.to_thread`, but the program's end does not wait for the thread: a stop must not take as long as
    reading a large checkpoint does."""
    loop = asyncio.get_running_loop()
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def call() -> None:
        try:
            outcome.set_result(function(*args))
        except BaseException as error:  # whatever it is, it is the outcome
            outcome.set_exception(error)

    threading.Thread(target=call, name=function.__name__, daemon=True).start()
    return await asyncio.wrap_future(outcome, loop=loop)
