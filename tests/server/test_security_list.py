"""Attacks and faults published about other servers, tried on this one: S-numbers, one behaviour each.

Tested elsewhere: S09 time and size of templates (text/test_jinja.py, test_requests.py), S10 and S14 in the compiler and S13
(engine/test_constraint.py), S17 (test_batches.py), S26 in part (test_requests.py), S31 (weights/test_checkpoints.py,
weights/test_safetensors_index.py), S36 (test_soak.py), S16 and S19 (media/test_fetch.py, media/test_images.py).
To be tested with what they are about: S01, S02 in part and S03 with the transfer of pages between servers, S32 with the
route that updates weights.
"""

from __future__ import annotations

import ast
import asyncio
import hashlib
import hmac
import itertools
import json
import os
import pickle
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import EOS
from scripted import ScriptedEngine, Server, says, serving
from test_requests import CHAT, call, refused
from tiny_checkpoint import CONFIG, write_checkpoint

import jaxinfer
from jaxinfer import LLM
from jaxinfer.config.server import ServerConfig
from jaxinfer.engine.request import SamplingParams
from jaxinfer.engine.service import EngineService
from jaxinfer.errors import CheckpointError
from jaxinfer.kv.prefix import BlockHasher, root_digest
from jaxinfer.serve import served_model
from jaxinfer.server.app import make_app
from jaxinfer.server.auth import Keys
from jaxinfer.text.tokenizer import Tokenizer

ROOT = Path(jaxinfer.__file__).parent.parent
SOURCES = sorted(
    p for folder in ("jaxinfer", "pallas_kernels", "scripts") for p in (ROOT / folder).rglob("*.py")
)


def raw(server: Server, request: bytes, seconds: float = 10.0) -> bytes:
    """What the server says to these bytes until it closes the connection."""
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    answer = b""
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        try:
            connection.sendall(request)
            while part := connection.recv(65536):
                answer += part
        except (ConnectionError, TimeoutError):
            pass
    return answer


def alive(server: Server) -> bool:
    status, answer, _ = call(server, "/v1/completions", {"prompt": "a", "max_tokens": 2})
    return status == 200 and answer["usage"]["completion_tokens"] >= 1


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The real engine, of a random model."""
    llm = LLM(
        write_checkpoint(tmp_path_factory.mktemp("model")), warm_up=False, max_num_seqs=4, max_model_len=256
    )
    with serving(llm.engine, served_model(llm, ServerConfig(served_model_name="tiny"))) as server:
        yield server


# Not on the list: bodies whose cost is out of proportion to their size


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[" + b"[]," * 200_000 + b"[]]", "more than 100000 arrays, objects and members"),
        (b'{"logit_bias": {' + b'"1": 1, ' * 200_000 + b'"2": 1}}', "more than 100000 arrays"),
        (b'{"prompt": [' + b"1," * 1_000_000 + b"1]}", "more than 1000000 values"),
        (b"[" + b"[]," * 200 + b'"a"' * 2_000_001 + b"]", "more than 1000000 values"),
    ],
)
def test_bodies_of_too_many_values_are_refused_before_they_are_made(serve, content: bytes, says: str):
    assert says in refused(serve(), "/v1/completions", None, raw=content)["message"]


def test_text_may_hold_as_many_commas_and_brackets_as_it_likes(serve):
    server = serve(ScriptedEngine(says("ok")), max_json_values=100)
    text = 'say "{[, \\' * 50_000 + "\\"
    error = refused(server, "/v1/completions", {"prompt": text})
    assert error["code"] == "context_length_exceeded"  # it was read
    error = refused(server, "/v1/completions", {"prompt": list(range(102))})
    assert "more than 100 values" in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize"])
def test_text_that_cannot_fit_is_not_tokenised(serve, monkeypatch: pytest.MonkeyPatch, path: str):
    text = "x" * 5_000_000
    server = serve()
    encoded: list[int] = []
    monkeypatch.setattr(Tokenizer, "encode", lambda _, text, **__: encoded.append(len(text)) or [1])
    name = {"/v1/embeddings": "input", "/v1/chat/completions": "messages"}.get(path, "prompt")
    body = {name: [{"role": "user", "content": text}] if name == "messages" else text}
    assert refused(server, path, body)["param"] == name
    assert not encoded


def test_a_long_stop_string_costs_its_length(serve):
    """Its beginnings, kept one by one, would be 20 GB."""
    server = serve(ScriptedEngine(says("ok")))
    status, answer, _ = call(
        server, "/v1/completions", {"prompt": "a", "stop": ["o" * 200_000, "k" * 200_000], "max_tokens": 4}
    )
    assert (status, answer["choices"][0]["text"]) == (200, "ok")


# S02, S04, S12, S29: nothing that runs what it reads

_RUNS_CODE = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "code"}
_CALLS = {("yaml", "load"), ("torch", "load"), ("os", "system"), ("os", "popen")}
_ALLOWED = {
    (
        "jaxinfer/engine/executables.py",
        "pickle",
    ),  # compiled programs, in a cache that this user alone may write
    ("scripts/bench_load.py", "shell"),  # a command of its own, run by hand
}


def dangers(source: str) -> Iterator[str]:
    """Ways in which a source could run data as code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in _RUNS_CODE)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in _RUNS_CODE:
            yield node.module
        elif isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name) and function.id in ("eval", "exec", "compile", "__import__"):
                yield function.id
            if isinstance(function, ast.Attribute):
                owner = function.value.id if isinstance(function.value, ast.Name) else ""
                if (owner, function.attr) in _CALLS:
                    yield f"{owner}.{function.attr}"
                if function.attr in ("recv_pyobj", "send_pyobj", "read_pickle"):
                    yield function.attr
            for keyword in node.keywords:
                if keyword.arg in ("allow_pickle", "trust_remote_code", "shell") and not (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                ):
                    yield keyword.arg


