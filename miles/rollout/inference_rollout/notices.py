"""Warnings about what may happen to thousands of samples at once: one line in a while, with how many others."""

from __future__ import annotations

import asyncio
import logging

logger = logging.getLogger(__name__)

NOTICE_INTERVAL_SECS = 10.0


class Notices:
    """Logs the first event at once, and after that one in NOTICE_INTERVAL_SECS (loop time)."""

    def __init__(self) -> None:
        self._unlogged = 0
        self._last: float | None = None

    def note(self, what: str, why: str) -> None:
        now = asyncio.get_running_loop().time()
        if self._last is not None and now - self._last < NOTICE_INTERVAL_SECS:
            self._unlogged += 1
            return
        others = f" ({self._unlogged} more events of this kind since the last notice)" if self._unlogged else ""
        logger.warning("%s: %s%s", what, why, others)
        self._unlogged, self._last = 0, now
