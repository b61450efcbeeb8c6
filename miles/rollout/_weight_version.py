"""The weight version that the engines report, kept for a while."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)


class CachedWeightVersion:
    """A weight version that is asked for at most once in `ttl` seconds.

    The time counts from the end of a query, however that ended, so that a router that is down or slow is not asked more
    often than one that works. After a failure the last good version is used; None as long as there was none.
    """

    def __init__(self, ttl: float) -> None:
        self.ttl = ttl
        self._version: int | None = None
        self._queried_at: float | None = None
        self._failing = False
        self._query_in_progress = asyncio.Lock()

    async def read(self, query: Callable[[], Awaitable[Any]], source: str) -> int | None:
        """The version, from `query` (the model info that `source` answers with) where the last one is too old.

        Never raises for what the server does or answers; a cancellation goes through.
        """
        loop = asyncio.get_running_loop()
        async with self._query_in_progress:
            if self._queried_at is None or loop.time() - self._queried_at >= self.ttl:
                try:
                    await self._refresh(query, source)
                finally:
                    self._queried_at = loop.time()
            return self._version

    async def _refresh(self, query: Callable[[], Awaitable[Any]], source: str) -> None:
        try:
            self._version = parse_weight_version(await query())
        # The one place where failing to learn the version becomes data. Broad, because what it is depends on the HTTP
        # library and on the answer: a connection error, a timeout, no JSON, no such key, not a number.
        except Exception as error:
            if not self._failing:
                logger.warning(
                    "%s does not tell the weight version: %r. Staleness is measured against the last known one (%s) "
                    "until it does.",
                    source,
                    error,
                    self._version,
                )
            self._failing = True
        else:
            self._failing = False


async def query_model_info(get: Callable[[str], Awaitable[Any]], router: str) -> Any:
    """`/get_model_info`, which sglang-router and engines serve; `/model_info` only where that path is unknown (404)."""
    try:
        return await get(f"{router}/get_model_info")
    except Exception as error:
        if http_status(error) != 404:
            raise
    return await get(f"{router}/model_info")


def http_status(error: Exception) -> int | None:
    """The HTTP status in an exception of our client or aiohttp (`status`), or of httpx (`response.status_code`)."""
    status: int | None = getattr(error, "status", None)
    return status if status is not None else getattr(getattr(error, "response", None), "status_code", None)


def parse_weight_version(model_info: Any) -> int:
    """The number in `{"weight_version": "7"}`. Raises KeyError, TypeError or ValueError where there is none."""
    version = model_info["weight_version"]
    if isinstance(version, int) and not isinstance(version, bool):
        return version
    if isinstance(version, str) and version.isascii() and version.isdigit():
        return int(version)
    raise ValueError(f"weight version {version!r} is not a whole number")
