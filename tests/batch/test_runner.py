from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
from echo_llm import EchoLLM
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.batch.lines import InputLine, read_lines
from jaxinfer.batch.output import OrderedOutput
from jaxinfer.batch.runner import run_batch


def as_bytes(items) -> bytes:
    return b"".join((i if isinstance(i, bytes) else json.dumps(i).encode()) + b"\n" for i in items)


def run(items, llm=None, **options):
    """Runs lines to a stream; returns the results and the counts."""
    stream = io.BytesIO()
    output = OrderedOutput(stream)
    progress = run_batch(llm or EchoLLM(), read_lines(io.BytesIO(as_bytes(items))), output, **options)
    output.close()
    return [json.loads(line) for line in stream.getvalue().splitlines()], progress


def openai(custom_id, url="/v1/completions", **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "any", **body}}


def test_a_plain_line():
    (result,), progress = run([{"prompt": "abc"}])
    assert result.pop("id").startswith("batch_req_1_")
    assert result == {
        "line": 1,
        "text": "cba",
        "token_ids": [99, 98, 97, 256],
        "finish_reason": "stop",
        "stop_reason": None,
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
        "error": None,
    }
    assert (progress.done, progress.failed, progress.kept, progress.generated_tokens) == (1, 0, 0, 4)


def test_a_plain_chat_with_custom_id_and_several_completions():
    line = {
        "messages": [{"role": "user", "content": "q"}],
        "custom_id": "mine",
        "n": 2,
        "temperature": 1,
        "max_tokens": 3,
    }
    (result,), _ = run([line])
    assert result["custom_id"] == "mine"
    assert [c["text"] for c in result["completions"]] == [result["text"]] * 2
    assert result["usage"]["completion_tokens"] == 6


def test_openai_lines():
    chat = openai("c", "/v1/chat/completions", messages=[{"role": "user", "content": "q"}], max_tokens=2)
    (one, two), _ = run([openai("a", prompt=["ab", [99]], logprobs=0), chat])
    assert set(one) == {"id", "custom_id", "response", "error"}
    assert (one["custom_id"], one["error"], one["response"]["status_code"]) == ("a", None, 200)
    assert one["response"]["request_id"]
    body = one["response"]["body"]
    assert (body["object"], body["model"]) == ("text_completion", "echo")
    assert abs(body["created"] - time.time()) < 60
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "ba"), (1, "c")]
    assert body["choices"][0]["logprobs"]["tokens"] == ["b", "a", "<eos>"]
    body = two["response"]["body"]
    assert (body["object"], body["choices"][0]["finish_reason"]) == ("chat.completion", "length")
    assert one["response"]["body"]["id"] != body["id"]


def test_ids_of_results_repeat():
    items = [openai("a", prompt="x"), {"prompt": "y"}]
    assert [r["id"] for r in run(items)[0]] == [r["id"] for r in run(items)[0]]


def test_defaults_line_over_flags_over_run_over_model():
    llm = EchoLLM(generation_defaults={"temperature": 0.5, "max_new_tokens": 2, "repetition_penalty": 7})
    long = "x" * 200
    lengths = []
    for flags in ({}, {"max_tokens": 5}):
        items = [
            {"prompt": "abcdefgh"},
            {"prompt": "abcdefgh", "max_tokens": 3},
            openai("o", prompt="abcdefgh"),
        ]
        results, _ = run(items, llm, defaults=flags)
        plain, own, other = results
        lengths.append(
            [
                len(plain["token_ids"]),
                len(own["token_ids"]),
                other["response"]["body"]["usage"]["completion_tokens"],
            ]
        )
    assert lengths == [[9, 3, 2], [5, 3, 5]]
    (failed,), _ = run([{"prompt": long}], llm)
    assert "128 tokens" in failed["error"]["message"]  # the run's own default beats the model's 2


