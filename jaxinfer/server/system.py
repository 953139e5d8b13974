"""Routes about the server itself: health, readiness, metrics, version, models, tokenising."""

from __future__ import annotations

from typing import Any

from aiohttp import web

import jaxinfer
from jaxinfer.errors import RequestError
from jaxinfer.protocol.convert import read
from jaxinfer.protocol.parse import parse_chat_request
from jaxinfer.protocol.prompt import encode_text
from jaxinfer.protocol.request import GenerationRequest
from jaxinfer.protocol.types import DetokenizeBody, TokenizeBody
from jaxinfer.server.admission import check_alive
from jaxinfer.server.body import read_json
from jaxinfer.server.context import CONTEXT, ServerContext
from jaxinfer.server.errors import HTTPFailure
from jaxinfer.server.generate import check_model
from jaxinfer.server.metrics import CONTENT_TYPE
from jaxinfer.text.tokenizer import Tokenizer

_MAX_TOKENIZE_CHARS = 4_000_000  # longer than any context; tokenising takes some hundred bytes a character


async def health(request: web.Request) -> web.Response:
    """Liveness: 200 while the engine's thread runs, also when it is busy or draining."""
    if not request.app[CONTEXT].service.healthy:
        raise HTTPFailure(503, "the engine has failed; the server must be restarted", code="engine_dead")
    return web.json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """Readiness: 503 as soon as new requests would be refused."""
    check_alive(request.app[CONTEXT])
    return web.json_response({"status": "ready"})


async def metrics(request: web.Request) -> web.Response:
    return web.Response(body=request.app[CONTEXT].metrics.expose(), headers={"Content-Type": CONTENT_TYPE})


async def version(request: web.Request) -> web.Response:
    return web.json_response({"version": jaxinfer.__version__})


async def models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [_model(request.app[CONTEXT])]})


async def model(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    check_model(context, request.match_info["model"])
    return web.json_response(_model(context))


async def tokenize(request: web.Request) -> web.Response:
    """vLLM's: `prompt` or `messages` → token ids, their count, and the context's limit."""
    context = request.app[CONTEXT]
    body = await read_json(request)
    fields = read(body, TokenizeBody)
    check_model(context, fields.model)
    prompt = fields.prompt
    if fields.messages is not None:
        ids = await _chat_ids(context, body)
    elif prompt is not None:
        if len(prompt) > _MAX_TOKENIZE_CHARS:
            raise RequestError(
                f"prompt may have at most {_MAX_TOKENIZE_CHARS} characters here, got {len(prompt)}",
                param="prompt",
            )
        special = fields.add_special_tokens is not False
        tokenizer = _tokenizer(context)
        ids = await context.in_worker(lambda: encode_text(prompt, tokenizer, add_special_tokens=special))
    else:
        raise RequestError("give prompt or messages", param="prompt")
    shown: dict[str, Any] = {"count": len(ids), "max_model_len": context.model.max_model_len, "tokens": ids}
    if fields.return_token_strs:
        token_text = _tokenizer(context).token_text
        shown["token_strs"] = await context.in_worker(lambda: [token_text(i) for i in ids])
    return web.json_response(shown)


async def detokenize(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    fields = read(await read_json(request), DetokenizeBody)
    check_model(context, fields.model)
    size = context.model.vocab_size
    if fields.tokens and max(fields.tokens) >= size:
        raise RequestError(f"tokens must be an array of token ids between 0 and {size - 1}", param="tokens")
    tokenizer = _tokenizer(context)
    text = await context.in_worker(
        lambda: tokenizer.decode(fields.tokens, skip_special_tokens=False), "writing the tokens out"
    )
    return web.json_response({"prompt": text})


async def tokenizer_info(request: web.Request) -> web.Response:
    """vLLM's: what clients that count tokens over /tokenize want to know (lm-eval's remote tokenizer)."""
    model = request.app[CONTEXT].model
    tokenizer = _tokenizer(request.app[CONTEXT])
    template = model.chat_template
    shown: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.max_model_len,
        **tokenizer.special_tokens,
    }
    if template is not None:
        shown["chat_template"] = template.sources["default"]
    return web.json_response(shown)


async def _chat_ids(context: ServerContext, body: dict[str, Any]) -> list[int]:
    parsed: GenerationRequest = parse_chat_request(body, {})
    prepared = await context.prepare(parsed)
    return prepared.prompts[0].token_ids


def _tokenizer(context: ServerContext) -> Tokenizer:
    if context.model.tokenizer is None:
        raise RequestError("this model has no tokenizer: send token ids", param="prompt")
    return context.model.tokenizer


def _model(context: ServerContext) -> dict[str, Any]:
    return {
        "id": context.model.name,
        "object": "model",
        "created": context.started,
        "owned_by": "jaxinfer",
        "root": context.model.name,
        "parent": None,
        "max_model_len": context.model.max_model_len,
        **context.model.facts,
    }
