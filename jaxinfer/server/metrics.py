"""Prometheus metrics under `jaxinfer:`, with the meanings that vLLM's have (docs/server.md lists them)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import prometheus_client as prometheus
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

import jaxinfer
from jaxinfer.engine.service import EngineService, RequestStream

if TYPE_CHECKING:
    from jaxinfer.server.context import ServedModel

CONTENT_TYPE = prometheus.CONTENT_TYPE_LATEST
_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 5)
_TOKENS = tuple(2**n for n in range(18))
_REASONS = ("stop", "length", "tool_calls", "abort", "error")


class Metrics:
    """A server's metrics in a registry of their own. What the engine knows is read when they are asked for."""

    def __init__(self, service: EngineService, model: ServedModel):
        self._service = service
        self._registry = registry = CollectorRegistry()
        self._last: dict[str, float] = {}  # engine request id → time of its last increment

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"jaxinfer:{name}", text, registry=registry, buckets=buckets)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"jaxinfer:{name}", text, labels, registry=registry)

        self._first_token = histogram("time_to_first_token_seconds", "From submission to the first token.")
        self._gap = histogram("inter_token_latency_seconds", "Between a stream's tokens.", _GAPS)
        self._per_token = histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first.", _GAPS
        )
        self._latency = histogram("e2e_request_latency_seconds", "From submission to the last token.")
        self._prompt_size = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._output_size = histogram("request_generation_tokens", "Tokens generated for a request.", _TOKENS)
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of ended requests.")
        self._cached_tokens = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._generated = counter("generation_tokens", "Tokens generated.")
        self._ended = counter("request_success", "Completions by how they ended.", ("finished_reason",))
        for reason in _REASONS:
            self._ended.labels(reason)
        self._corrupted = counter("corrupted_requests", "Completions that failed, as by NaN in their logits.")
        self._http = counter("http_requests", "HTTP requests by route and status.", ("route", "status"))
        self._http_seconds = Histogram(
            "jaxinfer:http_request_duration_seconds",
            "HTTP requests by route.",
            ("route",),
            registry=registry,
            buckets=_SECONDS,
        )
        self._rejected = counter("admission_rejections", "Requests refused because of load.", ("reason",))
        self._gauges = {
            name: Gauge(f"jaxinfer:{name}", text, registry=registry)
            for name, text in {
                "num_requests_waiting": "Requests that wait for a slot in the engine.",
                "num_requests_running": "Requests in the engine's steps.",
                "kv_cache_usage_perc": "Share of KV pages that running requests hold, 0 to 1.",
                "queued_prefill_tokens": "Prompt tokens of requests without a first token.",
                "engine_healthy": "1 while the engine runs.",
            }.items()
        }
        info = Gauge("jaxinfer:info", "Version and model.", ("version", "model"), registry=registry)
        info.labels(jaxinfer.__version__, model.name[:200]).set(1)
        service.on_finish = self._finished

    def expose(self) -> bytes:
        """The text that Prometheus reads."""
        load = self._service.load
        self._gauges["num_requests_waiting"].set(load.waiting)
        self._gauges["num_requests_running"].set(load.running)
        self._gauges["kv_cache_usage_perc"].set(load.kv_usage)
        self._gauges["queued_prefill_tokens"].set(self._service.queued_prefill_tokens)
        self._gauges["engine_healthy"].set(self._service.healthy)
        return prometheus.generate_latest(self._registry)

    def progress(self, stream: RequestStream) -> None:
        """A stream has gained something just now."""
        now = time.perf_counter()
        last = self._last.get(stream.request_id)
        if last is not None:
            self._gap.observe(now - last)
        self._last[stream.request_id] = now
        if stream.finished is not None:
            del self._last[stream.request_id]

    def rejected(self, reason: str) -> None:
        self._rejected.labels(reason).inc()

    def request_ended(self, route: str, status: int, seconds: float) -> None:
        """An HTTP request is over; routes are those of the application, so their number is bounded."""
        self._http.labels(route, status).inc()
        self._http_seconds.labels(route).observe(seconds)

    def _finished(self, stream: RequestStream) -> None:
        """A request has left the engine, however it did."""
        self._last.pop(stream.request_id, None)
        self._prompt_tokens.inc(stream.prompt_tokens)
        self._prompt_size.observe(stream.prompt_tokens)
        if stream.first_token is not None:
            self._first_token.observe(stream.first_token - stream.submitted)
        output = stream.output
        if output is None:
            self._ended.labels("abort").inc()
            return
        self._cached_tokens.inc(output.cached_tokens)
        generated = sum(len(c.token_ids) for c in output.outputs)
        self._generated.inc(generated)
        self._output_size.observe(generated)
        if stream.finished is not None and stream.first_token is not None:
            self._latency.observe(stream.finished - stream.submitted)
            if generated > 1:
                self._per_token.observe((stream.finished - stream.first_token) / (generated - 1))
        for completion in output.outputs:
            reason = completion.finish_reason or "abort"
            self._ended.labels(reason if reason in _REASONS else "error").inc()
            if reason == "error":
                self._corrupted.inc()
