"""One structured line a request, and the headers that every answer carries."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any

from aiohttp import web

from jaxinfer.server.call import call_of, route_of
from jaxinfer.server.context import CONTEXT

logger = logging.getLogger("jaxinfer.access")

_CLIENT_GONE = 499  # nginx's number; nobody is there to be sent it


@web.middleware
async def access_log(request: web.Request, handler: Any) -> web.StreamResponse:
    """Outermost: times the request, counts it, and writes its line, whatever becomes of it."""
    context = request.app[CONTEXT]
    route = route_of(request)
    call = call_of(request)
    start = time.perf_counter()
    status = 500
    try:
        response = await handler(request)
        status = response.status
        if not response.prepared:
            response.headers.update(call.headers)
        return response
    except asyncio.CancelledError:
        status = _CLIENT_GONE
        raise
    finally:
        seconds = time.perf_counter() - start
        context.metrics.request_ended(route, status, seconds)
        if context.config.log_requests and route not in ("/health", "/ready", "/metrics"):
            line = {
                "time": round(time.time(), 3),
                "id": call.id,
                "method": request.method,
                "route": route,
                "status": status,
                "ms": round(seconds * 1e3, 2),
                **call.note,
            }
            logger.info(json.dumps(line))
