from __future__ import annotations

import logging

import pytest
from aiohttp.http_exceptions import BadHttpMessage, BadStatusLine

from miles.backends.embedded_engine.process import is_no_probe


def record(error: Exception | None) -> logging.LogRecord:
    info = None if error is None else (type(error), error, None)
    return logging.LogRecord("aiohttp.server", logging.ERROR, "file", 1, "Error handling request", None, info)


@pytest.mark.parametrize(
    "error", [BadHttpMessage("Pause on PRI/Upgrade"), BadStatusLine("PRI * HTTP/2.0"), BadHttpMessage("Upgrade")]
)
def test_the_routers_http2_probe_is_not_logged(error: Exception) -> None:
    assert not is_no_probe(record(error))


@pytest.mark.parametrize("error", [None, ValueError("PRI"), BadHttpMessage("nonsense")])
def test_everything_else_is_logged(error: Exception | None) -> None:
    assert is_no_probe(record(error))
