"""Notes each attempt at a sample for the run's trace: from when to when, on which engine, how it ended.

SampleRun -----watch-----> AttemptLog -----take-----> the driver's trace
                               ^
an engine's answer ---answered_by                     (of the attempt in whose task it was read)
"""

from __future__ import annotations

import time
from collections import deque
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from miles.utils.trace import SampleSpan

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from miles.utils.types import Sample

T = TypeVar("T")

_engines: ContextVar[dict[str, None] | None] = ContextVar("miles_attempt_engines", default=None)


class AttemptLog:
    """`limit` attempts at most, then it is blind. `clock` gives seconds since the epoch."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.time) -> None:
        self._left = limit
        self._clock = clock
        self._spans: deque[SampleSpan] = deque()

    async def watch(self, sample: Sample, evaluation: bool, attempt: Awaitable[T]) -> T:
        """Await the attempt and note it, however it ends."""
        if self._left <= 0:
            return await attempt
        self._left -= 1
        engines: dict[str, None] = {}
        token = _engines.set(engines)
        start = self._clock()
        outcome = "unknown"
        try:
            result = await attempt
            outcome = sample.status.value
            return result
        except BaseException as error:
            outcome = type(error).__name__
            raise
        finally:
            _engines.reset(token)
            self._spans.append(
                SampleSpan(
                    sample.index,
                    sample.group_index,
                    start,
                    self._clock(),
                    outcome,
                    sample.response_length,
                    tuple(engines),
                    evaluation,
                )
            )

    def take(self) -> list[SampleSpan]:
        """The attempts that have ended since the last call; from any thread."""
        return [self._spans.popleft() for _ in range(len(self._spans))]


def answered_by(meta_info: dict[str, Any]) -> None:
    """An engine has answered: note which one, where somebody wants to know and the engine says it."""
    engines = _engines.get()
    if engines is not None and (url := meta_info.get("engine_url")):
        engines[url] = None
