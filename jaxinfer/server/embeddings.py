"""/v1/embeddings: final hidden states, pooled. Runs beside the engine, one text at a time."""

from __future__ import annotations

import asyncio

import numpy as np
from aiohttp import web

from jaxinfer.errors import RequestError
from jaxinfer.protocol.embeddings import EmbeddingRequest, embedding_response, parse_embedding_request, pool
from jaxinfer.protocol.prompt import encode_text
from jaxinfer.server.admission import check_alive
from jaxinfer.server.body import read_json
from jaxinfer.server.call import call_of
from jaxinfer.server.context import CONTEXT, ServerContext
from jaxinfer.server.generate import check_model


async def embeddings(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    check_alive(context)
    parsed = parse_embedding_request(await read_json(request))
    check_model(context, parsed.model)
    async with asyncio.timeout(context.config.request_timeout_s):
        ids = await context.in_worker(lambda: [_ids(text, context) for text in parsed.inputs])
        vectors = [await _embed(tokens, parsed, context) for tokens in ids]
    count = sum(map(len, ids))
    call_of(request).note["prompt_tokens"] = count
    return web.json_response(embedding_response(parsed, vectors, count, model=context.model.name))


def _ids(text: str | tuple[int, ...], context: ServerContext) -> list[int]:
    model = context.model
    if isinstance(text, str):
        ids = encode_text(text, model.tokenizer, max_tokens=model.max_model_len, field="input")
    else:
        ids = list(text)
    if not 0 < len(ids) <= model.max_model_len:
        raise RequestError(
            f"an input has {len(ids)} tokens, but must have 1 to {model.max_model_len}",
            param="input",
            code="context_length_exceeded",
        )
    for i in ids:
        if not 0 <= i < model.vocab_size:
            raise RequestError(
                f"input: token id {i} is outside the vocabulary of {model.vocab_size}", param="input"
            )
    return ids


async def _embed(ids: list[int], request: EmbeddingRequest, context: ServerContext) -> np.ndarray:
    hidden_states = context.model.hidden_states
    if hidden_states is None:
        raise RequestError("this model gives no hidden states, so it cannot embed", param="model")
    return pool(await context.embed(lambda: hidden_states(ids)), request)