def test_s04_s12_s29_nothing_read_is_run():
    assert len(SOURCES) > 100
    found = {(str(p.relative_to(ROOT)), danger) for p in SOURCES for danger in dangers(p.read_text())}
    assert found - _ALLOWED == set()


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(f)",
        "import yaml\nyaml.load(x)",
        "eval(x)",
        "np.load(f, allow_pickle=True)",
        "subprocess.run(x, shell=y)",
        "socket.recv_pyobj()",
        "AutoModel.from_pretrained(x, trust_remote_code=flag)",
    ],
)
def test_s04_the_scan_sees(source: str):
    assert list(dangers(source))


class _Bomb:
    def __init__(self, path: str):
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.path,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_s29_weights_that_are_a_pickle_are_not_loaded(tmp_path: Path, name: str):
    folder = tmp_path / "model"
    folder.mkdir()
    write_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(_Bomb(str(tmp_path / "ran"))))
    with pytest.raises(CheckpointError):
        LLM(folder, warm_up=False)
    assert not (tmp_path / "ran").exists()


def test_s29_code_that_comes_with_a_model_is_not_run(tmp_path: Path):
    write_checkpoint(tmp_path)
    (tmp_path / "modeling_evil.py").write_text("import os; os.mkdir('ran')\nclass M: pass\n")
    evil = {"auto_map": {"AutoModelForCausalLM": "modeling_evil.M", "AutoConfig": "modeling_evil.M"}}
    nested = {**CONFIG, **evil, "vision_config": evil, "text_config": None}
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in nested.items() if v is not None}))
    llm = LLM(tmp_path, warm_up=False, max_num_seqs=1, max_model_len=32)
    assert "modeling_evil" not in sys.modules
    assert not Path("ran").exists()
    assert llm.generate([[1]], SamplingParams(max_tokens=1))[0].finished


# S05, S07, S26, S27, S34: the edge


def test_s05_only_the_address_given_listens(serve):
    assert ServerConfig().host == "127.0.0.1"
    server = serve()
    port = int(server.url.rsplit(":", 1)[1])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nx: " + b"a" * 1_000_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n"
        + b"".join(b"h%d: v\r\n" % i for i in range(100_000))
        + b"\r\n",
        b"A" * 1_000_000,
    ],
)
def test_s07_heads_without_end_are_refused_early(serve, head: bytes):
    server = serve(ScriptedEngine(says("ok")))
    answer = raw(server, head)
    assert answer == b"" or answer.split()[1] in (b"400", b"414", b"431")
    assert alive(server)


