"""OpenAI's error object."""

from __future__ import annotations

from typing import Any

from jaxinfer.errors import RequestError

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"


def error_object(
    message: str, *, kind: str = INVALID_REQUEST, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The inner object: message, type, param, code. `kind` is the wire's `type`."""
    return {"message": message, "type": kind, "param": param, "code": code}


def request_error_object(error: RequestError) -> dict[str, Any]:
    return error_object(str(error), param=error.param, code=error.code)


def error_body(error: dict[str, Any]) -> dict[str, Any]:
    """The whole HTTP body for an error object."""
    return {"error": error}
