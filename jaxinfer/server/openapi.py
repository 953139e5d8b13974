"""/openapi.json: what this server takes and answers, as OpenAPI 3.1. Schemas are those of the types that check bodies."""

from __future__ import annotations

import functools
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

import jaxinfer
from jaxinfer.protocol import answers, types, unsupported
from jaxinfer.server.auth import OPEN
from jaxinfer.server.context import CONTEXT
from jaxinfer.server.files import PURPOSES

_REF = "#/components/schemas/"
_JSON = "application/json"

# Statuses of errors: of any JSON body, of what finds a thing by name, of what the engine answers.
_BODY = (400, 408, 413, 415)
_ENGINE = (*_BODY, 404, 429, 503, 504)
_STORED = (400, 404)

_REFUSED = {
    types.ChatBody: unsupported.CHAT,
    types.CompletionBody: unsupported.COMPLETIONS,
    types.ResponsesBody: unsupported.RESPONSES,
    types.EmbeddingBody: unsupported.EMBEDDINGS,
    types.BatchBody: unsupported.BATCHES,
}
_PAGES = {
    "limit": {"type": "integer", "description": "Most objects to list; taken as 1 to 10000."},
    "after": {"type": "string", "description": "List what comes after the object of this id."},
}


class _Route(NamedTuple):
    """Attributes:
    answer: type of the body, or a media type.
    body: type of the request's, or the schema of a form.
    events: type of an event's data, where answers may be streamed.
    example: of the request's body.
    empty: further statuses that come without a body.
    """

    method: str
    path: str
    summary: str
    answer: Any
    body: Any = None
    events: Any = None
    example: Any = None
    errors: tuple[int, ...] = ()
    empty: tuple[int, ...] = ()
    query: dict[str, Any] = {}  # noqa: RUF012 (never changed)


_HELLO = {"role": "user", "content": "Hello"}
_UPLOAD = {
    "type": "object",
    "required": ["purpose", "file"],
    "properties": {
        "purpose": {"enum": list(PURPOSES)},
        "file": {"contentMediaType": "application/octet-stream"},
    },
}
_ROUTES = (
    _Route("get", "/", "A page to chat with.", "text/html", empty=(304,)),
    _Route("get", "/health", "Liveness.", answers.Status, errors=(503,)),
    _Route("get", "/ready", "Readiness: 503 also while draining.", answers.Status, errors=(503,)),
    _Route("get", "/metrics", "Prometheus metrics.", "text/plain"),
    _Route("get", "/version", "The server's version.", answers.Version),
    _Route("get", "/openapi.json", "This document.", _JSON),
    _Route("get", "/v1/models", "The served model.", answers.Models),
    _Route("get", "/v1/models/{model}", "One model.", answers.Model, errors=(404,)),
    _Route(
        *("post", "/tokenize", "Token ids of a prompt or a chat.", answers.Tokens),
        body=types.TokenizeBody,
        example={"messages": [_HELLO]},
        errors=(*_BODY, 404),
    ),
    _Route(
        *("post", "/detokenize", "The text of token ids.", answers.Detokenized),
        body=types.DetokenizeBody,
        example={"tokens": [1, 2, 3]},
        errors=(*_BODY, 404),
    ),
    _Route(
        *("get", "/tokenizer_info", "What a client needs to tokenise as the server does."),
        answers.TokenizerInfo,
        errors=(400,),
    ),
    _Route(
        *("post", "/v1/chat/completions", "Goes on with a chat.", answers.ChatCompletion),
        body=types.ChatBody,
        events=answers.ChatChunk,
        example={"messages": [_HELLO]},
        errors=_ENGINE,
    ),
    _Route(
        *("post", "/v1/completions", "Goes on with a text.", answers.Completion),
        body=types.CompletionBody,
        events=answers.CompletionChunk,
        example={"prompt": "Hello", "max_tokens": 16},
        errors=_ENGINE,
    ),
    _Route(
        *("post", "/v1/responses", "Goes on with a chat, as OpenAI's Responses API.", answers.Response),
        body=types.ResponsesBody,
        events=answers.ResponseEvent,
        example={"input": "Hello"},
        errors=_ENGINE,
    ),
    _Route(
        *("post", "/v1/embeddings", "Vectors of texts.", answers.Embeddings),
        body=types.EmbeddingBody,
        example={"input": ["Hello", "world"]},
        errors=(*_BODY, 404, 503, 504),
    ),
    _Route(
        *("post", "/v1/files", "Uploads a file.", answers.File), body=_UPLOAD, errors=(400, 408, 413, 415)
    ),
    _Route(
        *("get", "/v1/files", "Files, newest first.", answers.Files),
        errors=(400,),
        query={**_PAGES, "purpose": {"type": "string"}},
    ),
    _Route("get", "/v1/files/{file_id}", "One file.", answers.File, errors=_STORED),
    _Route(
        *("get", "/v1/files/{file_id}/content", "Its content.", "application/octet-stream"),
        errors=_STORED,
        empty=(206, 304, 412, 416),
    ),
    _Route("delete", "/v1/files/{file_id}", "Deletes a file.", answers.DeletedFile, errors=_STORED),
    _Route(
        *("post", "/v1/batches", "Starts a batch.", answers.Batch),
        body=types.BatchBody,
        example={"input_file_id": "file-0123456789abcdef01234567", "endpoint": "/v1/chat/completions"},
        errors=(*_BODY, 404, 429),
    ),
    _Route("get", "/v1/batches", "Batches, newest first.", answers.Batches, errors=(400,), query=_PAGES),
    _Route("get", "/v1/batches/{batch_id}", "One batch.", answers.Batch, errors=_STORED),
    _Route("post", "/v1/batches/{batch_id}/cancel", "Cancels a batch.", answers.Batch, errors=_STORED),
)


