"""A gate in front of the submission of new work: evaluation on shared engines closes it for as long as it runs.

    evaluation --pause--> [closed] --resume--> [open]        counted: open again when the last one has resumed
                             |
    worker ---wait_open------+--> submits the next group

What is in flight already goes on: nothing is aborted, finished groups are queued as always.
"""

from __future__ import annotations

import asyncio
import inspect
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from miles.utils.async_utils import run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator


class SubmissionGate:
    """Open unless somebody holds it closed. Used from one event loop only; may be built outside of it."""

    def __init__(self) -> None:
        self._holders = 0
        self._opened = asyncio.Event()
        self._opened.set()

    @property
    def is_open(self) -> bool:
        return self._holders == 0

    def pause(self) -> None:
        """Close the gate; each call needs one `resume` of its own."""
        self._holders += 1
        self._opened.clear()

    def resume(self) -> None:
        """Undo one `pause`. Raises RuntimeError where none is left."""
        if self._holders == 0:
            raise RuntimeError("submission is resumed more often than it was paused")
        self._holders -= 1
        if self._holders == 0:
            self._opened.set()

    async def wait_open(self) -> None:
        """Until the gate is open. Nobody can close it between the return and the caller's next await."""
        while self._holders:
            await self._opened.wait()


class PausableSubmission:
    """Mixin of a rollout function whose worker waits at `submission_gate` before it takes new work."""

    submission_gate: SubmissionGate

    def pause_submission(self) -> None:
        """Submit no new group from now on. Call on the rollout loop, once for each `resume_submission`."""
        self.submission_gate.pause()

    def resume_submission(self) -> None:
        """Undo one `pause_submission`. Call on the rollout loop."""
        self.submission_gate.resume()

    @asynccontextmanager
    async def submission_paused(self) -> AsyncIterator[None]:
        """No new group is submitted within the block, which may be nested; however it ends, submission goes on."""
        self.pause_submission()
        try:
            yield
        finally:
            self.resume_submission()


def can_pause(fn: Any) -> bool:
    """Whether the rollout function `fn` generates all the time and can be asked to submit nothing new."""
    return hasattr(fn, "pause_submission") and hasattr(fn, "resume_submission")


@contextmanager
def submission_paused_from_outside(fn: Any) -> Iterator[None]:
    """`fn.submission_paused()` for a thread that is not the rollout loop's.

    Nothing happens where `fn` cannot pause. The thread cannot be cancelled, so submission goes on whatever becomes of
    whoever waits for it.
    """
    if not can_pause(fn):
        yield
        return
    run(_call(fn.pause_submission))
    try:
        yield
    finally:
        run(_call(fn.resume_submission))


async def _call(method: Callable[[], Any]) -> None:
    result = method()
    if inspect.isawaitable(result):
        await result