@pytest.mark.parametrize(
    ("line", "host"),
    [
        ("GET //v1/models", "x"),
        ("GET /health/../v1/models", "x"),
        ("GET /health/%2e%2e/v1/models", "x"),
        ("GET /health%2f..%2fv1%2fmodels", "x"),
        ("GET /v1%2Fmodels", "x"),
        ("GET http://x/v1/models", "x"),
        ("GET http://health/v1/models", "/health"),
        ("GET /v1/models?/health", "/health"),
        ("GET /v1/models#/health", "x"),
        ("GET /v1/models;/health", "x"),
        ("GET /V1/MODELS", "x"),
        ("GET \\v1\\models", "x"),
        ("HEAD /v1/models", "/ready"),
        ("GET *", "/v1/models"),
        ("GET /v1/models", "x\r\nX-Original-URL: /health\r\nX-Forwarded-Prefix: /health"),
        ("GET /v1/models", "x\r\nX-HTTP-Method-Override: OPTIONS"),
    ],
)
def test_s26_who_may_call_is_decided_by_the_route(serve, tmp_path: Path, line: str, host: str):
    (tmp_path / "keys").write_text("sk-one\n")
    server = serve(api_keys_file=tmp_path / "keys")
    answer = raw(server, f"{line} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    assert b'"data"' not in answer
    assert b"scripted" not in answer
    assert int(answer.split()[1]) in (400, 401, 404)


def test_s27_every_route_needs_a_key_but_those_named(serve, tmp_path: Path):
    (tmp_path / "keys").write_text("sk-one\n")
    server = serve(api_keys_file=tmp_path / "keys", data_dir=tmp_path / "data")
    routes = {
        (route.method, route.resource.canonical)
        for route in make_app(server.context).router.routes()
        if route.resource is not None
    }
    assert len(routes) > 20
    answers = {
        (method, path): call(server, path.replace("{", "").replace("}", ""), method=method)[0]
        for method, path in routes
        if method != "HEAD"
    }
    opened = {path for (_, path), status in answers.items() if status != 401}
    assert opened == {"/", "/health", "/ready"}
    assert call(server, "/admin/anything")[0] == 401  # and routes that are not there tell nothing either


def test_s34_what_only_servers_say_to_each_other_is_dropped(serve):
    engine = ScriptedEngine(says("ok"))
    server = serve(engine)
    headers = {"x-prefiller-host-port": "10.0.0.1:80", "x-data-parallel-rank": "3", "x-kv-transfer": "1"}
    transfer = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 80}
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", CHAT)):
        status, answer, sent = call(server, path, {**body, "kv_transfer_params": transfer}, headers=headers)
        assert status == 200
        assert "10.0.0.1" not in json.dumps(answer) + json.dumps(sent)
    for _, params, options in engine.seen:
        assert "10.0.0.1" not in repr(params)
        assert options == {"priority": 0, "cache_salt": None}


# S25: keys


