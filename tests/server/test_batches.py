"""Files and batches through the real client: upload, run, read, cancel, and go on after a restart."""

from __future__ import annotations

import io
import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
from scripted import NAN, ScriptedEngine, says, serving
from test_requests import call, refused


def lines(count: int, **body: Any) -> bytes:
    return b"".join(
        json.dumps(
            {
                "custom_id": f"r{i}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"prompt": f"text {i}", "max_tokens": 50, **body},
            }
        ).encode()
        + b"\n"
        for i in range(count)
    )


def upload(client: openai.OpenAI, content: bytes) -> str:
    return client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch").id


def wait(client: openai.OpenAI, batch_id: str, *states: str, seconds: float = 20) -> Any:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        batch = client.batches.retrieve(batch_id)
        if batch.status in states:
            return batch
        time.sleep(0.02)
    raise AssertionError(f"the batch is {batch.status}: {batch}")


def results(client: openai.OpenAI, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in client.files.content(file_id).read().splitlines()]


def test_files(serve, client_of, tmp_path: Path):
    client = client_of(serve(data_dir=tmp_path))
    first = client.files.create(file=("a.jsonl", b"one\n"), purpose="batch")
    assert (first.bytes, first.filename, first.purpose, first.object) == (4, "a.jsonl", "batch", "file")
    second = client.files.create(file=("../../b", b"two"), purpose="user_data")
    assert second.filename == "b"
    assert {f.id for f in client.files.list()} == {first.id, second.id}
    assert [f.id for f in client.files.list(purpose="batch")] == [first.id]
    assert client.files.retrieve(second.id).bytes == 3
    assert client.files.content(first.id).read() == b"one\n"
    assert client.files.delete(first.id).deleted
    for method in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            method(first.id)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve("file-..%2f..%2fetc")
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("a", b"x"), purpose="evals")
    assert not list((tmp_path / "files").glob("new-*"))


def test_a_file_that_is_too_large_leaves_nothing(serve, client_of, tmp_path: Path):
    client = client_of(serve(data_dir=tmp_path, max_file_bytes=1000))
    with pytest.raises(openai.APIStatusError, match="larger than"):
        client.files.create(file=("a", b"x" * 5000), purpose="batch")
    assert not list((tmp_path / "files").iterdir())


