"""Control calls to one inference engine over HTTP. Nothing here is ever retried: a weight update is not idempotent.

Plain `http.client` on a new connection for each call: an update makes half a dozen calls, a connection on loopback
costs 0.2 ms, and a connection that the server closed meanwhile can never be mistaken for a refused call.
"""

from __future__ import annotations

import http.client
import json
import threading
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_SIGN_OF_LIFE_SECS = 5.0


class WeightUpdateError(RuntimeError):
    """An engine refused or failed a step of a weight update; the update is not complete.

    Attributes:
        engine_url: the engine, for example "http://127.0.0.1:30000".
        engine_urls: all engines that are at fault; `engine_url` is the first.
        endpoint: the call, for example "/update_weights_from_distributed".
        status: the HTTP status, or None where no answer came.
        body: the answer's text, or the connection error.
    """

    def __init__(self, engine_url: str, endpoint: str, status: int | None, body: str) -> None:
        self.engine_url = engine_url
        self.engine_urls: tuple[str, ...] = (engine_url,)
        self.endpoint = endpoint
        self.status = status
        self.body = body
        answer = f"answered {status}" if status is not None else "gave no answer"
        super().__init__(f"weight update: engine {engine_url} {answer} to {endpoint}: {body}")

    def naming(self, engine_urls: tuple[str, ...]) -> WeightUpdateError:
        """This error, with all engines that are at fault."""
        self.engine_urls = engine_urls
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.engine_url, self.endpoint, self.status, self.body), {"engine_urls": self.engine_urls}


class CacheFlushTimeoutError(WeightUpdateError, TimeoutError):
    """An engine could not flush its prefix cache in time, because requests kept running."""


@dataclass(frozen=True)
class EngineClient:
    """One engine's control endpoints. Blocking; call it from threads (`on_all`)."""

    url: str
    timeout_secs: float

    def post(self, endpoint: str, payload: dict[str, Any]) -> dict[str, Any]:
        """POST and return the JSON answer ({} where there is none).

        Raises:
            WeightUpdateError: any status but 200, `"success": false`, or no answer within the timeout.
        """
        status, text = self.request("POST", endpoint, payload)
        body = _json_object(text)
        if status != 200 or body.get("success") is False:
            raise WeightUpdateError(self.url, endpoint, status, text[:2000])
        return body

    def post_if_known(self, endpoint: str, payload: dict[str, Any]) -> bool:
        """Like `post`, but an engine that does not have the endpoint (404) is no error. Returns whether it has it."""
        try:
            self.post(endpoint, payload)
        except WeightUpdateError as error:
            if error.status != 404:
                raise
            return False
        return True

    def request(self, method: str, endpoint: str, payload: dict[str, Any] | None = None) -> tuple[int, str]:
        """One HTTP call; raises WeightUpdateError (status None) where the engine cannot be reached or is silent."""
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=self.timeout_secs)
        body = json.dumps(payload) if payload is not None else None
        try:
            connection.request(method, endpoint, body, {"Content-Type": "application/json"} if body else {})
            response = connection.getresponse()
            return response.status, response.read().decode("utf-8", errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise WeightUpdateError(self.url, endpoint, None, f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def spawn(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Run `function` on a daemon thread: one that hangs on a dead engine can neither block the caller nor the exit."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:  # handed over: whoever reads the future raises it
            future.set_exception(error)

    threading.Thread(target=run, name="miles-weight-update", daemon=True).start()
    return future


def on_all(engines: Sequence[EngineClient], call: Callable[[EngineClient], Any]) -> list[Any]:
    """`call` each engine side by side; results in order. The first failure is raised at once, not after the others."""
    return results([spawn(call, engine) for engine in engines])


def results(futures: Sequence[Future[Any]]) -> list[Any]:
    """Results in order, once all are done; the first exception as soon as it happens."""
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    for future in futures:
        if future in done:
            future.result()
    return [future.result() for future in futures]


def tell_all(
    engines: Sequence[EngineClient], endpoint: str, payload: dict[str, Any], timeout_secs: float = 5.0
) -> None:
    """Post to each engine side by side and wait `timeout_secs` at most; answers and failures are of no interest."""
    wait(
        [spawn(EngineClient(e.url, timeout_secs).request, "POST", endpoint, payload) for e in engines],
        timeout=timeout_secs,
    )


def silent_engines(engines: Sequence[EngineClient]) -> list[EngineClient]:
    """The engines that give no sign of life within seconds; they are asked side by side."""

    def answers(engine: EngineClient) -> bool:
        try:
            EngineClient(engine.url, min(_SIGN_OF_LIFE_SECS, engine.timeout_secs)).request("GET", "/model_info")
        except WeightUpdateError:
            return False
        return True

    return [engine for engine, alive in zip(engines, on_all(engines, answers), strict=True) if not alive]


def raise_blamed_on(
    culprits: Sequence[EngineClient],
    error: Exception | None = None,
    *,
    question: str = "/model_info",
    what: str = "no sign of life",
) -> NoReturn:
    """Raise `error` so that it names the engines at fault, not those that failed behind them.

    `question` is the call to which they gave no answer, and `what` says in words what is wrong with them.
    """
    urls = tuple(engine.url for engine in culprits)
    if isinstance(error, WeightUpdateError) and error.engine_url in urls:
        raise error.naming(urls)
    seen = f"; seen as: {error}" if error is not None else ""
    raise WeightUpdateError(urls[0], question, None, f"{what}{seen}").naming(urls) from error
