"""Reads a request's JSON body within limits."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from aiohttp import web

from jaxinfer.errors import RequestError
from jaxinfer.protocol.strict_json import parse_json
from jaxinfer.server.context import CONTEXT
from jaxinfer.server.errors import HTTPFailure

_NOT_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"?|[^][{}"]+', re.DOTALL)


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
    limit = config.max_json_depth
    if content.count(b"[") + content.count(b"{") > limit and _depth(content) > limit:
        raise RequestError(f"the body is nested more than {limit} deep", code="invalid_json")
    return parse_json(content)


def _depth(content: bytes) -> int:
    """How deeply brackets nest at most, those inside strings left out; found before anything recursive sees them."""
    depth = deepest = 0
    for bracket in _NOT_BRACKETS.sub(b"", content):
        if bracket in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        else:
            depth -= 1
    return deepest