def test_a_model_without_a_tokenizer_answers_token_ids_and_refuses_text():
    items = [
        {"prompt": [5, 6], "n": 2, "temperature": 1, "logprobs": 0},
        openai("a", prompt=[[7], [8]]),
        {"prompt": "x"},
        {"messages": [{"role": "user", "content": "x"}]},
        openai("b", "/v1/chat/completions", messages=[{"role": "user", "content": "x"}]),
    ]
    results, progress = run(items, EchoLLM(tokenizer=None))
    plain, several, *refused = results
    assert [c["token_ids"] for c in plain["completions"]] == [[6, 5, 256]] * 2
    assert plain["logprobs"]["tokens"] == ["token_id:6", "token_id:5", "token_id:256"]
    choices = several["response"]["body"]["choices"]
    assert [c["token_ids"] for c in choices] == [[7, 256], [8, 256]]
    assert [r["error"]["param"] for r in refused] == ["prompt", "messages", "messages"]
    assert (progress.done, progress.failed) == (5, 3)


def test_failures_have_one_shape_each():
    results, progress = run(
        [
            b"not json",
            openai("a", prompt="x", temperature=9),
            openai("b", "/v1/nowhere"),
            {"prompt": "x", "temprature": 1},
            {"prompt": "x" * 100},
            {"prompt": "boom\0"},
            openai("c", prompt=["ok", "boom\0"]),
            openai("d", prompt="x", allowed_token_ids=[1]),
        ]
    )
    broken, hot, nowhere, typo, long, failed, half, refused = results
    assert broken | {"id": "", "error": None} == {
        "id": "",
        "line": 1,
        "custom_id": None,
        "response": None,
        "error": None,
    }
    assert (hot["custom_id"], hot["line"], hot["response"]["status_code"]) == ("a", 2, 400)
    assert hot["response"]["body"] == {"error": hot["error"]}
    assert hot["error"]["param"] == "temperature"
    assert nowhere["response"] is None
    assert "did you mean 'temperature'?" in typo["error"]["message"]
    assert "response" not in typo
    assert long["error"]["code"] == "context_length_exceeded"
    assert failed["error"] == {
        "message": "logits are NaN",
        "type": "server_error",
        "param": None,
        "code": None,
    }
    assert half["response"]["status_code"] == 500
    assert (refused["response"]["status_code"], refused["error"]["param"]) == (400, "allowed_token_ids")
    assert (progress.done, progress.failed) == (8, 8)


def test_a_line_whose_second_prompt_the_engine_refuses_leaves_nothing_behind():
    class Picky(EchoLLM):
        def __init__(self):
            super().__init__()
            accept = self.engine.add_request

            def add_request(request_id, prompt_token_ids, params, **options):
                if prompt_token_ids == [98]:
                    from jaxinfer.errors import RequestError

                    raise RequestError("no b", param="prompt")
                accept(request_id, prompt_token_ids, params, **options)

            self.engine.add_request = add_request

    llm = Picky()
    results, _ = run([openai("a", prompt=["a", "b"]), {"prompt": "c"}], llm)
    assert results[0]["error"]["message"] == "no b"
    assert results[1]["text"] == "c"
    assert len(llm.engine.aborted) == 1
    assert not llm.engine.has_unfinished_requests()


