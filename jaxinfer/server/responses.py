"""/v1/responses: create, whole or streamed. Nothing is stored."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from jaxinfer.engine.request import RequestOutput
from jaxinfer.protocol.parse import parse_chat_request
from jaxinfer.protocol.prompt import PreparedRequest
from jaxinfer.protocol.responses import ResponseObject, ResponseStream, to_chat_body
from jaxinfer.server.admission import check_alive
from jaxinfer.server.body import read_json
from jaxinfer.server.call import call_of
from jaxinfer.server.context import CONTEXT, ServedModel
from jaxinfer.server.generate import admit, respond


class _Answer:
    def __init__(self, body: dict[str, Any], prepared: PreparedRequest, model: ServedModel, response_id: str):
        assert model.tokenizer is not None  # prepare has refused it
        self._response = ResponseObject(
            body,
            prepared,
            model.tokenizer,
            response_id=response_id,
            created=int(time.time()),
            model=model.name,
        )

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        return self._response.whole(outputs[0])

    def stream(self) -> ResponseStream:
        return ResponseStream(self._response)


async def create(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    check_alive(context)
    body = await read_json(request)
    prepared = await admit(context, parse_chat_request(to_chat_body(body), context.model.defaults))
    answer = _Answer(body, prepared, context.model, f"resp_{call_of(request).id}")
    return await respond(request, prepared, answer)
