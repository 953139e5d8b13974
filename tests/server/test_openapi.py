"""/openapi.json says what the server does: schemathesis sends what the document allows and what it forbids, over a real socket."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import requests
import schemathesis
from byte_tokenizer import END, EOS, VOCAB_SIZE
from hypothesis import HealthCheck, settings
from scripted import MAX_MODEL_LEN, NAN, TOKENIZER, ScriptedEngine, Server, says, serving
from test_requests import CHAT, call

from jaxinfer.engine.constraint import GrammarCompiler
from jaxinfer.protocol import answers
from jaxinfer.protocol.types import ChatBody
from jaxinfer.protocol.unsupported import CHAT as CHAT_REFUSED
from jaxinfer.server.app import make_app
from jaxinfer.server.context import ServedModel
from jaxinfer.server.openapi import make_document
from jaxinfer.text.chat import ChatTemplate

CONFIG = schemathesis.Config.from_dict(
    {
        "seed": 1,
        "generation": {"deterministic": True, "database": "none"},
        # Fields that need or exclude each other are beyond a schema.
        "checks": {"positive_data_acceptance": {"enabled": False}},
        "phases": {"stateful": {"enabled": False}},
    }
)
SCHEMA = schemathesis.openapi.from_dict(make_document(keyed=False), config=CONFIG)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


class BriefEngine(ScriptedEngine):
    """Answers that are never long, whatever is asked for."""

    def add_request(self, request_id, prompt_token_ids, params, **options) -> None:
        params = params.replace(min_tokens=0, max_tokens=min(params.max_tokens or 8, 8))
        super().add_request(request_id, prompt_token_ids, params, **options)


def model() -> ServedModel:
    return ServedModel(
        name="scripted",
        tokenizer=TOKENIZER,
        chat_template=ChatTemplate.from_tokenizer(TOKENIZER),
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        defaults={},
        facts={"architecture": "scripted"},
        grammars=GrammarCompiler(TOKENIZER, VOCAB_SIZE, (EOS, END)),
        hidden_states=lambda ids: np.ones((len(ids), 4), np.float32),
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("data")
    with serving(BriefEngine(says("ok")), model(), data_dir=folder, max_n=4) as running:
        yield running


# Threads of the server may draw from it meanwhile.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
@SCHEMA.parametrize()
@settings(
    max_examples=20,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
def test_whatever_the_document_says_is_so(case, server: Server):
    case.call_and_validate(base_url=server.url)


def conforms(path: str, method: str, response: requests.Response) -> None:
    """What was answered is among what the document says of the route."""
    operation = make_document(keyed=False)["paths"][path][method]
    assert str(response.status_code) in operation["responses"]
    SCHEMA[path][method].validate_response(response)


def test_it_is_valid_openapi_3_1(server: Server):
    document = requests.get(f"{server.url}/openapi.json").json()
    assert document["openapi"].startswith("3.1.")
    assert document == make_document(keyed=False)
    schemathesis.openapi.from_dict(document).validate()
    ids = [operation["operationId"] for item in document["paths"].values() for operation in item.values()]
    assert len(set(ids)) == len(ids)


def test_every_route_is_in_it_and_nothing_else(server: Server):
    app = make_app(server.context)
    routes = {
        (route.method.lower(), route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"  # goes with GET
    }
    paths = make_document(keyed=False)["paths"]
    assert {(method, path) for path, item in paths.items() for method in item} == routes


def test_with_keys_it_says_which_routes_need_one(serve, tmp_path: Path):
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    server = serve(api_keys_file=keys)
    assert call(server, "/openapi.json")[0] == 401
    document = call(server, "/openapi.json", headers={"Authorization": "Bearer secret"})[1]
    for path, item in document["paths"].items():
        for method, operation in item.items():
            url = server.url + path.replace("{", "").replace("}", "")
            refused = requests.request(method, url).status_code == 401
            assert refused == ("security" in operation) == ("401" in operation["responses"]), path
    assert set(document["components"]["securitySchemes"]) == {"bearer", "header"}


def test_fields_that_are_refused_are_in_it_too():
    schemas = make_document(keyed=False)["components"]["schemas"]
    for name, values in CHAT_REFUSED.items():
        assert schemas["ChatBody"]["properties"][name]["enum"] == [None, *values]
    assert schemas["ChatBody"]["patternProperties"] == {"^guided_": {"type": "null"}}
    known = set(ChatBody.__struct_fields__)
    assert known.isdisjoint(CHAT_REFUSED)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1}),
        ("/v1/chat/completions", {**CHAT, "n": 2, "return_token_ids": True, "temperature": 1}),
        ("/v1/chat/completions", {**CHAT, "tools": [WEATHER], "tool_choice": "required"}),
        ("/v1/completions", {"prompt": ["a", "b"], "echo": True, "logprobs": 2, "prompt_logprobs": 1}),
        ("/v1/completions", {"prompt": [1, 2], "return_token_ids": True, "stop": "k"}),
        (
            "/v1/responses",
            {
                "input": "hi",
                "tools": [{**WEATHER["function"], "type": "function"}],
                "tool_choice": "required",
            },
        ),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 1}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_answers_of_every_form_conform(serve, path: str, body: dict[str, Any], stream: bool):
    said = '[{"name": "weather", "arguments": {}}]' if "tools" in body else "ok"
    body = {**body, "stream": stream}
    if stream:
        body |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    response = requests.post(serve(ScriptedEngine(says(said))).url + path, json=body)
    assert response.status_code == 200
    assert response.headers["Content-Type"].startswith("text/event-stream" if stream else "application/json")
    conforms(path, "post", response)
    if stream:
        type_ = {
            "/v1/chat/completions": answers.ChatChunk,
            "/v1/completions": answers.CompletionChunk,
            "/v1/responses": answers.ResponseEvent,
        }[path]
        events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        assert events
        for event in events:
            msgspec.json.decode(event, type=type_)


def test_a_failure_in_a_stream_conforms(serve):
    server = serve(ScriptedEngine(lambda *_: [*b"ab", NAN]))
    for path, body in (
        ("/v1/completions", {"prompt": "a", "stream": True}),
        ("/v1/responses", {"input": "a", "stream": True}),
    ):
        response = requests.post(server.url + path, json=body)
        assert "NaN" in response.text
        conforms(path, "post", response)


def test_files_and_batches_conform(server: Server):
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    upload = {"file": ("lines.jsonl", json.dumps(line).encode())}
    made = requests.post(f"{server.url}/v1/files", data={"purpose": "batch"}, files=upload)
    conforms("/v1/files", "post", made)
    file = f"{server.url}/v1/files/{made.json()['id']}"
    conforms("/v1/files/{file_id}", "get", requests.get(file))
    content = requests.get(f"{file}/content")
    assert json.loads(content.content) == line
    conforms("/v1/files/{file_id}/content", "get", content)
    for headers, status in (
        ({"Range": "bytes=0-3"}, 206),
        ({"Range": "bytes=9999-"}, 416),
        ({"If-None-Match": content.headers["ETag"]}, 304),
        ({"If-Match": '"other"'}, 412),
    ):
        partly = requests.get(f"{file}/content", headers=headers)
        assert partly.status_code == status
        conforms("/v1/files/{file_id}/content", "get", partly)

    body = {"input_file_id": made.json()["id"], "endpoint": "/v1/completions", "metadata": {"a": "b"}}
    batch = requests.post(f"{server.url}/v1/batches", json=body)
    assert batch.status_code == 200
    conforms("/v1/batches", "post", batch)
    url = f"{server.url}/v1/batches/{batch.json()['id']}"
    end = time.monotonic() + 20
    while (now := requests.get(url)).json()["status"] != "completed" and time.monotonic() < end:
        conforms("/v1/batches/{batch_id}", "get", now)
        time.sleep(0.02)
    assert now.json()["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
    conforms("/v1/batches/{batch_id}", "get", now)
    conforms("/v1/batches/{batch_id}/cancel", "post", requests.post(f"{url}/cancel"))  # is over: 400
    for path in ("/v1/batches", "/v1/files"):
        conforms(path, "get", requests.get(server.url + path, params={"limit": 1}))
    conforms("/v1/files/{file_id}", "delete", requests.delete(file))


@pytest.mark.parametrize("limit", ["1.5", "x", "", "-", "1_0", "٣", " 5", "+5"])
def test_a_limit_is_a_plain_integer(server: Server, limit: str):
    response = requests.get(f"{server.url}/v1/files", params={"limit": limit})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "limit"
