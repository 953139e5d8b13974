"""What the server keeps about one HTTP request while it is answered."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

import jaxinfer
from jaxinfer.engine.service import RequestStream

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(slots=True)
class Call:
    """One HTTP request.

    Attributes:
      id: the client's x-request-id where it is a sane one, else a new one; answers carry it back.
      headers: for the answer, whichever handler makes it.
      note: what the request's line in the log says beside the usual.
      streams: its requests in the engine, once they have been submitted.
      head_sent: a streamed answer has begun, so that no error response can follow.
    """

    id: str
    headers: dict[str, str] = field(default_factory=dict)
    note: dict[str, Any] = field(default_factory=dict)
    streams: list[RequestStream] = field(default_factory=list)
    head_sent: bool = False


_CALL = web.RequestKey("call", Call)


def call_of(request: web.Request) -> Call:
    """Always the same for one request."""
    call = request.get(_CALL)
    if call is None:
        sent = request.headers.get("x-request-id", "")
        call = Call(sent if _SANE_ID.fullmatch(sent) else uuid.uuid4().hex)
        call.headers |= {"x-request-id": call.id, "Server": f"jaxinfer/{jaxinfer.__version__}"}
        request[_CALL] = call
    return call


def route_of(request: web.Request) -> str:
    """The route that was matched, as the application wrote it, or "unknown": unlike paths there are only so many."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unknown"
