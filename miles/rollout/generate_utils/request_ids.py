"""Ids for the requests of one attempt at a sample, so that an attempt that is given up can be ended on the engines.

    with request_ids() as ids:         the attempt: every payload that is built inside gets an id, and `ids` holds it
        ...
    await abort_requests(args, ids)    inference_rollout/engine_aborts.py

Outside of such a block payloads carry no id. Whoever needs none should send none: by its id an engine refuses a
request that is sent again while it still works on the first one.
"""

from __future__ import annotations

import uuid
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_ids: ContextVar[list[str] | None] = ContextVar("miles_request_ids", default=None)


@contextmanager
def request_ids() -> Iterator[list[str]]:
    """The ids of the payloads that are built in this block, and in the tasks that it starts."""
    ids: list[str] = []
    token = _ids.set(ids)
    try:
        yield ids
    finally:
        _ids.reset(token)


def with_request_id(payload: dict[str, Any]) -> dict[str, Any]:
    """`payload`, with an id of its own under `rid` where a block collects them."""
    ids = _ids.get()
    if ids is None:
        return payload
    ids.append(uuid.uuid4().hex)
    return {**payload, "rid": ids[-1]}
