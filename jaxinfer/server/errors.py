"""Every failure as OpenAI's error object, with the status that clients and routers act on.

400 the request is wrong, 401/403 the key, 404 no such route or model, 408 a body that does not come, 413 too large,
429 busy (with Retry-After), 499 is never sent, 500 our fault (nothing of it is told), 503 nothing can serve, 504 the
deadline passed.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any

from aiohttp import web

from jaxinfer.engine.service import EngineFailure
from jaxinfer.errors import JaxinferError, OverloadError, RequestError
from jaxinfer.protocol.errors import SERVER_ERROR, error_body, error_object, request_error_object
from jaxinfer.server.call import call_of

logger = logging.getLogger(__name__)

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class HTTPFailure(Exception):
    """An answer that is an error, whatever went before. retry_after: seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        kind = _KINDS.get(status, SERVER_ERROR if status >= 500 else "invalid_request_error")
        self.error = error_object(message, kind=kind, param=param, code=code)


def failure_of(error: Exception) -> HTTPFailure:
    """What to answer for an exception. What is our own fault is logged, and not told."""
    if isinstance(error, HTTPFailure):
        return error
    if isinstance(error, RequestError):
        failure = HTTPFailure(400, str(error))
        failure.error = request_error_object(error)
        return failure
    if isinstance(error, OverloadError):
        return HTTPFailure(429, str(error), code="engine_overloaded", retry_after=1)
    if isinstance(error, EngineFailure):
        logger.warning("a request failed: %s", error)
        return HTTPFailure(503, "the engine cannot serve this request now", code="engine_unavailable")
    if isinstance(error, TimeoutError):
        return HTTPFailure(504, "the request took longer than the server allows", code="timeout")
    if isinstance(error, web.HTTPException):
        status = error.status
        return HTTPFailure(status, _reason(error), code=None)
    if isinstance(error, JaxinferError):
        return HTTPFailure(400, str(error))
    logger.error("a handler failed", exc_info=error)
    return HTTPFailure(500, "internal error: the server's log says more", code="internal_error")


def error_response(failure: HTTPFailure) -> web.Response:
    headers = {} if failure.retry_after is None else {"Retry-After": str(failure.retry_after)}
    if failure.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.json_response(error_body(failure.error), status=failure.status, headers=headers)


@web.middleware
async def errors_as_json(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        response = error_response(failure_of(error))
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except ConnectionResetError:
        raise asyncio.CancelledError from None  # the client is gone: nobody is there to be answered
    except Exception as error:
        if call_of(request).head_sent:
            raise
        return error_response(failure_of(error))


def _reason(error: web.HTTPException) -> str:
    if error.status == HTTPStatus.NOT_FOUND:
        return "no such route: see /openapi.json for those there are"
    if error.status == HTTPStatus.METHOD_NOT_ALLOWED:
        return "this route takes another method"
    if error.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return "the body is larger than the server takes"
    return error.reason
