"""Whether an engine whose process lives still works.

    generates?  GET /health_generate is 200 in time
    accepts?    a request of one token is not answered with an error
    answers?    any HTTP answer in time: all that can be asked of an engine that is paused for a weight update, for then
                SGLang's /health hangs

That request of one token may wait in a full queue for longer than any probe should take, so its silence says nothing.
/health_generate needs no turn: it is good as soon as the engine has generated anything since it was asked. An error or
a refused connection counts when a second look confirms it; silence has been waited for already.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miles.utils.http_utils import HttpRequestError, HttpStatusError, get, post

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Awaitable, Callable

SECOND_LOOK_SECS = 0.2
_ONE_TOKEN = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}


@dataclass(frozen=True)
class HealthConfig:
    """When engines are looked at, in seconds."""

    interval_secs: float
    timeout_secs: float
    first_wait_secs: float
    """From an engine's start to the first look at it, in addition to the interval."""

    @staticmethod
    def from_args(args: Namespace) -> HealthConfig:
        return HealthConfig(
            interval_secs=args.rollout_health_check_interval,
            timeout_secs=args.rollout_health_check_timeout,
            first_wait_secs=args.rollout_health_check_first_wait,
        )


class EngineHealth:
    """Asks engines over HTTP. Each question returns what is wrong, in words, or None. The first two are for an engine
    that nothing has paused."""

    def __init__(self, timeout_secs: float) -> None:
        self._timeout_secs = timeout_secs

    async def fails_to_generate(self, url: str, patience_secs: float | None = None) -> str | None:
        """`patience_secs`: what is left of the timeout, where the engine was silent already before a pause."""
        patience_secs = self._timeout_secs if patience_secs is None else patience_secs
        try:
            return await _confirmed(lambda: _in_time(get(f"{url}/health_generate"), patience_secs))
        except TimeoutError:
            return f"has generated nothing for {self._timeout_secs:g} s"

    async def fails_requests(self, url: str) -> str | None:
        return await _confirmed(lambda: self._token_error(url))

    async def fails_to_answer(self, url: str) -> str | None:
        try:
            async with asyncio.timeout(self._timeout_secs):
                await get(f"{url}/model_info")
        except TimeoutError:
            return f"has not answered for {self._timeout_secs:g} s"
        except HttpRequestError as error:
            return None if isinstance(error, HttpStatusError) else f"gives no answer: {error.reason}"
        return None

    async def _token_error(self, url: str) -> str | None:
        try:
            return await _in_time(post(f"{url}/generate", _ONE_TOKEN, max_retries=0), self._timeout_secs)
        except TimeoutError:
            return None


async def _confirmed(look: Callable[[], Awaitable[str | None]]) -> str | None:
    """What a second look finds as well."""
    if await look() is None:
        return None
    await asyncio.sleep(SECOND_LOOK_SECS)
    return await look()


async def _in_time(request: Awaitable[Any], timeout_secs: float) -> str | None:
    """Raises TimeoutError where the engine is silent."""
    async with asyncio.timeout(timeout_secs):
        return await _failure(request)


async def _failure(request: Awaitable[Any]) -> str | None:
    """What is wrong with the engine that answers like this. That it lacks an endpoint is nothing."""
    try:
        await request
    except HttpStatusError as error:
        status = error.status or 0
        return f"answers {error.method} {error.url} with HTTP {status}" if status >= 500 else None
    except HttpRequestError as error:
        if isinstance(error, TimeoutError):
            raise TimeoutError from error
        return f"gives no answer to {error.method} {error.url}: {error.reason}"
    return None
