"""Metrics as Prometheus and the routers that read them see them."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Any

import prometheus_client
import pytest
from byte_tokenizer import EOS, VOCAB_SIZE
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry
from scripted import MAX_MODEL_LEN, NAN, TOKENIZER, ScriptedEngine, Server, says, serving

from jaxinfer.server.context import ServedModel
from jaxinfer.server.metrics import Distribution


def scrape(server: Server) -> dict[str, float]:
    """Every sample of /metrics by its name and labels, as Prometheus' own parser understands the text."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        text = answer.read().decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            samples[sample.name.removeprefix("jaxinfer:") + (f"{{{labels}}}" if labels else "")] = (
                sample.value
            )
    return samples


def post(server: Server, body: dict[str, Any], path: str = "/v1/completions") -> int:
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            answer.read()
            return answer.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


@given(st.lists(st.floats(0, 10) | st.sampled_from([0.1, 1.0, 2.5]), max_size=30))
def test_a_distribution_says_what_a_prometheus_histogram_says(values: list[float]):
    bounds = (0.1, 1.0, 2.5)

    class Ours(Collector):
        def collect(self):
            family = HistogramMetricFamily("h", "text")
            distribution = Distribution(bounds)
            for value in values:
                distribution.observe(value)
            distribution.add_to(family)
            yield family

    ours, theirs = CollectorRegistry(), CollectorRegistry()
    ours.register(Ours())
    reference = prometheus_client.Histogram("h", "text", registry=theirs, buckets=bounds)
    for value in values:
        reference.observe(value)
    expected = prometheus_client.generate_latest(theirs).decode().splitlines()
    expected = [line for line in expected if "h_created" not in line]
    assert prometheus_client.generate_latest(ours).decode().splitlines() == expected


def test_times_of_a_stream_add_up(serve):
    server = serve(ScriptedEngine(lambda *_: [*b"x" * 20, EOS], step_seconds=0.005))
    start = time.perf_counter()
    post(server, {"prompt": "hello", "stream": True, "max_tokens": 100})
    seconds = time.perf_counter() - start
    found = scrape(server)
    for name in ("time_to_first_token", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert found[f"{name}_seconds_count"] == 1
    assert found["inter_token_latency_seconds_count"] == 20
    assert found["inter_token_latency_seconds_sum"] == pytest.approx(found["request_decode_time_seconds_sum"])
    assert found["request_time_per_output_token_seconds_sum"] == pytest.approx(
        found["request_decode_time_seconds_sum"] / 20
    )
    assert found["time_to_first_token_seconds_sum"] == pytest.approx(
        found["request_queue_time_seconds_sum"] + found["request_prefill_time_seconds_sum"]
    )
    whole = found["e2e_request_latency_seconds_sum"]
    assert whole == pytest.approx(
        found["time_to_first_token_seconds_sum"] + found["request_decode_time_seconds_sum"]
    )
    assert 21 * 0.005 <= whole <= seconds


def test_a_request_counts_while_it_runs(serve):
    """Tokens, time to first token and the gauges move with the work, not at its end; streamed or not."""
    server = serve(ScriptedEngine(lambda *_: [*b"x" * 500, EOS], step_seconds=0.005, max_running=2))
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps({"prompt": ["a", "b", "c"], "stream": True, "max_tokens": 1000}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        answer.readline()
        first = scrape(server)
        # The first event comes before the first token, and the third prompt may still be on its way to the engine.
        while first["time_to_first_token_seconds_count"] < 2 or first["num_requests_waiting"] < 1:
            first = scrape(server)
        time.sleep(0.1)
        second = scrape(server)
    assert (first["num_requests_running"], first["num_requests_waiting"]) == (2, 1)
    assert first["queued_prefill_tokens"] == 1
    assert first["kv_cache_usage_perc"] == 1.0
    assert first["time_to_first_token_seconds_count"] == first["prompt_tokens_total"] == 2
    assert second["generation_tokens_total"] > first["generation_tokens_total"] > 0
    assert second["inter_token_latency_seconds_count"] > first["inter_token_latency_seconds_count"]
    assert server.wait_idle()
    last = scrape(server)
    assert last["request_success_total{finished_reason=abort}"] == 3
    assert last["num_requests_running"] == last["num_requests_waiting"] == last["queued_prefill_tokens"] == 0


def test_completions_count_by_how_they_ended(serve):
    server = serve(ScriptedEngine(lambda prompt, *_: [NAN] if prompt == [7] else [120, 120, EOS]))
    assert post(server, {"prompt": "ab"}) == 200
    assert post(server, {"prompt": "ab", "max_tokens": 1, "n": 3, "temperature": 1}) == 200
    assert post(server, {"prompt": [7]}) == 500
    found = scrape(server)
    assert found["request_success_total{finished_reason=stop}"] == 1
    assert found["request_success_total{finished_reason=length}"] == 3
    assert found["request_success_total{finished_reason=error}"] == found["corrupted_requests_total"] == 1
    assert found["generation_tokens_total"] == 3 + 3
    assert found["prefix_cache_queries_total"] == 5
    assert found["num_preemptions_total"] == 0
    assert found["process_open_fds"] > 0


def test_no_series_is_made_by_what_a_client_sends(serve):
    server = serve(ScriptedEngine(says("ok")))

    def requests(i: int) -> None:
        post(server, {"prompt": "a", "user": f"user-{i}", "cache_salt": f"salt-{i}"})
        post(server, {"prompt": "a", "model": f"other-{i}"})
        post(server, {"prompt": "a"}, path=f"/made/up/{i}")
        post(server, {"prompt": "a"}, path=f"/v1/models/{i}?x={i}")

    requests(-1)
    scrape(server)  # it counts itself from the next one on
    before = set(scrape(server))
    for i in range(30):
        requests(i)
    assert set(scrape(server)) == before


def test_the_model_and_the_cache_s_geometry_are_told():
    model = ServedModel(
        name="m" * 5000,
        tokenizer=TOKENIZER,
        chat_template=None,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        defaults={},
        facts={"page_size": 16, "num_pages": 100},
    )
    with serving(ScriptedEngine(), model) as server:
        found = scrape(server)
    assert found["cache_config_info{block_size=16,num_gpu_blocks=100}"] == 1
    [info] = [name for name in found if name.startswith("info{")]
    assert f"model={'m' * 200}," in info.replace("}", ",")
    assert f"max_model_len={MAX_MODEL_LEN}" in info
