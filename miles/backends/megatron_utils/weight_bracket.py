"""pause -> flush caches -> begin ... end -> continue, on all engines, with what is open remembered."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from miles.backends.megatron_utils.engine_client import (
    CacheFlushTimeoutError,
    EngineClient,
    WeightUpdateError,
    on_all,
    tell_all,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)

PAUSE_MODES = ("abort", "retract", "in_place")
"""abort: running requests end; retract: they resume with a recomputed cache; in_place: they keep their cache."""


class Bracket:
    """Open it when the first bucket is ready, and set `weights_touched` before it is sent."""

    def __init__(
        self, engines: Sequence[EngineClient], *, pause_mode: str, flush_timeout_secs: float, announced: bool = True
    ) -> None:
        """`announced`: with begin and end, which only updates that come in buckets have."""
        self._engines = list(engines)
        self._pause_mode = pause_mode
        self._flush_timeout_secs = flush_timeout_secs
        self._announced = announced
        self._paused = False
        self._begun = False
        self._pause_start = 0.0
        self.weights_touched = False
        self.paused_seconds = 0.0

    def open(self) -> None:
        """Also for engines that an update that failed has left paused, or within an open bracket."""
        self._pause_start = time.perf_counter()
        self._paused = True
        on_all(self._engines, lambda e: e.post("/pause_generation", {"mode": self._pause_mode}))
        if self._pause_mode != "in_place":
            on_all(self._engines, self._flush)
        if self._announced:
            self._begun = True
            on_all(self._engines, _begin_anew)

    def close(self) -> None:
        if self._announced:
            on_all(self._engines, lambda e: e.post_if_known("/end_weight_update", {}))
            self._begun = False
        on_all(self._engines, lambda e: e.post("/continue_generation", {}))
        self._paused = False
        self.paused_seconds = time.perf_counter() - self._pause_start

    def abandon(self, engines: Sequence[EngineClient]) -> None:
        """After a failure: undo what can be undone on the engines that still answer. Never raises."""
        if self.weights_touched:
            logger.error("weight update failed after its first bucket: the engines stay paused with mixed weights")
            return
        if self._begun:
            tell_all(engines, "/end_weight_update", {})
        if self._paused:
            tell_all(engines, "/continue_generation", {})

    def _flush(self, engine: EngineClient) -> None:
        """Flush the prefix cache, which would serve old weights; an engine refuses while requests still wind down."""
        deadline = time.monotonic() + self._flush_timeout_secs
        pause = 0.02
        while True:
            status, text = engine.request("GET", "/flush_cache")
            if status == 200:
                return
            if status != 400 or time.monotonic() + pause > deadline:
                timed_out = status == 400
                kind = CacheFlushTimeoutError if timed_out else WeightUpdateError
                limit = f"no flush within {self._flush_timeout_secs:g} s; " if timed_out else ""
                raise kind(engine.url, "/flush_cache", status, limit + text.strip())
            time.sleep(pause)
            pause = min(1.0, pause * 2)


def _begin_anew(engine: EngineClient) -> None:
    """Begin; where that is refused because an update that failed was never ended, end that one first.

    What it left is a mixture, but the engine is paused, and every weight is about to be sent again.
    """
    try:
        engine.post_if_known("/begin_weight_update", {"selector": "all"})
    except WeightUpdateError as refused:
        if refused.status != 400:
            raise
        try:
            engine.post("/end_weight_update", {})
        except WeightUpdateError:
            raise refused from None  # no bracket was open: that was not the reason
        engine.post("/begin_weight_update", {"selector": "all"})