def test_without_a_directory_the_routes_say_so(serve):
    server = serve()
    assert "--data-dir" in call(server, "/v1/files")[1]["error"]["message"]
    body = {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"}
    assert "--data-dir" in refused(server, "/v1/batches", body)["message"]


def test_a_batch_from_upload_to_results(serve, client_of, tmp_path: Path):
    engine = ScriptedEngine()
    server = serve(engine, data_dir=tmp_path)
    client = client_of(server)
    # B22: bad lines among good ones.
    bad = [
        b"not json",
        b'{"custom_id": "r1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "again"}}',
        b'{"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": {}}',
        b'{"custom_id": "stream", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "stream": true}}',
        b'{"custom_id": "zero", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 0}}',
    ]
    source = upload(client, lines(20) + b"\n".join(bad) + b"\n\n")
    batch = client.batches.create(
        input_file_id=source, endpoint="/v1/completions", completion_window="24h", metadata={"who": "me"}
    )
    assert batch.status in ("validating", "in_progress", "completed")
    batch = wait(client, batch.id, "completed")
    assert batch.request_counts.model_dump() == {"total": 25, "completed": 20, "failed": 5}
    assert batch.metadata == {"who": "me"}
    assert batch.completed_at >= batch.in_progress_at >= batch.created_at
    answers = results(client, batch.output_file_id)
    assert [a["custom_id"] for a in answers] == [f"r{i}" for i in range(20)]
    assert all(a["response"]["status_code"] == 200 and a["error"] is None for a in answers)
    assert answers[7]["response"]["body"]["choices"][0]["text"] == "text 7"
    errors = results(client, batch.error_file_id)
    assert [e["custom_id"] for e in errors] == [None, "r1", "chat", "stream", "zero"]
    assert "must be /v1/completions" in errors[2]["error"]["message"]
    assert errors[4]["response"]["status_code"] == 400
    assert [b.id for b in client.batches.list()] == [batch.id]
    assert all(extra["priority"] >= 2**20 for _, _, extra in engine.seen)
    assert server.wait_idle()


def test_what_cannot_be_a_batch(serve, tmp_path: Path):
    server = serve(data_dir=tmp_path)
    body = {"input_file_id": "file-0", "endpoint": "/v1/completions", "completion_window": "24h"}
    assert call(server, "/v1/batches", body)[0] == 404
    assert refused(server, "/v1/batches", {**body, "endpoint": "/v1/models"})["param"] == "endpoint"
    assert refused(server, "/v1/batches", {**body, "completion_window": "1h"})["param"] == "completion_window"
    assert call(server, "/v1/batches/batch_0")[0] == 404


def test_generation_failures_are_errors_of_their_lines(serve, client_of, tmp_path: Path):
    engine = ScriptedEngine(lambda prompt, *_: [97, NAN] if prompt[-1] == ord("1") else [98, 256])
    client = client_of(serve(engine, data_dir=tmp_path))
    batch = client.batches.create(
        input_file_id=upload(client, lines(3)), endpoint="/v1/completions", completion_window="24h"
    )
    batch = wait(client, batch.id, "completed")
    assert batch.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
    [error] = results(client, batch.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"]) == ("r1", 500)


def test_cancel(serve, client_of, tmp_path: Path):
    engine = ScriptedEngine(says("x" * 45), step_seconds=0.002)
    server = serve(engine, data_dir=tmp_path)
    client = client_of(server)
    batch = client.batches.create(
        input_file_id=upload(client, lines(500)), endpoint="/v1/completions", completion_window="24h"
    )
    assert server.wait_busy()
    time.sleep(0.3)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = wait(client, batch.id, "cancelled")
    assert batch.request_counts.completed < 500
    if batch.output_file_id:
        assert len(results(client, batch.output_file_id)) == batch.request_counts.completed
    assert server.wait_idle()
    with pytest.raises(openai.BadRequestError, match="nothing to cancel"):
        client.batches.cancel(batch.id)


def test_a_batch_goes_on_after_a_restart(client_of, tmp_path: Path):
    content = lines(120)
    slow = ScriptedEngine(step_seconds=0.01)
    with serving(slow, data_dir=tmp_path) as server:
        client = client_of(server)
        batch_id = client.batches.create(
            input_file_id=upload(client, content), endpoint="/v1/completions", completion_window="24h"
        ).id
        end = time.perf_counter() + 20
        while client.batches.retrieve(batch_id).request_counts.completed < 10 and time.perf_counter() < end:
            time.sleep(0.02)
    answered = (tmp_path / "batches" / f"{batch_id}.results.jsonl").read_bytes().count(b"\n")
    assert 10 <= answered < 120
    second = ScriptedEngine()
    with serving(second, data_dir=tmp_path) as server:
        client = client_of(server)
        batch = wait(client, batch_id, "completed")
        answers = results(client, batch.output_file_id)
        assert [a["custom_id"] for a in answers] == [f"r{i}" for i in range(120)]
        assert [a["response"]["body"]["choices"][0]["text"] for a in answers] == [
            f"text {i}" for i in range(120)
        ]
        assert len(second.seen) <= 120 - answered


def test_online_requests_are_answered_beside_a_batch(serve, client_of, tmp_path: Path):
    engine = ScriptedEngine(step_seconds=0.002)
    server = serve(engine, data_dir=tmp_path)
    client = client_of(server)
    batch = client.batches.create(
        input_file_id=upload(client, lines(200)), endpoint="/v1/completions", completion_window="24h"
    )
    assert server.wait_busy()
    for i in range(5):
        assert (
            client.completions.create(model="scripted", prompt=f"online {i}").choices[0].text == f"online {i}"
        )
    assert wait(client, batch.id, "completed").request_counts.completed == 200


def test_keys_guard_files_too(serve, tmp_path: Path):
    (tmp_path / "keys").write_text("sk-1\n")
    server = serve(api_keys_file=tmp_path / "keys", data_dir=tmp_path)
    for path in ("/v1/files", "/v1/batches"):
        assert call(server, path)[0] == 401
    request = urllib.request.Request(f"{server.url}/v1/files", headers={"Authorization": "Bearer sk-1"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert json.load(answer)["data"] == []
