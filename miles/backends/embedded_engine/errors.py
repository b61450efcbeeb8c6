"""User mistakes, each with the HTTP body that SGLang's clients expect for it."""

from __future__ import annotations

from typing import Any


class RequestError(ValueError):
    """A request that cannot be served; the server lives on. Body: `{"error": {"message": ...}}`."""

    status = 400

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self)}}


class MalformedBody(RequestError):
    """The body breaks the schema (bad JSON, missing or mistyped field); the body is OpenAI-shaped."""

    @property
    def body(self) -> dict[str, Any]:
        return {"object": "error", "message": str(self), "type": "Bad Request", "param": None, "code": self.status}


class UnsupportedField(RequestError):
    """A sampling field that this engine does not have; `error` is a plain string."""

    @property
    def body(self) -> dict[str, Any]:
        return {"error": str(self)}


class Unavailable(RequestError):
    """The engine is loading, full, or ending: try again or elsewhere."""

    status = 503


class ControlError(ValueError):
    """A weight or flow-control call that was refused. Body: `{"success": false, "message": ...}`, status 400."""
