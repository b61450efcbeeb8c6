"""Ending requests on the engines. Control calls go to every engine: a router forwards them to one, or to none."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from miles.rollout.generate_utils.generate_endpoint_utils import router_url
from miles.utils.http_utils import HttpRequestError, get, post

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Awaitable, Callable, Sequence

logger = logging.getLogger(__name__)

ABORT_TIMEOUT_SECS = 5.0
"""Seconds for ending the requests of one attempt, all engines together."""


async def get_worker_urls(args: Namespace, ask: Callable[[str], Awaitable[Any]] | None = None) -> list[str]:
    """The addresses of the engines behind the router, each once ("@rank" suffixes of data-parallel ranks removed).

    `ask(url)` is the HTTP GET, that of `http_utils` by default.
    """
    ask = ask or get
    if getattr(args, "use_miles_router", False):
        urls = (await ask(router_url(args, "/list_workers")))["urls"]
    else:
        urls = [worker["url"] for worker in (await ask(router_url(args, "/workers")))["workers"]]
    return list(dict.fromkeys(url.rpartition("@")[0] or url for url in urls))


async def abort_requests(args: Namespace, request_ids: Sequence[str]) -> None:
    """Ask every engine to end these requests. Best effort, in ABORT_TIMEOUT_SECS at most: failures are logged.

    Their connections are closed already, which ends most of them; this is for those whose engine has not noticed.
    """
    if not request_ids:
        return
    try:
        async with asyncio.timeout(ABORT_TIMEOUT_SECS):
            urls = await get_worker_urls(args)
            results = await asyncio.gather(
                *(post(f"{url}/abort_request", {"rid": rid}, max_retries=0) for url in urls for rid in request_ids),
                return_exceptions=True,
            )
    except TimeoutError:
        logger.warning("engines did not take an abort request within %g s", ABORT_TIMEOUT_SECS)
        return
    except HttpRequestError as error:
        logger.warning("the router did not list its engines for an abort: %s", error)
        return
    for result in results:
        if isinstance(result, HttpRequestError):
            logger.warning("an engine did not take an abort request: %s", result)
        elif isinstance(result, BaseException):
            raise result
