"""The HTTP application: SGLang's routes over one engine thread."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from miles.backends.embedded_engine.control_routes import ControlRoutes
from miles.backends.embedded_engine.errors import ControlError, MalformedBody, RequestError, Unavailable
from miles.backends.embedded_engine.generate_body import parse_generate_body
from miles.backends.embedded_engine.info_routes import InfoRoutes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from miles.backends.embedded_engine.service import EngineService

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 256 * 1024**2
CLIENT_CLOSED_REQUEST = 499
JSON_HEADERS = {"Content-Type": "application/json"}


def make_app(service: EngineService) -> web.Application:
    """The application; `service` is started and closed by the caller."""
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors_as_json])
    generate = GenerateRoute(service).handle
    app.router.add_post("/generate", generate)
    app.router.add_put("/generate", generate)
    InfoRoutes(service).add_to(app)
    ControlRoutes(service).add_to(app)
    return app


class GenerateRoute:
    """POST|PUT /generate."""

    def __init__(self, service: EngineService) -> None:
        self._service = service

    async def handle(self, request: web.Request) -> web.StreamResponse:
        service = self._service
        loaded = service.loaded
        body = parse_generate_body(
            parse_json(await request.read()), loaded.limits, loaded.tokenizer, service.frontend.next_seed
        )
        answer = service.frontend.submit(service.engine, body, loaded.tokenizer)
        try:
            if body.stream:
                return await _stream(request, answer.chunks())
            return json_response(await answer.json())
        finally:
            # Also reached by cancellation: aiohttp cancels the handler when the client has gone.
            service.frontend.forget(service.engine, answer)


async def _stream(request: web.Request, chunks: Any) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    try:
        async for chunk in chunks:
            await response.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
    except Unavailable as error:
        # The status line is out already: the error has to travel in the stream.
        detail = {"message": str(error), "type": "invalid_request_error", "code": error.status, "retryable": False}
        await response.write(b"data: " + orjson.dumps({"error": detail}) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def parse_json(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise MalformedBody(f"The request body is not valid JSON: {error}") from error


def json_response(content: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(content), status=status, headers=JSON_HEADERS)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The one place where failures become responses; anything unforeseen is a 500, and logged."""
    try:
        return await handler(request)
    except RequestError as error:
        return json_response(error.body, error.status)
    except ControlError as error:
        return json_response({"success": False, "message": str(error)}, 400)
    except web.HTTPException as error:
        return json_response({"detail": error.reason}, error.status)
    except Exception as error:
        if isinstance(error, OSError) and _is_gone(request):
            # Raised on, it would be logged with a traceback; the response goes nowhere.
            return web.Response(status=CLIENT_CLOSED_REQUEST)
        logger.exception("%s %s failed", request.method, request.path)
        return json_response({"detail": "Internal Server Error"}, 500)


def _is_gone(request: web.Request) -> bool:
    """Whether the client has hung up: there is nobody to answer."""
    return request.transport is None or request.transport.is_closing()
