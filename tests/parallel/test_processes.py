"""Several processes run one model: the tokens of one process, and an end with a reason when one of them is killed."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import requests
from group_job import answers
from oracles import load_oracle
from tiny_checkpoint import write_checkpoint

from jaxinfer import LLM
from jaxinfer.config.processes import ProcessConfig
from jaxinfer.errors import ConfigError

JOB = Path(__file__).with_name("group_job.py")
SMALL = ["--max-model-len", "64", "--max-num-seqs", "2", "--tp", "2"]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(*command: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def end_of(process: subprocess.Popen[str], timeout: float = 60) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, out, err


@pytest.mark.parametrize(("name", "options"), [("llama3", {"tp": 4}), ("qwen3_moe", {"ep": 2})])
def test_the_same_as_one_process(name: str, options: dict[str, int]):
    oracle = load_oracle(name)
    port = free_port()
    group = [start(JOB, port, 2, i, oracle.path, json.dumps(options)) for i in range(2)]
    ends = [end_of(process, 120) for process in group]
    assert [code for code, _, _ in ends] == [0, 0], ends
    found = json.loads(ends[0][1])  # and nothing else is on stdout
    wanted = answers(LLM(oracle.path, warm_up=False, max_num_seqs=4, max_model_len=64))
    assert found["tokens"] == wanted["tokens"]
    for key in ("logits", "states"):
        np.testing.assert_allclose(found[key], wanted[key], rtol=1e-4, atol=1e-3)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[tuple[str, list[subprocess.Popen[str]]]]:
    """The URL of a server of two processes, and these."""
    model, port, at = write_checkpoint(folder), free_port(), free_port()
    common = ["-m", "jaxinfer.serve", "--model", model, *SMALL, "--port", str(at)]
    group = [
        start(*common, "--coordinator", f"127.0.0.1:{port}", "--num-processes", "2", "--process-id", str(i))
        for i in range(2)
    ]
    url = f"http://127.0.0.1:{at}"
    try:
        for _ in range(600):
            with contextlib.suppress(requests.ConnectionError):
                if requests.get(f"{url}/ready").status_code == 200:
                    break
            assert all(process.poll() is None for process in group), [end_of(p) for p in group]
            time.sleep(0.1)
        yield url, group
    finally:
        for process in group:
            process.kill()
            process.communicate()


def test_a_server_of_two_processes(tmp_path: Path):
    with served(tmp_path) as (url, group):
        body = {
            "prompt": "hello",
            "max_tokens": 8,
            "temperature": 0,
            "structured_outputs": {"regex": "[ab]{8}"},
        }
        answer = requests.post(f"{url}/v1/completions", json=body)
        assert answer.status_code == 200
        assert set(answer.json()["choices"][0]["text"]) <= {"a", "b"}
        assert requests.post(f"{url}/v1/embeddings", json={"input": "hello"}).status_code == 200
        group[0].send_signal(signal.SIGTERM)
        assert [end_of(process, 30)[0] for process in group] == [0, 0]


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_ends_the_group(tmp_path: Path, killed: int):
    with served(tmp_path) as (url, group):
        body = {"prompt": "hello", "max_tokens": 50, "ignore_eos": True, "stream": True}
        with requests.post(f"{url}/v1/completions", json=body, stream=True) as stream:
            next(stream.iter_lines())
            start = time.monotonic()
            group[killed].kill()
            code, _, err = end_of(group[1 - killed], 20)
        assert time.monotonic() - start < 10
        assert code == 1
        assert f"process {killed} of the group ended" in err


def test_a_process_that_cannot_load_says_why(tmp_path: Path):
    port = free_port()
    model = write_checkpoint(tmp_path)
    group = [start(JOB, port, 2, i, [model, tmp_path / "none"][i], '{"tp": 2}') for i in range(2)]
    (code, _, err), (other, _, reason) = (end_of(process) for process in group)
    assert code == 1
    assert "process 1 of the group ended: no model" in err
    assert other == 1
    assert "error: no model" in reason


def test_settings_that_differ(tmp_path: Path):
    port = free_port()
    model = write_checkpoint(tmp_path)
    group = [start(JOB, port, 2, i, model, json.dumps({"tp": 2, "page_size": 8 * (1 + i)})) for i in range(2)]
    ends = [end_of(process) for process in group]
    assert all(code == 1 for code, _, _ in ends)
    assert "process 1 has another model or other settings than process 0" in ends[0][2] + ends[1][2]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_processes": 2}, "need coordinator"),
        ({"coordinator": "auto", "process_id": 0}, "need coordinator"),
        ({"coordinator": "host"}, "HOST:PORT"),
        ({"coordinator": "host:0", "num_processes": 2, "process_id": 0}, "HOST:PORT"),
        ({"coordinator": "host:99999", "num_processes": 2, "process_id": 0}, "HOST:PORT"),
        ({"coordinator": "h:1"}, "num_processes must be"),
        ({"coordinator": "h:1", "num_processes": 2}, "process_id must be 0 to 1"),
        ({"coordinator": "h:1", "num_processes": 2, "process_id": 2}, "process_id must be 0 to 1"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        ProcessConfig(**fields)


def test_processes_that_do_not_divide_the_devices():
    with pytest.raises(ConfigError, match="3 processes do not divide 2 devices"):
        LLM("tiny-llama", tp=2, coordinator="127.0.0.1:1", num_processes=3, process_id=0)
