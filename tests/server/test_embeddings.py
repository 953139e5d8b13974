"""Embeddings with a real model, through the real client."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import numpy as np
import openai
import pytest
from scripted import TOKENIZER, serving
from test_requests import call, refused
from tiny_checkpoint import write_checkpoint

from jaxinfer import LLM
from jaxinfer.config.server import ServerConfig
from jaxinfer.serve import served_model


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_checkpoint(tmp_path_factory.mktemp("model"))
    return LLM(folder, warm_up=False, max_num_seqs=2, max_model_len=256)


@pytest.fixture(scope="module")
def server(llm: LLM):
    with serving(llm.engine, served_model(llm, ServerConfig(served_model_name="tiny"))) as running:
        yield running


def expected(llm: LLM, text: str, pooling: str = "mean") -> np.ndarray:
    hidden = llm.hidden_states(TOKENIZER.encode(text), [-1])[-1].astype(np.float64)
    vector = hidden.mean(0) if pooling == "mean" else hidden[-1]
    return vector / np.linalg.norm(vector)


def test_vectors_are_pooled_hidden_states(llm: LLM, server, client_of):
    client = client_of(server)
    answer = client.embeddings.create(model="tiny", input=["hello", "other"])  # the client asks for base64
    assert [d.index for d in answer.data] == [0, 1]
    for item, text in zip(answer.data, ("hello", "other"), strict=True):
        np.testing.assert_allclose(item.embedding, expected(llm, text), atol=1e-6)
    assert answer.usage.prompt_tokens == 10
    as_numbers = client.embeddings.create(model="tiny", input="hello", encoding_format="float")
    np.testing.assert_allclose(as_numbers.data[0].embedding, answer.data[0].embedding, atol=1e-7)
    ids = client.embeddings.create(model="tiny", input=[104, 101], extra_body={"pooling": "last"})
    np.testing.assert_allclose(ids.data[0].embedding, expected(llm, "he", "last"), atol=1e-6)
    body = {"input": "hello", "normalize": False}
    raw = call(server, "/v1/embeddings", body)[1]["data"][0]["embedding"]
    assert abs(np.linalg.norm(raw) - 1) > 1e-3


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[1], [99999]]}, "input"),
        ({"input": "x" * 300}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 5}, "dimensions"),
        ({"pooling": "max"}, "pooling"),
    ],
)
def test_what_cannot_be_embedded(server, change: dict[str, Any], param: str):
    assert refused(server, "/v1/embeddings", {"input": "hello", **change})["param"] == param


def test_another_model(server, client_of):
    with pytest.raises(openai.NotFoundError):
        client_of(server).embeddings.create(model="other", input="x")


def test_one_text_at_a_time_even_when_clients_leave(llm: LLM):
    """A client that comes and goes must not start one computation after another beside each other."""
    running: list[int] = []
    most: list[int] = []
    go_on = threading.Event()

    def slow(ids: list[int]) -> np.ndarray:
        running.append(1)
        most.append(len(running))
        go_on.wait(10)
        running.pop()
        return np.ones((len(ids), 4), np.float32)

    model = served_model(llm, ServerConfig(served_model_name="tiny"))
    model.hidden_states = slow
    with serving(llm.engine, model) as server:
        host, port = server.url.removeprefix("http://").rsplit(":", 1)
        body = b'{"input": "a"}'
        head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        for _ in range(5):
            with socket.create_connection((host, int(port)), timeout=5) as connection:
                connection.sendall(head + body)
                time.sleep(0.1)
        go_on.set()
        assert call(server, "/v1/embeddings", {"input": "a"})[0] == 200
    assert max(most) == 1
    assert len(most) < 6  # those whose clients had left before their turn were not begun
