"""What tools that know nothing of this server rely on, and clients that keep to nothing."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import resource
import socket
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import EOS, write_byte_tokenizer
from scripted import ScriptedEngine, Server, says
from test_requests import CHAT, call, refused

from jaxinfer.server.lifecycle import raise_file_limit
from jaxinfer.text.tokenizer import Tokenizer


def connect(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=10)


def head(path: str = "/v1/completions", **headers: str | int) -> bytes:
    fields = {"Host": "x", "Content-Type": "application/json", **headers}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode()


def answer_to(server: Server, *parts: bytes) -> bytes:
    answer = b""
    with connect(server) as connection:
        for part in parts:
            connection.sendall(part)
        while part := connection.recv(65536):
            answer += part
    return answer


# Tools


@pytest.mark.parametrize("as_ids", [False, True])
def test_lm_eval_finds_a_score_for_each_prompt_token_and_one_more(serve, as_ids: bool):
    """It sums token_logprobs[context:-1] of choices in the order of their index, whatever token came last."""
    texts = ["a longer text", "ab", "é"]
    prompts = [list(text.encode()) for text in texts] if as_ids else texts
    body = {"prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    status, answer, _ = call(serve(ScriptedEngine(lambda *_: [EOS])), "/v1/completions", body)
    assert status == 200
    for text, choice in zip(texts, sorted(answer["choices"], key=lambda c: c["index"]), strict=True):
        scores, tops = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
        assert len(scores) == len(tops) == len(text.encode()) + 1
        assert scores[0] is tops[0] is None
        assert all(score == max(top.values()) for score, top in zip(scores[1:-1], tops[1:-1], strict=True))


def test_lm_eval_finds_the_tokenizer_over_http(serve):
    server = serve()
    status, info, _ = call(server, "/tokenizer_info")
    assert status == 200
    for name in ("eos_token", "chat_template"):
        assert info[name]
    body = {"prompt": info["eos_token"], "add_special_tokens": False}
    assert call(server, "/tokenize", body)[1]["tokens"] == [EOS]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_bench_clients_count_chunks_tokens_and_the_end(serve, path: str):
    """vllm bench serve and guidellm: chunks with a choice are tokens, the one without has the usage."""
    body: dict[str, Any] = {
        **(CHAT if "chat" in path else {"prompt": "hello", "logprobs": None, "repetition_penalty": 1.0}),
        "ignore_eos": True,
        "max_tokens": 6,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    _, answer, _ = call(serve(ScriptedEngine(says("abcdef"))), path, body)
    *parts, done, rest = answer.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(part.removeprefix("data: ")) for part in parts]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 6
    assert chunks[-1]["usage"]["prompt_tokens"] > 0
    tokens = [
        c
        for chunk in chunks[:-1]
        for c in chunk["choices"]
        if c.get("text") or c.get("delta", {}).get("content")
    ]
    assert len(tokens) == 6
    assert not any(chunk.get("usage") for chunk in chunks[:-1])


# Bodies


def test_a_body_that_is_too_large_is_refused_before_it_is_sent(serve):
    server = serve(max_body_bytes=1000)
    start = time.perf_counter()
    with connect(server) as connection:
        connection.sendall(head(Content_Length=10**15) + b"{")
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")
    assert time.perf_counter() - start < 5
    assert call(server, "/health")[0] == 200


def test_a_body_that_does_not_come_ends_its_request(serve):
    server = serve(request_timeout_s=0.2)
    with connect(server) as connection:
        connection.sendall(head(Content_Length=1000) + b'{"prompt')
        assert connection.recv(100).startswith(b"HTTP/1.1 408 ")


def test_bodies_may_be_packed(serve):
    server = serve(ScriptedEngine(says("ok")), max_body_bytes=100_000)
    packed = gzip.compress(b'{"prompt": "a"}')
    encoding = {"Content_Encoding": "gzip", "Connection": "close"}
    answer = answer_to(server, head(Content_Length=len(packed), **encoding), packed)
    assert answer.startswith(b"HTTP/1.1 200 ")
    bomb = gzip.compress(b"[" + b" " * 50_000_000)
    assert len(bomb) < 100_000
    answer = answer_to(server, head(Content_Length=len(bomb), **encoding), bomb)
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_what_is_wrong_in_http_itself_is_400_and_no_noise(serve, caplog: pytest.LogCaptureFixture):
    server = serve(ScriptedEngine(says("ok")))
    close = {"Connection": "close"}
    with caplog.at_level(logging.WARNING):
        for request in (
            head(Content_Length=7, Content_Encoding="gzip", **close) + b"notgzip",
            head(Transfer_Encoding="chunked") + b"ZZ\r\nabc\r\n0\r\n\r\n",
            head(Transfer_Encoding="chunked") + b"f" * 20 + b"\r\nabc\r\n",
            head(Transfer_Encoding="chunked", Content_Length=5) + b"0\r\n\r\n",
            head(Content_Length=-5) + b"abc",
            b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
            b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
            b"\0\xff\r\n\r\n",
        ):
            answer = answer_to(server, request)
            assert int(answer.split()[1]) == 400, request
            assert b"Traceback" not in answer
    assert not caplog.records
    assert call(server, "/v1/completions", {"prompt": "a"})[0] == 200


def test_requests_on_one_connection_are_answered_in_order(serve):
    server = serve()
    bodies = [json.dumps({"prompt": str(i)}).encode() for i in range(20)]
    requests = [head(Content_Length=len(body)) + body for body in bodies]
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answer = answer_to(server, b"".join(requests) + last).decode()
    found = [json.loads(line[: line.rindex("}") + 1]) for line in answer.split("\r\n\r\n")[1:]]
    assert [a["choices"][0]["text"] for a in found[:-1]] == [str(i) for i in range(20)]


# Work off the event loop


def test_a_long_text_is_tokenised_beside_other_work(tmp_path: Path):
    """The GIL is let go meanwhile, so that streams go on and the engine steps."""
    write_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    stop = threading.Event()
    longest = [0.0]

    def tick() -> None:
        last = time.perf_counter()
        while not stop.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            longest[0], last = max(longest[0], now - last), now

    ticker = threading.Thread(target=tick)
    ticker.start()
    start = time.perf_counter()
    count = len(tokenizer.encode("hello world " * 150_000))
    seconds = time.perf_counter() - start
    stop.set()
    ticker.join()
    assert count == 1_800_000
    assert longest[0] < max(seconds / 2, 0.2)


def test_when_every_worker_is_busy_requests_are_429(serve):
    server = serve(ScriptedEngine(says("ok")), template_timeout_s=0.3)
    gate = threading.Event()
    jobs: list[Future[bool]] = [server.context._workers.submit(gate.wait, 20) for _ in range(4)]
    status, answer, headers = call(server, "/v1/completions", {"prompt": "a"})
    assert (status, answer["error"]["code"], headers["retry-after"]) == (429, "engine_overloaded", "1")
    gate.set()
    assert all(job.result() for job in jobs)
    assert call(server, "/v1/completions", {"prompt": "a"})[0] == 200


def test_slow_grammars_delay_nobody_else(serve):
    server = serve(ScriptedEngine(says("ok")), template_timeout_s=5)
    gate = threading.Event()
    jobs = [server.context._compilers.submit(gate.wait, 20) for _ in range(8)]
    assert call(server, "/v1/completions", {"prompt": "a"})[0] == 200
    gate.set()
    assert all(job.result() for job in jobs)


def test_a_template_that_takes_too_long_is_the_requests_own_fault(serve):
    server = serve(ScriptedEngine(says("ok")), template_timeout_s=0.2)

    async def slow() -> None:
        await server.context.in_worker(lambda: time.sleep(1))

    with pytest.raises(Exception, match=r"took more than 0\.2 s"):
        asyncio.run_coroutine_threadsafe(slow(), server.loop).result(10)
    assert refused(server, "/v1/completions", {"prompt": ""})["param"] == "prompt"


def test_as_many_connections_as_the_system_allows():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] <= 512:
        pytest.skip("the hard limit is low here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        raise_file_limit()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert hard == before[1]
        assert soft == (65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
