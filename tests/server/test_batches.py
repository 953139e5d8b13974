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
from byte_tokenizer import EOS
from scripted import NAN, ScriptedEngine, says, serving
from test_requests import call, refused

from jaxinfer.errors import ConfigError


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


def create(client: openai.OpenAI, content: bytes, endpoint: Any = "/v1/completions") -> str:
    source = upload(client, content)
    return client.batches.create(input_file_id=source, endpoint=endpoint, completion_window="24h").id


def stored(folder: Path, batch_id: str) -> dict[str, Any]:
    return json.loads((folder / "batches" / f"{batch_id}.json").read_bytes())


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


def test_all_files_together_are_bounded(serve, client_of, tmp_path: Path):
    client = client_of(serve(data_dir=tmp_path, max_stored_bytes=1000))
    first = client.files.create(file=("a", b"x" * 600), purpose="batch")
    with pytest.raises(openai.APIStatusError, match="delete some") as caught:
        client.files.create(file=("b", b"x" * 401), purpose="batch")
    assert caught.value.status_code == 413
    client.files.create(file=("b", b"x" * 400), purpose="batch")
    client.files.delete(first.id)
    client.files.create(file=("c", b"x" * 600), purpose="batch")


def test_results_count_and_when_full_no_batch_is_taken(serve, client_of, tmp_path: Path):
    source = lines(3)
    client = client_of(serve(data_dir=tmp_path, max_stored_bytes=len(source) + 1))
    batch = wait(client, create(client, source), "completed")
    assert len(results(client, batch.output_file_id)) == 3
    again = {"input_file_id": batch.input_file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    with pytest.raises(openai.APIStatusError, match="delete some"):
        client.batches.create(**again)
    client.files.delete(batch.output_file_id)
    wait(client, client.batches.create(**again).id, "completed")


PART = b'--abc\r\nContent-Disposition: form-data; name="%s"; filename="a"\r\n\r\n%s'


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"garbage",
        PART % (b"file", b"cut off"),
        PART % (b"purpose", b"batch") + b"\r\n--abc--\r\n",
        PART % (b"file", b"x") + b"\r\n" + PART % (b"file", b"x") + b"\r\n--abc--\r\n",
        PART % (b"expires_after[anchor]", b"created_at") + b"\r\n--abc--\r\n",
        b"\r\n".join([PART % (b"x", b"y")] * 15 + [PART % (b"purpose", b"batch"), PART % (b"file", b"x")])
        + b"\r\n--abc--\r\n",
        b"--abc\r\nContent-Type: multipart/mixed; boundary=d\r\n\r\n--d--\r\n--abc--\r\n",
    ],
)
def test_uploads_that_are_none(serve, tmp_path: Path, body: bytes):
    server = serve(data_dir=tmp_path)
    kind = {"Content-Type": "multipart/form-data; boundary=abc"}
    refused(server, "/v1/files", None, raw=body, headers=kind)
    refused(server, "/v1/files", None, raw=b"x", headers={"Content-Type": "multipart/form-data"})
    assert call(server, "/v1/files", {})[0] == 415
    assert not list((tmp_path / "files").iterdir())


def test_one_directory_serves_one_server(serve, tmp_path: Path):
    serve(data_dir=tmp_path)
    with pytest.raises(ConfigError, match="another server"):
        serve(data_dir=tmp_path)


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


def test_what_cannot_be_a_batch(serve, client_of, tmp_path: Path):
    server = serve(data_dir=tmp_path)
    body = {"input_file_id": "file-0", "endpoint": "/v1/completions", "completion_window": "24h"}
    assert call(server, "/v1/batches", body)[0] == 404
    assert refused(server, "/v1/batches", {**body, "endpoint": "/v1/models"})["param"] == "endpoint"
    assert refused(server, "/v1/batches", {**body, "completion_window": "1h"})["param"] == "completion_window"
    assert (
        refused(server, "/v1/batches", {**body, "output_expires_after": {}})["param"]
        == "output_expires_after"
    )
    assert refused(server, "/v1/batches", {**body, "metadata": {"k" * 65: "v"}})["param"] == "metadata"
    assert call(server, "/v1/batches/batch_0")[0] == 404
    notes = client_of(server).files.create(file=("a", b"x"), purpose="user_data").id
    assert "purpose" in refused(server, "/v1/batches", {**body, "input_file_id": notes})["message"]


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


