"""Streams as clients and bench tools read them; B-numbers are public bug reports of other servers."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from typing import Any

import openai
import pytest
from byte_tokenizer import EOS
from scripted import NAN, ScriptedEngine, Server, says


def events(server: Server, path: str, body: dict[str, Any]) -> list[str]:
    """The data of every event of a streamed answer, keep-alive comments left out."""
    request = urllib.request.Request(
        server.url + path,
        json.dumps({**body, "stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        raw = response.read().decode()
    assert raw.endswith("\n\n")
    blocks = [block for block in raw.split("\n\n") if block and not block.startswith(":")]
    assert all(block.startswith("data: ") for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


def chunks(server: Server, path: str = "/v1/chat/completions", **body: Any) -> list[dict[str, Any]]:
    if "completions" in path and "chat" not in path:
        body = {"prompt": "hello", **body}
    else:
        body = {"messages": [{"role": "user", "content": "hello"}], **body}
    data = events(server, path, {"max_tokens": 64, **body})
    assert data[-1] == "[DONE]"
    assert data.count("[DONE]") == 1
    return [json.loads(item) for item in data[:-1]]


def text_of(parts: list[dict[str, Any]], index: int = 0) -> str:
    texts = []
    for part in parts:
        for choice in part["choices"]:
            if choice["index"] == index:
                texts.append(choice["delta"].get("content", "") if "delta" in choice else choice["text"])
    return "".join(texts)


def test_a_chat_stream_has_role_text_one_finish_and_done(serve):
    parts = chunks(serve(ScriptedEngine(says("Hi there"))))
    assert {p["object"] for p in parts} == {"chat.completion.chunk"}
    assert len({(p["id"], p["created"], p["model"]) for p in parts}) == 1
    assert parts[0]["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert text_of(parts) == "Hi there"
    assert all("role" not in p["choices"][0]["delta"] for p in parts[1:])
    # B05: present and null on every chunk but one.
    assert [p["choices"][0]["finish_reason"] for p in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1]["choices"][0]["finish_reason"] == "stop"
    assert all("usage" not in p for p in parts)


def test_the_first_chunk_comes_with_the_first_token(serve):
    """Bench clients (vllm bench serve, guidellm) take its arrival for the time to first token."""
    engine = ScriptedEngine(says("Hi"))
    engine.gate.clear()
    server = serve(engine, keep_alive_s=0.05)
    body = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        assert response.readline() == b": keep-alive\n"  # the head is out, and nothing but comments
        engine.gate.set()
        lines = [line for line in response if line.startswith(b"data: ")]
    assert b'"role":"assistant"' in lines[0]
    assert b'"content":"H"' in lines[1]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_b07_usage_once_if_asked_and_never_else(serve, path: str):
    server = serve(ScriptedEngine(says("abc")))
    parts = chunks(server, path, stream_options={"include_usage": True})
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"]["completion_tokens"] == 4
    assert [p for p in parts if p.get("usage")] == [parts[-1]]
    assert not [p for p in chunks(server, path) if "usage" in p or not p["choices"]]
    every = chunks(server, path, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [p["usage"]["completion_tokens"] for p in every if p.get("usage")]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert len(counts) >= 4


def test_several_choices_each_have_their_own_finish(serve):
    engine = ScriptedEngine(lambda prompt, params, index: [*b"abc"[: index + 1], EOS])
    parts = chunks(serve(engine), n=3, temperature=1)
    for index in range(3):
        assert text_of(parts, index) == "abc"[: index + 1]
        reasons = [c["finish_reason"] for p in parts for c in p["choices"] if c["index"] == index]
        assert reasons.count("stop") == 1
        assert reasons.count(None) == len(reasons) - 1


def test_prompts_of_a_completion_are_choices(serve):
    parts = chunks(serve(), "/v1/completions", prompt=["one", "two"], n=2, temperature=1)
    assert [text_of(parts, i) for i in range(4)] == ["one", "one", "two", "two"]


@pytest.mark.parametrize("logprobs", [None, 1])
def test_echo_puts_the_prompt_first(serve, logprobs):
    parts = chunks(serve(ScriptedEngine(says("!?"))), "/v1/completions", echo=True, logprobs=logprobs)
    assert text_of(parts) == "hello!?"
    if logprobs:
        shown = [p["choices"][0]["logprobs"] for p in parts]
        assert [t for s in shown if s for t in s["tokens"]] == [*"hello!?", "<eos>"]
        assert [o for s in shown if s for o in s["text_offset"]] == [0, 1, 2, 3, 4, 5, 6, 7]
        assert shown[0]["token_logprobs"][0] is None


def test_b01_nothing_of_a_stop_string_leaves(serve):
    engine = ScriptedEngine(says("say ABCDEFGHIJKL"))
    parts = chunks(serve(engine), stop=["DEFGHIJ"])
    assert text_of(parts) == "say ABC"
    assert parts[-1]["choices"][0] == {
        **{"index": 0, "delta": {}, "logprobs": None},
        **{"finish_reason": "stop", "stop_reason": "DEFGHIJ"},
    }
    # Held back text is flushed when another ending comes first.
    assert text_of(chunks(serve(ScriptedEngine(says("say ABCDEF"))), stop=["DEFGHIJ"])) == "say ABCDEF"


def test_b02_no_chunk_ends_inside_a_character(serve):
    parts = chunks(serve(ScriptedEngine(says("a本😀b"))))
    assert text_of(parts) == "a本😀b"
    assert not [p for p in parts if "\ufffd" in text_of([p])]
    unfinished = ScriptedEngine(lambda *_: [*b"a", *"本".encode()[:2], EOS])
    assert text_of(chunks(serve(unfinished))) == "a\ufffd"


def test_b08_a_failure_after_the_head_is_an_event_and_no_finish(serve):
    server = serve(ScriptedEngine(lambda *_: [*b"ab", NAN]))
    data = events(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    assert data[-1] == "[DONE]"
    error = json.loads(data[-2])["error"]
    assert "NaN" in error["message"]
    assert error["type"] == "server_error"
    assert not [item for item in data[:-2] if json.loads(item)["choices"][0]["finish_reason"]]


def test_an_engine_that_dies_tells_no_secret_and_ends_every_stream(serve):
    engine = ScriptedEngine(says("long " * 100), step_seconds=0.002)
    server = serve(engine)
    engine.fail_at = 20
    data = events(server, "/v1/completions", {"prompt": "x", "max_tokens": 400})
    assert data[-1] == "[DONE]"
    assert "error" in json.loads(data[-2])
    assert "secret" not in "".join(data)
    for path in ("/health", "/ready"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(server.url + path, timeout=10)
        assert caught.value.code == 503
        caught.value.close()


def test_a_silent_stream_is_kept_alive(serve):
    engine = ScriptedEngine(says("x"))
    engine.gate.clear()
    server = serve(engine, keep_alive_s=0.05)
    threading.Timer(0.4, engine.gate.set).start()
    request = urllib.request.Request(
        server.url + "/v1/completions",
        json.dumps({"prompt": "a", "stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        raw = response.read().decode()
    assert raw.count(": keep-alive\n\n") >= 3
    assert raw.endswith("data: [DONE]\n\n")


def post_raw(
    server: Server, path: str, body: dict[str, Any], *, receive_buffer: int | None = None
) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(10)
    connection.connect((host, int(port)))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_b23_a_client_that_leaves_frees_its_request(serve, stream: bool):
    engine = ScriptedEngine(says("x" * 4000), step_seconds=0.005)
    server = serve(engine)
    connection = post_raw(server, "/v1/completions", {"prompt": "a", "max_tokens": 4000, "stream": stream})
    assert server.wait_busy()
    time.sleep(0.05)
    connection.close()
    assert server.wait_idle(1.0)
    assert len(engine.aborted) == 1


def test_a_client_that_does_not_read_is_dropped(serve):
    engine = ScriptedEngine(lambda *_: [*b"y" * 4000])
    server = serve(engine, max_unread_bytes=64 * 1024)
    # A small receive window, and a response of far more than the kernel's buffers hold.
    body = {"prompt": ["a"] * 100, "max_tokens": 3900, "stream": True, "ignore_eos": True}
    with post_raw(server, "/v1/completions", body, receive_buffer=4096):
        assert server.wait_busy()
        assert server.wait_idle(60)
        assert engine.aborted


def test_the_real_client_streams(serve, client_of):
    client = client_of(serve(ScriptedEngine(says("Grüße, Welt"))))
    stream = client.chat.completions.create(
        model="scripted",
        messages=[{"role": "user", "content": "hello"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    parts = list(stream)
    assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == "Grüße, Welt"
    usage = parts[-1].usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + len("Grüße, Welt".encode()) + 1


def test_the_real_client_sees_a_broken_stream_as_an_error(serve, client_of):
    client = client_of(serve(ScriptedEngine(lambda *_: [*b"ab", NAN])))
    with pytest.raises(openai.APIError, match="NaN"):
        for _ in client.completions.create(model="scripted", prompt="x", stream=True):
            pass


def test_a_deadline_ends_a_stream_as_streams_end(serve):
    engine = ScriptedEngine(says("x" * 4000), step_seconds=0.01)
    server = serve(engine, request_timeout_s=0.3)
    data = events(server, "/v1/completions", {"prompt": "a", "max_tokens": 4000})
    assert data[-1] == "[DONE]"
    assert "longer than the server allows" in json.loads(data[-2])["error"]["message"]
    assert server.wait_idle(1.0)