_good = st.builds(
    lambda text, n: {"prompt": text or "-", "max_tokens": n}, st.text("abcé", max_size=12), st.integers(1, 9)
)
_good_openai = st.builds(lambda text: openai("", prompt=text or "-"), st.text("ab", max_size=12))
_bad = st.sampled_from(
    [
        b"not json",
        b"[1]",
        b'{"prompt": "x"',
        b"\xff\xfe",
        {"prompt": "x", "temprature": 1},
        {"prompt": "x", "temperature": 3},
        {"prompt": "x", "stream": True},
        {"prompt": "\0"},
        {"prompt": "x" * 100},
        {"nothing": 1},
        {"method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}},
        openai("bad-url", "/v2"),
        openai("bad-temperature", prompt="x", temperature="hot"),
        openai("bad-stream", prompt="x", stream=True),
    ]
)


@given(st.lists(st.tuples(st.booleans(), _good | _good_openai, _bad), max_size=25), st.integers(1, 8))
def test_each_bad_line_is_one_error_line_and_leaves_the_good_ones_alone(choices, max_in_flight):
    items, is_good = [], []
    for i, (good, good_line, bad_line) in enumerate(choices):
        line = good_line if good else bad_line
        if isinstance(line, dict) and "custom_id" in line:
            line = line | {"custom_id": f"{line['custom_id']}-{i}"}
        items.append(line)
        is_good.append(good)
    results, progress = run(items, EchoLLM(max_num_seqs=3), max_in_flight=max_in_flight)
    assert [r["error"] is None for r in results] == is_good
    assert progress.failed == is_good.count(False)
    for i, (item, result) in enumerate(zip(items, results, strict=True), 1):
        assert result["id"].startswith(f"batch_req_{i}_")
        if result["error"] is not None:
            assert result["line"] == i
        if isinstance(item, dict) and "custom_id" in item:
            assert result["custom_id"] == item["custom_id"]
        if result["error"] is None and "text" in result:
            said = item["prompt"].encode()[::-1][: item["max_tokens"]]
            assert result["text"] == said.decode(errors="replace")
        elif result["error"] is None:
            assert result["response"]["body"]["choices"][0]["text"] == item["body"]["prompt"][::-1]


def test_sequences_in_the_engine_are_bounded_and_the_bound_is_used():
    llm = EchoLLM(max_num_seqs=100)
    run([{"prompt": "abc"}] * 50, llm, max_in_flight=7)
    assert llm.engine.most_running == 7
    llm = EchoLLM(max_num_seqs=100)
    run([openai(str(i), prompt=["ab", "cd"], n=2) for i in range(9)], llm, max_in_flight=8)
    assert llm.engine.most_running == 4  # two lines of two prompts of two completions


def test_a_line_larger_than_the_bound_runs_alone():
    llm = EchoLLM()
    results, _ = run(
        [{"prompt": "a"}, openai("big", prompt=["ab"] * 20), {"prompt": "b"}], llm, max_in_flight=4
    )
    assert [r["error"] for r in results] == [None] * 3
    assert llm.engine.most_running == 20


def endless_prompts(count: int, read: list[int]):
    """Lines made as they are read; the first one takes far longer than the others, so results pile up behind it."""
    for i in range(1, count + 1):
        read[0] = i
        text = "slow" * 20 if i == 1 else f"{i % 7}" * (1 + i % 3)
        yield InputLine(i, json.dumps({"prompt": text}).encode(), f"batch_req_{i}_{i:016x}")


def test_input_is_read_no_further_than_there_is_room():
    read = [0]
    ahead = []
    output = OrderedOutput(io.BytesIO())
    progress = run_batch(
        EchoLLM(),
        endless_prompts(1000, read),
        output,
        max_in_flight=8,
        on_progress=lambda progress: ahead.append(read[0] - progress.done),
    )
    output.close()
    assert progress.done == 1000
    assert max(ahead) <= 8 + 1


def test_lines_that_fail_at_once_do_not_make_the_run_read_everything():
    read = [0]

    def lines():
        for i in range(1, 1001):
            read[0] = i
            yield InputLine(i, b"nonsense", f"batch_req_{i}_{i:016x}")

    steps = []
    output = OrderedOutput(io.BytesIO())
    run_batch(EchoLLM(), lines(), output, max_in_flight=8, on_progress=lambda p: steps.append(read[0]))
    output.close()
    assert steps[0] <= 8


def test_memory_is_far_below_the_size_of_the_input(tmp_path):
    names = (f"{i}-".ljust(10_000, "x") for i in range(1, 301))  # 3 MB read, and again in the results
    lines = (
        InputLine(i, json.dumps({"prompt": "ab", "custom_id": name}).encode(), f"batch_req_{i}_{i:016x}")
        for i, name in enumerate(names, 1)
    )
    output = OrderedOutput(tmp_path / "out")
    tracemalloc.start()
    run_batch(EchoLLM(), lines, output, max_in_flight=8)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    output.close()
    assert (tmp_path / "out").stat().st_size > 3_000_000
    assert peak < 1_000_000


def mixed_items(count: int):
    items = []
    for i in range(count):
        items.append({"prompt": chr(97 + i % 26) * (1 + (i * 7) % 30), "custom_id": f"c{i}"})
        if i % 5 == 0:
            items.append(b"bad line")
    return items


@settings(max_examples=30)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=4))
def test_stopped_and_started_again_any_number_of_times(tmp_path_factory, stops):
    folder = tmp_path_factory.mktemp("resume")
    data = as_bytes(mixed_items(12))
    finals = []
    for name, limits in (("whole", []), ("parts", stops)):
        for limit in [*limits, None]:
            steps = iter(range(10**9))
            output = OrderedOutput(folder / name)
            llm = EchoLLM(max_num_seqs=3)
            progress = run_batch(
                llm,
                read_lines(io.BytesIO(data)),
                output,
                max_in_flight=4,
                should_stop=lambda limit=limit, steps=steps: limit is not None and next(steps) >= limit,
            )
            output.close()
            assert not llm.engine.has_unfinished_requests()
        assert not progress.interrupted
        assert (progress.done, progress.failed) == (15, 3)
        finals.append((folder / name).read_bytes())
    assert finals[0] == finals[1]
    assert {p.name for p in folder.iterdir()} == {"whole", "parts"}