def test_s25_every_key_is_compared_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "keys").write_text("sk-one\nsk-two\nsk-three\n")
    keys = Keys(tmp_path / "keys")
    compared: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def counting(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    for key in ("sk-one", "sk-three", "s", "", "x" * 10_000, "sk-\udcff"):
        compared.clear()
        assert keys.allow(key) == (key in ("sk-one", "sk-three"))
        assert compared == [(32, 32)] * 3


# S09, S10, S14, S15, S18, S28: requests


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_s09_templates_do_not_come_with_requests(serve, path: str):
    body = {**CHAT, "prompt": "a", "chat_template": "{{ ''.__class__ }}"}
    body.pop("prompt" if path != "/v1/completions" else "messages")
    error = refused(serve(), path, body)
    assert (error["param"], error["code"]) == ("chat_template", "unsupported_parameter")


DEEP: Any = {"type": "integer"}
for _ in range(200):
    DEEP = {"type": "array", "items": DEEP}


def tool(parameters: Any) -> dict[str, Any]:
    return {
        **CHAT,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
        "tool_choice": "required",
    }


def forms(**form: Any) -> dict[str, Any]:
    return {**CHAT, "structured_outputs": form}


@pytest.mark.parametrize(
    "body",
    [
        tool({"type": "something_else"}),
        tool({"type": 5}),
        tool({"type": "object", "properties": {"a": {"type": "string", "pattern": "(("}}}),
        tool([]),
        tool({"$ref": "#/nowhere"}),
        tool(DEEP),
        forms(regex="(("),
        forms(regex="a\0b"),
        forms(regex=""),
        forms(regex="(a{1000}){1000}"),
        forms(regex=5),
        forms(grammar=""),
        forms(grammar="start: nowhere"),
        forms(grammar="start: \0"),
        forms(json={"type": "nonsense"}),
        forms(json="{"),
        forms(json={"$ref": "http://127.0.0.1:1/schema"}),
        forms(json=DEEP),
        forms(json=[]),
        forms(choice=[]),
        forms(choice=["a\0"]),
        forms(choice="ab"),
        forms(json_object=5),
        forms(structural_tag="x"),
        forms(regex="a", json={}),
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
        {**CHAT, "response_format": {"type": "structural_tag"}},
    ],
)
def test_s10_s14_malformed_forms_are_400_and_the_engine_lives(tiny: Server, body: dict[str, Any]):
    refused(tiny, "/v1/chat/completions", body)
    assert tiny.context.service.healthy
    assert alive(tiny)


def test_s14_a_form_that_is_switched_off_is_none(tiny: Server):
    for form in ({"json_object": False}, {"regex": None}, {}):
        status, *_ = call(tiny, "/v1/chat/completions", {**CHAT, "structured_outputs": form, "max_tokens": 2})
        assert status == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_s15_serialised_embeddings_are_not_taken(serve, tmp_path: Path, path: str):
    bomb = pickle.dumps(_Bomb(str(tmp_path / "ran"))).hex()
    error = refused(serve(), path, {"prompt": "a", **CHAT, "prompt_embeds": bomb})
    assert (error["param"], error["code"]) == ("prompt_embeds", "unsupported_parameter")
    assert not (tmp_path / "ran").exists()


def test_s18_nothing_is_fetched_from_text(serve):
    with socket.create_server(("127.0.0.1", 0)) as target:
        target.settimeout(0.3)
        url = f"http://127.0.0.1:{target.getsockname()[1]}/a.png"
        text = f"![picture]({url}) <img src='{url}'> {url}"
        server = serve(ScriptedEngine(says("ok")))
        assert call(server, "/v1/completions", {"prompt": text})[0] == 200
        for content in (text, [{"type": "text", "text": text}]):
            body = {"messages": [{"role": "user", "content": content}]}
            assert call(server, "/v1/chat/completions", body)[0] == 200
        assert call(server, "/v1/responses", {"input": text})[0] == 200
        with pytest.raises(TimeoutError):
            target.accept()


_PENALTIES = [{"presence_penalty": 2}, {"frequency_penalty": -2}, {"repetition_penalty": 0.1}]
_FEATURES: list[dict[str, Any]] = [
    {"logprobs": 5},
    {"prompt_logprobs": 1},
    {"echo": True, "logprobs": 0},
    {"n": 3},
    {"seed": -(2**63)},
    {"min_tokens": 4, "ignore_eos": True},
    {"stop": ["\ufffd", "é", "\0"]},
    {"stop_token_ids": [0, EOS]},
    {"logit_bias": {"0": 100, "259": -100}},
    {"allowed_token_ids": [97]},
    {"bad_words": ["a", "b c"]},
    {"top_k": 1, "top_p": 1e-9, "min_p": 1},
    {"temperature": 0},
    {"temperature": 2},
    {"structured_outputs": {"regex": "[ab]{4}"}},
    {"structured_outputs": {"choice": ["aa", "b"]}},
    {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"prompt": [1, 2, 3, 1, 2, 3] * 30},
]


def test_s28_penalties_go_with_everything(tiny: Server):
    results: list[tuple[dict[str, Any], int, Any]] = []

    def ask(body: dict[str, Any]) -> None:
        status, answer, _ = call(tiny, "/v1/completions", body)
        results.append((body, status, answer))

    bodies = [
        {"prompt": "a b a b", "max_tokens": 4, **penalty, **feature}
        for penalty, feature in itertools.product(_PENALTIES, _FEATURES)
    ]
    bodies.append({"prompt": "a", "max_tokens": 4, **_PENALTIES[0], **_PENALTIES[1], **_PENALTIES[2]})
    threads = [threading.Thread(target=ask, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(results) == len(bodies)
    assert [(body, answer) for body, status, answer in results if status != 200] == []
    assert tiny.context.service.healthy
    assert tiny.wait_idle()


# S23, S24: the prefix cache


def test_s23_blocks_are_named_by_all_that_made_them():
    script = (
        "from jaxinfer.kv.prefix import BlockHasher, root_digest\n"
        "found = []\nBlockHasher(2).extend(found, [1, 2, None and 0 or 3, 4], 2, root_digest(b's', b'e'))\n"
        "print([d.hex() for d in found])"
    )
    seeds = ({"PYTHONHASHSEED": "0"}, {"PYTHONHASHSEED": "12345"})
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, **seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in seeds
    }
    assert len(found) == 1  # not Python's hash

    def names(tokens: list[int], salt: bytes = b"s", extra: bytes = b"e") -> list[bytes]:
        digests: list[bytes] = []
        BlockHasher(2).extend(digests, tokens, 2, root_digest(salt, extra))
        return digests

    base = names([1, 2, 3, 4])
    assert {len(d) for d in base} == {hashlib.sha256().digest_size}
    others = [names([2, 1, 3, 4]), names([1, 2, 3, 4], salt=b"t"), names([1, 2, 3, 4], extra=b"f")]
    assert all(set(base).isdisjoint(other) for other in others)
    assert set(names([3, 4, 1, 2])).isdisjoint(base)  # the same block after another


def test_s24_two_salts_share_nothing_and_no_salt_is_one_of_its_own(tiny: Server):
    prompt = [random.Random(24).randrange(256) for _ in range(200)]

    def cached(salt: str | None) -> int:
        status, answer, _ = call(
            tiny, "/v1/completions", {"prompt": prompt, "max_tokens": 1, "cache_salt": salt}
        )
        assert status == 200
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(salt) for salt in ("a", "b", None)] == [0, 0, 0]
    assert all(cached(salt) >= 128 for salt in ("a", "b", None))
    for salt in ("", "a/b", "a@b", "x" * 129):
        refused(tiny, "/v1/completions", {"prompt": "a", "cache_salt": salt})


# S36: what is asked for and given up at any moment


def test_s36_a_request_given_up_at_the_moment_it_is_taken_leaves_the_engine():
    engine = ScriptedEngine(says("x" * 1000), step_seconds=0.005)

    async def give_up() -> None:
        service = EngineService(engine)
        service.start()
        task = asyncio.create_task(service.submit("r", [1], SamplingParams(max_tokens=1000)))
        await asyncio.sleep(0)
        while not engine.requests:
            time.sleep(0.001)  # the loop stands still: it is told only after this that the request was taken
        asyncio.get_running_loop().call_soon(task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(200):
            if not engine.requests:
                break
            await asyncio.sleep(0.005)
        await service.stop()

    asyncio.run(give_up())
    assert engine.aborted == ["r"]


def test_s36_clients_that_leave_at_any_moment_leave_nothing(serve):
    """Unlike the soak's, these requests would run for minutes if they were forgotten."""
    engine = ScriptedEngine(lambda *_: [97] * 4000, step_seconds=0.01)
    server = serve(engine)
    host, port = server.url.removeprefix("http://").split(":")
    rng = random.Random(0)

    def leave(i: int) -> None:
        body = json.dumps(
            {"prompt": ["a", "b"], "max_tokens": 2000, "n": 1 + i % 2, "stream": i % 3 == 0}
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(head.encode() + body)
            time.sleep(rng.random() * 0.1)

    for _ in range(3):
        threads = [threading.Thread(target=leave, args=(i,)) for i in range(60)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert server.wait_idle(5)
    assert not server.context.service._streams
