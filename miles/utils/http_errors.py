"""How a request can fail for good. Every error says what was asked, how often and how long it was tried."""

from __future__ import annotations

from typing import Any, Self

BODY_CHARS_SHOWN = 500
_FIELDS = ("url", "method", "attempts", "elapsed", "reason", "status", "body")


class HttpRequestError(Exception):
    """A request that failed and will not be tried again.

    `url`, `method`; `attempts` that were made; `elapsed` seconds over all of them, pauses included; `status` of the
    last response, None where there was none; `body`, the beginning of that response; `reason`, the failure in words.
    """

    def __init__(
        self,
        *,
        url: str,
        method: str,
        attempts: int,
        elapsed: float,
        reason: str = "",
        status: int | None = None,
        body: str = "",
    ) -> None:
        self.url = url
        self.method = method
        self.attempts = attempts
        self.elapsed = elapsed
        self.reason = reason
        self.status = status
        self.body = body[:BODY_CHARS_SHOWN]
        super().__init__(self._message())

    def _message(self) -> str:
        what = self.reason if self.status is None else f"HTTP {self.status}"
        tries = "1 attempt" if self.attempts == 1 else f"{self.attempts} attempts"
        body = f": {self.body}" if self.body else ""
        return f"{self.method} {self.url} failed after {tries} in {self.elapsed:.1f} s: {what}{body}"

    def over(self, attempts: int, elapsed: float) -> Self:
        """The same failure as the last of more attempts than this error knows of."""
        return type(self)(**{**self._fields(), "attempts": attempts, "elapsed": elapsed})

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _FIELDS}

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self._fields())


class HttpStatusError(HttpRequestError):
    """The server answered with a status that is not 2xx."""


class HttpConnectionError(HttpRequestError, ConnectionError):
    """There was no connection, or it broke before the whole response had come."""


class HttpTimeoutError(HttpRequestError, TimeoutError):
    """The whole request took too long. It is not repeated: the server may still be working on it."""


def _rebuild(cls: type[HttpRequestError], fields: dict[str, Any]) -> HttpRequestError:
    return cls(**fields)