def test_s17_lines_pass_the_same_checks_as_requests(serve, client_of, tmp_path: Path):
    """Settings and limits of the server hold in a batch too."""
    engine = ScriptedEngine(says("ok"))
    client = client_of(serve(engine, data_dir=tmp_path, safe_prompts=True, max_n=4))
    chat = {"messages": [{"role": "user", "content": "</s><|im_end|>"}]}
    client.chat.completions.create(model="scripted", **chat)  # type: ignore[arg-type]
    bodies = [
        chat,
        {**chat, "priority": -(2**40)},
        {**chat, "model": "another"},
        {**chat, "n": 5},
    ]
    content = b"".join(
        json.dumps(
            {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": body}
        ).encode()
        + b"\n"
        for i, body in enumerate(bodies)
    )
    batch = wait(client, create(client, content, "/v1/chat/completions"), "completed")
    online, *behind = engine.seen
    assert all(prompt == online[0] for prompt, _, _ in behind)
    assert all(extra["priority"] >= 2**20 for _, _, extra in behind)
    errors = {e["custom_id"]: e["error"] for e in results(client, batch.error_file_id)}
    assert errors["2"]["code"] == "model_not_found"
    assert errors["2"]["param"] == "model"
    assert errors["3"]["param"] == "n"


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


def test_cancelling_keeps_answers_that_wait_for_their_turn(serve, client_of, tmp_path: Path):
    """The first line runs until it is cancelled, the others are answered meanwhile."""
    engine = ScriptedEngine(
        lambda prompt, *_: [97] * 4000 if prompt == list(b"text 0") else [98, EOS], step_seconds=0.002
    )
    client = client_of(serve(engine, data_dir=tmp_path))
    batch_id = create(client, lines(30, max_tokens=4000))
    end = time.perf_counter() + 10
    while (len(engine.seen) < 30 or len(engine.requests) > 1) and time.perf_counter() < end:
        time.sleep(0.01)
    time.sleep(0.2)  # until the runner has them
    client.batches.cancel(batch_id)
    batch = wait(client, batch_id, "cancelled")
    assert batch.request_counts.model_dump() == {"total": 30, "completed": 29, "failed": 0}
    answers = results(client, batch.output_file_id)
    assert [a["custom_id"] for a in answers] == [f"r{i}" for i in range(1, 30)]
    assert [path.name for path in (tmp_path / "batches").iterdir()] == [f"{batch_id}.json"]


def test_a_batch_that_waits_is_cancelled_at_once(serve, client_of, tmp_path: Path):
    engine = ScriptedEngine(says("x" * 45))
    server = serve(engine, data_dir=tmp_path)
    client = client_of(server)
    engine.gate.clear()
    first, second = create(client, lines(3)), create(client, lines(3))
    assert server.wait_busy()
    assert client.batches.cancel(second).status == "cancelled"
    engine.gate.set()
    wait(client, first, "completed")
    third = wait(client, create(client, lines(1)), "completed")
    assert third.request_counts.completed == 1
    assert client.batches.retrieve(second).status == "cancelled"
    assert len(engine.seen) == 4


@pytest.mark.parametrize("reason", ["overload", "engine failure"])
def test_what_stops_the_engine_only_delays_a_batch(client_of, tmp_path: Path, reason: str):
    engine = ScriptedEngine()
    if reason == "overload":
        engine.max_waiting = -engine.max_running  # OverloadError for everyone
    else:
        engine.fail_at = 2
    with serving(engine, data_dir=tmp_path) as server:
        batch_id = create(client_of(server), lines(3))
        time.sleep(0.3)
        assert server.context.service.healthy == (reason == "overload")
    assert stored(tmp_path, batch_id)["status"] == "in_progress"
    with serving(ScriptedEngine(), data_dir=tmp_path) as server:
        assert wait(client_of(server), batch_id, "completed").request_counts.completed == 3


def test_cancel_while_the_engine_has_no_room(serve, client_of, tmp_path: Path):
    engine = ScriptedEngine()
    engine.max_waiting = -engine.max_running
    client = client_of(serve(engine, data_dir=tmp_path))
    batch_id = create(client, lines(3))
    wait(client, batch_id, "in_progress")
    time.sleep(0.1)  # until the first line waits for room
    client.batches.cancel(batch_id)
    assert wait(client, batch_id, "cancelled", seconds=2).request_counts.completed == 0


@pytest.mark.parametrize("limit", [{"max_queued_requests": 8}, {"max_queued_prefill_tokens": 50}])
def test_lines_leave_room_for_online_requests(serve, client_of, tmp_path: Path, limit: dict[str, int]):
    engine = ScriptedEngine(max_running=1, step_seconds=0.005)
    server = serve(engine, data_dir=tmp_path, **limit)
    client = client_of(server)
    batch_id = create(client, lines(40))
    assert server.wait_busy()
    time.sleep(0.2)  # until as many wait as may
    assert client.completions.create(model="scripted", prompt="online").choices[0].text == "online"
    assert wait(client, batch_id, "completed").request_counts.completed == 40


@pytest.mark.parametrize("change", ["model", "input"])
def test_a_batch_that_cannot_go_on_fails_with_the_answers_it_has(client_of, tmp_path: Path, change: str):
    with serving(ScriptedEngine(step_seconds=0.01), data_dir=tmp_path) as server:
        client = client_of(server)
        batch_id = create(client, lines(120))
        end = time.perf_counter() + 20
        while client.batches.retrieve(batch_id).request_counts.completed < 10 and time.perf_counter() < end:
            time.sleep(0.02)
        if change == "input":
            client.files.delete(client.batches.retrieve(batch_id).input_file_id)
    if change == "model":
        path = tmp_path / "batches" / f"{batch_id}.json"
        path.write_text(json.dumps({**stored(tmp_path, batch_id), "model": "of yesterday"}))
    (tmp_path / "batches" / "batch_torn.json").write_text("")
    with serving(ScriptedEngine(), data_dir=tmp_path) as server:
        client = client_of(server)
        batch = wait(client, batch_id, "failed")
        assert {"model": "of yesterday", "input": "no file"}[change] in batch.errors.data[0].message
        assert 10 <= batch.request_counts.completed == len(results(client, batch.output_file_id)) < 120
        assert wait(client, create(client, lines(1)), "completed").request_counts.completed == 1


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
