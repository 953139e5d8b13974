"""The application: routes and what every request passes through."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from jaxinfer.server import batches, embeddings, files, generate, openapi, playground, responses, system
from jaxinfer.server.access import access_log
from jaxinfer.server.auth import Keys, authorization
from jaxinfer.server.call import call_of
from jaxinfer.server.context import CONTEXT, ServerContext
from jaxinfer.server.errors import errors_as_json
from jaxinfer.server.tracing import make_tracing

_CORS_METHODS = "GET, POST, DELETE, OPTIONS"
_CORS_HEADERS = "Authorization, Content-Type, x-api-key, x-request-id, x-session-affinity"


def make_app(context: ServerContext) -> web.Application:
    """Raises ConfigError when a keys file cannot be read."""
    config = context.config
    keys = None if config.api_keys_file is None else Keys(config.api_keys_file)
    admin_keys = None if config.admin_keys_file is None else Keys(config.admin_keys_file)
    middlewares = [access_log, errors_as_json, authorization(keys, admin_keys)]
    if config.cors_origins:
        middlewares.insert(1, _cors(frozenset(config.cors_origins)))
    tracing = make_tracing(config.otlp_traces_endpoint)
    if tracing is not None:
        middlewares.insert(1, tracing.middleware)
    app = web.Application(middlewares=middlewares, client_max_size=config.max_body_bytes)
    app[CONTEXT] = context
    if tracing is not None:
        app.on_cleanup.append(tracing.close)
    app.add_routes(
        [
            web.get("/", playground.page),
            web.get("/health", system.health),
            web.get("/ready", system.ready),
            web.get("/metrics", system.metrics),
            web.get("/version", system.version),
            web.get("/openapi.json", openapi.document),
            web.get("/v1/models", system.models),
            web.get("/v1/models/{model:.+}", system.model),
            web.post("/tokenize", system.tokenize),
            web.post("/detokenize", system.detokenize),
            web.get("/tokenizer_info", system.tokenizer_info),
            web.post("/v1/chat/completions", generate.chat_completions),
            web.post("/v1/completions", generate.completions),
            web.post("/v1/responses", responses.create),
            web.post("/v1/embeddings", embeddings.embeddings),
            web.post("/v1/files", files.upload),
            web.get("/v1/files", files.listing),
            web.get("/v1/files/{file_id}", files.retrieve),
            web.get("/v1/files/{file_id}/content", files.content),
            web.delete("/v1/files/{file_id}", files.delete),
            web.post("/v1/batches", batches.create),
            web.get("/v1/batches", batches.listing),
            web.get("/v1/batches/{batch_id}", batches.retrieve),
            web.post("/v1/batches/{batch_id}/cancel", batches.cancel),
        ]
    )
    return app


def _cors(origins: frozenset[str]) -> Any:
    @web.middleware
    async def allow(request: web.Request, handler: Any) -> web.StreamResponse:
        origin = request.headers.get("Origin")
        allowed = origin is not None and (origin in origins or "*" in origins)
        headers = {"Access-Control-Allow-Origin": origin, "Vary": "Origin"} if allowed and origin else {}
        if allowed and request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
            headers |= {
                "Access-Control-Allow-Methods": _CORS_METHODS,
                "Access-Control-Allow-Headers": _CORS_HEADERS,
                "Access-Control-Max-Age": "600",
            }
            return web.Response(status=204, headers=headers)
        call_of(request).headers.update(headers)
        return await handler(request)

    return allow