async def document(request: web.Request) -> web.Response:
    keyed = request.app[CONTEXT].config.api_keys_file is not None
    return web.Response(body=_encoded(keyed), content_type=_JSON)


@functools.cache
def _encoded(keyed: bool) -> bytes:
    return msgspec.json.encode(make_document(keyed=keyed))


def make_document(*, keyed: bool) -> dict[str, Any]:
    """The OpenAPI document. keyed: routes that are not open need an API key."""
    shown = {t for route in _ROUTES for t in (route.answer, route.body, route.events) if isinstance(t, type)}
    ordered = sorted({answers.ErrorBody, *shown}, key=lambda t: t.__name__)
    _, schemas = msgspec.json.schema_components(ordered, ref_template=_REF + "{name}")
    for body, neutral in _REFUSED.items():
        schema = schemas[body.__name__]
        refused = unsupported.unsupported_schema(neutral)
        schema["properties"] |= refused["properties"]
        schema["patternProperties"] = refused["patternProperties"]
    components: dict[str, Any] = {"schemas": schemas}
    if keyed:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    paths: dict[str, Any] = {}
    for route in _ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route, keyed and route.path not in OPEN)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "jaxinfer",
            "version": jaxinfer.__version__,
            "description": "null is absent; fields that are not listed are ignored; integers are written without a fraction.",
        },
        "paths": paths,
        "components": components,
    }


def _operation(route: _Route, keyed: bool) -> dict[str, Any]:
    named = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    parameters = [
        *({"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in named),
        *({"name": n, "in": "query", "schema": schema} for n, schema in route.query.items()),
    ]
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": "_".join([route.method, *(p.strip("{}") for p in route.path.split("/") if p)]),
        "parameters": parameters,
        "responses": _responses(route, keyed),
    }
    if route.body is not None:
        media = "multipart/form-data" if isinstance(route.body, dict) else _JSON
        content = {"schema": _schema(route.body)}
        if route.example is not None:
            content["example"] = route.example
        operation["requestBody"] = {"required": True, "content": {media: content}}
    if keyed:
        operation["security"] = [{"bearer": []}, {"header": []}]
    return operation


def _responses(route: _Route, keyed: bool) -> dict[str, Any]:
    answer = route.answer
    if isinstance(answer, str):
        content = {answer: {"schema": {} if answer == _JSON else {"type": "string"}}}
    else:
        content = {_JSON: {"schema": _schema(answer)}}
    if route.events is not None:
        content["text/event-stream"] = {"schema": _events(route.events)}
    responses: dict[str, Any] = {"200": {"description": HTTPStatus(200).phrase, "content": content}}
    for status in route.empty:
        responses[str(status)] = {"description": HTTPStatus(status).phrase}
    for status in sorted({*route.errors, 500, *((401,) if keyed else ())}):
        error: dict[str, Any] = {
            "description": HTTPStatus(status).phrase,
            "content": {_JSON: {"schema": _schema(answers.ErrorBody)}},
        }
        if status in (429, 503):
            error["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "seconds"}}
        responses[str(status)] = error
    return responses


def _events(data: type) -> dict[str, Any]:
    """The schema of one event of a stream, as of its fields `event` and `data`."""
    chunk = {"anyOf": [_schema(data), _schema(answers.ErrorBody)]}
    json = {"type": "string", "contentMediaType": _JSON, "contentSchema": chunk}
    done = {"const": "[DONE]", "description": "the end of a stream of chunks"}
    fields = {"event": {"type": "string"}, "data": {"anyOf": [done, json]}}
    return {"type": "object", "properties": fields, "required": ["data"]}


def _schema(of: Any) -> dict[str, Any]:
    return of if isinstance(of, dict) else {"$ref": f"{_REF}{of.__name__}"}
