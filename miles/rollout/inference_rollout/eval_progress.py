"""Whether an evaluation on the engines of training still gets somewhere: a sample is finished now and then.

nothing for 30 s                      a warning with numbers, again every 30 s
nothing for --no-progress-timeout     (with --fully-async) the evaluation is ended, and NoProgress says where it stood
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from miles.rollout._fully_async_errors import NoProgress
from miles.rollout._fully_async_patience import Patience
from miles.rollout.inference_rollout.engine_aborts import known_worker_urls
from miles.utils.http_utils import get

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Coroutine, Iterator

    from miles.utils.types import Sample

logger = logging.getLogger(__name__)

T = TypeVar("T")

WARN_SECS = 30.0
GRACE_SECS = 5.0
"""An evaluation that is ended may take so long to clean up; then it is left behind."""
_ROUTER_SECS = 2.0
_LISTED = 20


class EvalProgress:
    """Of one evaluation. `limit`: seconds without a finished sample after which it is ended; None: never."""

    def __init__(self, limit: float | None = None) -> None:
        self._limit = limit
        self._patience: Patience | None = None
        self._open: defaultdict[str, dict[int | None, None]] = defaultdict(dict)  # data set -> its samples, in order
        self._finished = 0

    @classmethod
    def from_args(cls, args: Namespace) -> EvalProgress:
        fully_async = getattr(args, "fully_async", False)
        return cls(getattr(args, "no_progress_timeout", None) if fully_async else None)

    @contextmanager
    def of(self, data_set: str, sample: Sample) -> Iterator[None]:
        """The block answers this sample."""
        self._open[data_set][sample.index] = None
        self._renew()  # whoever reads a large data set lets nobody else have a turn
        yield
        del self._open[data_set][sample.index]  # not where it fails: it stays among those that are listed
        self._finished += 1
        self._renew()

    async def watch(self, evaluating: Coroutine[Any, Any, T], args: Namespace) -> T:
        """What `evaluating` returns. Raises NoProgress where it stands still for too long."""
        now = asyncio.get_running_loop().time
        self._patience = patience = Patience(now(), warn_every=WARN_SECS, limit=self._limit)
        task = asyncio.create_task(evaluating, name="evaluation")
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=patience.next_look(now()))
                if not task.done():
                    await self._look(patience, now(), args)
            return task.result()
        finally:
            await _end(task)

    def _renew(self) -> None:
        if self._patience is not None:
            self._patience.renew(asyncio.get_running_loop().time())

    async def _look(self, patience: Patience, now: float, args: Namespace) -> None:
        waited = patience.waited(now)
        if patience.is_over(now):
            raise await self._no_progress(waited, args)
        if patience.should_warn(now) and waited >= WARN_SECS:
            logger.warning("evaluation: no finished sample for %.0f s, %s", waited, "; ".join(self._lines()))

    async def _no_progress(self, waited: float, args: Namespace) -> NoProgress:
        head, *lines = self._lines()
        engines = await known_worker_urls(args, get, _ROUTER_SECS)
        return NoProgress(
            "\n  ".join(
                [
                    f"evaluation: no finished sample for {waited:.0f} s, the limit of --no-progress-timeout; {head}",
                    *lines,
                    f"engines behind the router: {', '.join(engines) or 'not known'}",
                ]
            )
        )

    def _lines(self) -> list[str]:
        total = self._finished + sum(map(len, self._open.values()))
        return [f"{self._finished} of {total} are finished", *(_listed(*entry) for entry in self._open.items())]


def _listed(data_set: str, samples: dict[int | None, None]) -> str:
    first = ", ".join(map(str, list(samples)[:_LISTED]))
    more = f" and {len(samples) - _LISTED} more" if len(samples) > _LISTED else ""
    return f"data set {data_set} waits for samples {first}{more}" if samples else f"data set {data_set} is finished"


async def _end(task: asyncio.Task[Any]) -> None:
    if task.done():
        return
    task.cancel()
    _, left = await asyncio.wait({task}, timeout=GRACE_SECS)
    if left:
        logger.error("an evaluation still runs %g s after it was cancelled; it is left behind", GRACE_SECS)
    elif not task.cancelled():
        task.exception()  # how it ended after its cancellation is of no interest
