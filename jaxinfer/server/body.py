"""Reads a request's JSON body within limits."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from jaxinfer.errors import RequestError
from jaxinfer.protocol.strict_json import check_shape, parse_json
from jaxinfer.server.context import CONTEXT
from jaxinfer.server.errors import HTTPFailure

_LARGE = 2**18  # bytes; longer bodies are read off the event loop


async def read_json(request: web.Request) -> Any:
    """The body as JSON.

    Raises:
      HTTPFailure: 415 for another media type, 413 for too many bytes, 408 when they take too long to come.
      RequestError: not JSON, nested too deeply, or not encoded as the headers say.
    """
    config = request.app[CONTEXT].config
    kind = request.content_type
    if request.headers.get("Content-Type") and kind != "application/json" and not kind.endswith("+json"):
        raise HTTPFailure(415, f"the body must be application/json, not {kind[:80]}")
    if (request.content_length or 0) > config.max_body_bytes:  # said before it is sent
        raise web.HTTPRequestEntityTooLarge(config.max_body_bytes, request.content_length or 0)
    try:
        async with asyncio.timeout(config.request_timeout_s):
            content = await request.read()  # aiohttp refuses more than the application's client_max_size
    except TimeoutError:
        raise HTTPFailure(
            408, f"the body took more than {config.request_timeout_s:g} s to come", code="timeout"
        ) from None
    except web.RequestPayloadError:
        raise RequestError("the body is not encoded as its headers say", code="invalid_body") from None
    if not content:
        raise RequestError("the body is empty: send a JSON object", code="invalid_json")

    def parse() -> Any:
        check_shape(content, config.max_json_depth, config.max_json_values)
        return parse_json(content)

    if len(content) < _LARGE:
        return parse()
    return await request.app[CONTEXT].in_worker(parse, "reading the body")
