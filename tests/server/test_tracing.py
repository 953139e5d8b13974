"""Spans as OpenTelemetry's own SDK records and sends them."""

from __future__ import annotations

import http.server
import json
import sys
import threading
import urllib.error
import urllib.request
from typing import Any

import pytest
from byte_tokenizer import EOS
from scripted import ScriptedEngine, Server, says, serving

from jaxinfer.errors import ConfigError
from jaxinfer.server import app
from jaxinfer.server.tracing import Tracing

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry's SDK is not installed")

from opentelemetry.sdk.trace import TracerProvider  # pyright: ignore[reportMissingImports]
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # pyright: ignore[reportMissingImports]
from opentelemetry.sdk.trace.export.in_memory_span_exporter import (  # pyright: ignore[reportMissingImports]
    InMemorySpanExporter,
)

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What servers of this test record."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(app, "make_tracing", lambda endpoint: Tracing(endpoint, provider=provider))
    return exporter


def post(server: Server, body: dict[str, Any], **headers: str) -> bytes:
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions",
        json.dumps({"messages": [{"role": "user", "content": "secret"}], **body}).encode(),
        {"Content-Type": "application/json", **headers},
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_in_the_clients_trace_with_its_phases_below(spans, stream: bool):
    with serving(ScriptedEngine(says("private"), step_seconds=0.01)) as server:
        post(server, {"stream": stream}, traceparent=f"00-{TRACE}-{PARENT}-01")
    found = {span.name: span for span in spans.get_finished_spans()}
    assert set(found) == {"POST /v1/chat/completions", "queue", "prefill", "decode"}
    root = found.pop("POST /v1/chat/completions")
    assert f"{root.context.trace_id:032x}" == TRACE
    assert f"{root.parent.span_id:016x}" == PARENT
    assert dict(root.attributes) == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.response.model": "scripted",
        "gen_ai.usage.input_tokens": root.attributes["gen_ai.usage.input_tokens"],
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ("stop",),
    }
    assert {span.parent.span_id for span in found.values()} == {root.context.span_id}
    queue, prefill, decode = found["queue"], found["prefill"], found["decode"]
    assert root.start_time < queue.start_time <= queue.end_time == prefill.start_time
    assert prefill.end_time == decode.start_time < decode.end_time < root.end_time
    assert decode.end_time - decode.start_time > 7 * 0.01 * 1e9
    shown = " ".join(span.to_json() for span in spans.get_finished_spans())
    assert "secret" not in shown
    assert "private" not in shown


def test_probes_have_no_spans_and_failures_are_marked(spans):
    engine = ScriptedEngine(says("x"))
    engine.fail_at = 1
    with serving(engine) as server:
        for path in ("/health", "/metrics"):
            urllib.request.urlopen(server.url + path, timeout=10).close()
        with pytest.raises(urllib.error.HTTPError) as error:
            post(server, {})
        error.value.close()
    [root] = [span for span in spans.get_finished_spans() if span.parent is None]
    assert root.attributes["http.response.status_code"] == 503
    assert root.status.status_code.name == "ERROR"
    assert "on fire" not in root.to_json()


def test_a_client_that_leaves_ends_its_span(spans):
    with serving(ScriptedEngine(lambda *_: [*b"x" * 2000, EOS], step_seconds=0.01)) as server:
        request = urllib.request.Request(
            f"{server.url}/v1/completions",
            json.dumps({"prompt": "a", "stream": True, "max_tokens": 2000}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            answer.read(10)
        assert server.wait_idle()
    found = {span.name: span for span in spans.get_finished_spans()}
    assert found["POST /v1/completions"].attributes["error.type"] == "client_closed_request"
    assert found["POST /v1/completions"].attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert found["decode"].end_time > found["decode"].start_time


def test_the_log_line_names_the_trace(spans, caplog: pytest.LogCaptureFixture):
    with (
        caplog.at_level("INFO", logger="jaxinfer.access"),
        serving(ScriptedEngine(says("x")), log_requests=True) as server,
    ):
        post(server, {}, traceparent=f"00-{TRACE}-{PARENT}-01")
    [line] = [json.loads(r.message) for r in caplog.records if r.name == "jaxinfer.access"]
    assert line["trace_id"] == TRACE


def test_spans_are_sent_to_an_endpoint_at_the_latest_when_the_server_ends():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the OTLP exporter is not installed")
    bodies: list[bytes] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        with serving(ScriptedEngine(says("x")), otlp_traces_endpoint=endpoint) as server:
            post(server, {}, traceparent=f"00-{TRACE}-{PARENT}-01")
        collector.shutdown()
    assert bytes.fromhex(TRACE) in b"".join(bodies)


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match="opentelemetry-exporter-otlp-proto-http"):
        Tracing("http://localhost:4318/v1/traces")