def test_killed_in_the_middle_and_run_again_gives_the_same_bytes(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(as_bytes(mixed_items(60)))
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(here), str(here.parent), *sys.path])}

    def start(target, step_seconds):
        command = [
            sys.executable,
            str(here / "echo_llm.py"),
            str(source),
            str(tmp_path / target),
            step_seconds,
        ]
        return subprocess.Popen(command, env=environment)

    assert start("whole", "0").wait(60) == 0
    whole = (tmp_path / "whole").read_bytes()
    assert whole.count(b"\n") == 72

    partial = tmp_path / "partial"
    sizes = []
    for _ in range(3):
        before = partial.stat().st_size if partial.exists() else 0
        process = start("partial", "0.01")
        deadline = time.monotonic() + 60
        while (not partial.exists() or partial.stat().st_size < before + 300) and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
        sizes.append(partial.stat().st_size)
        assert whole.startswith(partial.read_bytes())
    assert 0 < sizes[0] < sizes[1] < sizes[2] < len(whole)
    assert start("partial", "0").wait(60) == 0
    assert partial.read_bytes() == whole


def test_kept_failures_count_again(tmp_path):
    data = as_bytes([{"prompt": "a"}, b"bad"])
    counts = []
    for _ in range(2):
        output = OrderedOutput(tmp_path / "out")
        progress = run_batch(EchoLLM(), read_lines(io.BytesIO(data)), output)
        output.close()
        counts.append((progress.done, progress.failed, progress.kept))
    assert counts == [(2, 1, 0), (2, 1, 2)]


def test_an_engine_that_breaks_loses_no_answer(tmp_path):
    llm = EchoLLM()
    step = llm.engine.step

    def breaks_when_two_are_left():
        if len(llm.engine.running) <= 2:
            raise RuntimeError("device lost")
        return step()

    llm.engine.step = breaks_when_two_are_left
    data = as_bytes([{"prompt": "abc" * 9}, {"prompt": "d"}, {"prompt": "e"}, {"prompt": "fgh" * 5}])
    output = OrderedOutput(tmp_path / "out")
    with pytest.raises(RuntimeError, match="device lost"):
        run_batch(llm, read_lines(io.BytesIO(data)), output)
    output.close()
    output = OrderedOutput(tmp_path / "out")
    progress = run_batch(EchoLLM(), read_lines(io.BytesIO(data)), output)
    output.close()
    assert (progress.kept, progress.done) == (2, 4)
    texts = [json.loads(line)["text"] for line in (tmp_path / "out").read_bytes().splitlines()]
    assert texts == ["cba" * 9, "d", "e", "hgf" * 5]
