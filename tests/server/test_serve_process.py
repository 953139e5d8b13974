"""The server as users start it: a process, a real model, signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tiny_checkpoint import write_checkpoint


class Process:
    def __init__(self, *arguments: str, cache: Path):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jaxinfer.serve", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAXINFER_CACHE": str(cache)},
        )
        assert self.process.stderr is not None
        self.lines: list[str] = []
        self.url = ""
        ready = threading.Event()

        def read() -> None:
            assert self.process.stderr is not None
            for line in self.process.stderr:
                self.lines.append(line)
                if found := re.search(r"serving \S+ at (http://\S+)", line):
                    self.url = found[1]
                    ready.set()
            ready.set()

        self.reader = threading.Thread(target=read, daemon=True)
        self.reader.start()
        assert ready.wait(240)

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = self.process.wait(30)
        self.reader.join(5)
        return code


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def server(model: Path, cache: Path) -> Iterator[Process]:
    process = Process(
        *("--model", str(model), "--port", "0", "--served-model-name", "tiny"),
        *("--max-num-seqs", "4", "--max-model-len", "512"),
        cache=cache,
    )
    assert process.url, process.lines
    yield process
    process.process.kill()
    process.process.wait()
    assert process.process.stderr is not None
    process.reader.join(5)
    process.process.stderr.close()


def test_it_answers_drains_and_ends(server: Process):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with client:
        chat: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
        first = client.chat.completions.create(**chat, max_tokens=8, seed=1, temperature=1)
        again = client.chat.completions.create(**chat, max_tokens=8, seed=1, temperature=1)
        assert first.choices[0].message.content == again.choices[0].message.content
        assert again.usage is not None
        assert again.usage.prompt_tokens_details is not None
        assert again.usage.prompt_tokens_details.cached_tokens
        # A request in progress outlives SIGTERM; its answer is whole.
        stream = client.completions.create(
            model="tiny",
            prompt="x",
            max_tokens=300,
            stream=True,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        parts = [next(iter(stream))]
        server.process.send_signal(signal.SIGTERM)
        parts += list(stream)
        assert parts[-1].choices[0].finish_reason == "length"
    assert server.process.wait(30) == 0
    server.reader.join(5)
    log = [json.loads(line) for line in server.lines if line.startswith("{")]
    assert [entry["status"] for entry in log] == [200, 200, 200]
    assert log[-1]["completion_tokens"] == 300
    assert "Traceback" not in "".join(server.lines)


def test_interrupt_ends_it_too(server: Process):
    with urllib.request.urlopen(f"{server.url}/ready", timeout=10) as answer:
        assert answer.status == 200
    start = time.perf_counter()
    assert server.end(signal.SIGINT) == 0
    assert time.perf_counter() - start < 10
    assert "Traceback" not in "".join(server.lines)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ((), 2, "--model is required"),
        (("--model", "tiny-llama", "--port", "99999"), 1, "port must be between"),
        (("--model", "no-such-model"), 1, "no model 'no-such-model'"),
        (("--model", "tiny-llama", "--api-keys-file", "/nonexistent"), 1, "cannot be read"),
        (("--model", "tiny-llama", "--tool-call-parser", "x"), 1, "tool_call_parser 'x' is unknown"),
        (("--modle", "x"), 2, "did you mean --model"),
    ],
)
def test_a_start_that_cannot_work_is_one_line(arguments, code: int, says: str, cache: Path):
    done = subprocess.run(
        [sys.executable, "-m", "jaxinfer.serve", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "JAXINFER_CACHE": str(cache)},
    )
    assert done.returncode == code
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error:") == 1
