"""Prometheus metrics under `jaxinfer:`, with the meanings that vLLM's have (docs/server.md lists them).

Whatever is observed for each token or request is a few plain numbers, changed on the event loop alone; prometheus-client puts them
into words when they are asked for, together with what the engine knows itself. No label holds anything that a client sent.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

import jaxinfer
from jaxinfer.engine.service import EngineService, RequestStream

if TYPE_CHECKING:
    from jaxinfer.server.context import ServedModel

CONTENT_TYPE = prometheus.CONTENT_TYPE_LATEST
_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 5)
_TOKENS = tuple(2**n for n in range(18))
_REASONS = ("stop", "length", "abort", "error")
_MAX_LABEL_CHARS = 200

_DISTRIBUTIONS = {
    "time_to_first_token_seconds": ("From submission to the first token.", _SECONDS),
    "inter_token_latency_seconds": ("Between a stream's tokens.", _GAPS),
    "request_time_per_output_token_seconds": ("Mean time per token after the first.", _GAPS),
    "e2e_request_latency_seconds": ("From submission to the last token.", _SECONDS),
    "request_queue_time_seconds": ("From submission to the first step with the prompt in it.", _SECONDS),
    "request_prefill_time_seconds": ("From that step to the first token.", _SECONDS),
    "request_decode_time_seconds": ("From the first token to the last.", _SECONDS),
    "request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "request_generation_tokens": ("Tokens generated for a request.", _TOKENS),
}


class Distribution:
    """A histogram: counts between fixed bounds, and a sum. Observing costs a fraction of a microsecond."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]):
        """bounds: upper ones, included, ascending; what is above the last is counted too."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, labels: tuple[str, ...] = ()) -> None:
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        family.add_metric(list(labels), buckets, self._sum)


class Metrics(Collector):
    """A server's metrics in a registry of their own. Hears of requests from the service's callbacks."""

    def __init__(self, service: EngineService, model: ServedModel):
        self._service = service
        self._model = model
        self._distributions = {name: Distribution(bounds) for name, (_, bounds) in _DISTRIBUTIONS.items()}
        self._gap = self._distributions["inter_token_latency_seconds"]  # the one that is used for each token
        self._prompt_tokens = 0
        self._cache_queries = 0
        self._cache_hits = 0
        self._corrupted = 0
        self._ended = Counter(dict.fromkeys(_REASONS, 0))
        self._rejected: Counter[str] = Counter()
        self._http: Counter[tuple[str, str]] = Counter()
        self._http_seconds: dict[str, Distribution] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        prometheus.ProcessCollector(registry=self._registry)
        service.on_tokens = self._on_tokens
        service.on_finish = self._on_finish

    def expose(self) -> bytes:
        """The text that Prometheus reads."""
        return prometheus.generate_latest(self._registry)

    def rejected(self, reason: str) -> None:
        self._rejected[reason] += 1

    def request_ended(self, route: str, status: int, seconds: float) -> None:
        """An HTTP request is over; routes are those of the application, so their number is bounded."""
        self._http[route, str(status)] += 1
        if route not in self._http_seconds:
            self._http_seconds[route] = Distribution(_SECONDS)
        self._http_seconds[route].observe(seconds)

    def _on_tokens(self, stream: RequestStream, when: float) -> None:
        if stream.first_token is not None:
            if stream.sink is not None:  # others are not told of every step
                self._gap.observe(when - stream.latest)
            return
        self._distributions["time_to_first_token_seconds"].observe(when - stream.submitted)
        self._distributions["request_prompt_tokens"].observe(stream.prompt_tokens)
        self._prompt_tokens += stream.prompt_tokens
        output = stream.output
        assert output is not None
        if output.prompt_logprobs is None:  # else the cache was not read
            self._cache_queries += stream.prompt_tokens
            self._cache_hits += output.cached_tokens
        if output.started is not None:
            queued = max(0.0, output.started - stream.submitted)
            self._distributions["request_queue_time_seconds"].observe(queued)
            self._distributions["request_prefill_time_seconds"].observe(when - output.started)

    def _on_finish(self, stream: RequestStream) -> None:
        output = stream.output
        if output is None:  # it left before its first token
            self._ended["abort"] += 1
            return
        generated = sum(len(c.token_ids) for c in output.outputs)
        self._distributions["request_generation_tokens"].observe(generated)
        if stream.finished is not None and stream.first_token is not None:
            decode = stream.finished - stream.first_token
            self._distributions["e2e_request_latency_seconds"].observe(stream.finished - stream.submitted)
            self._distributions["request_decode_time_seconds"].observe(decode)
            if generated > 1:
                self._distributions["request_time_per_output_token_seconds"].observe(decode / (generated - 1))
        for completion in output.outputs:
            reason = completion.finish_reason or "abort"
            self._ended[reason if reason in _REASONS else "error"] += 1
            self._corrupted += reason == "error"

    def collect(self) -> Iterator[Metric]:
        """Every metric, as prometheus-client's registry asks for them."""
        yield from self._gauges()
        yield from self._counters()
        for name, (text, _) in _DISTRIBUTIONS.items():
            family = HistogramMetricFamily(f"jaxinfer:{name}", text)
            self._distributions[name].add_to(family)
            yield family
        family = HistogramMetricFamily(
            "jaxinfer:http_request_duration_seconds", "HTTP requests by route.", labels=["route"]
        )
        for route, distribution in self._http_seconds.items():
            distribution.add_to(family, (route,))
        yield family

    def _gauges(self) -> Iterator[Metric]:
        load = self._service.load
        for name, text, value in (
            ("num_requests_waiting", "Requests that wait for a slot in the engine.", load.waiting),
            ("num_requests_running", "Requests in the engine's steps.", load.running),
            ("kv_cache_usage_perc", "Share of KV pages that running requests hold, 0 to 1.", load.kv_usage),
            (
                "queued_prefill_tokens",
                "Prompt tokens of requests without a first token.",
                self._service.queued_prefill_tokens,
            ),
            ("engine_healthy", "1 while the engine runs.", float(self._service.healthy)),
        ):
            yield GaugeMetricFamily(f"jaxinfer:{name}", text, value)
        facts = {
            name: str(value)[:_MAX_LABEL_CHARS]
            for name, value in {
                "version": jaxinfer.__version__,
                "model": self._model.name,
                "max_model_len": self._model.max_model_len,
            }.items()
        }
        yield _info("info", "Version and model.", facts)
        geometry = {
            label: str(self._model.facts[fact])
            for label, fact in {"block_size": "page_size", "num_gpu_blocks": "num_pages"}.items()
            if fact in self._model.facts
        }
        if geometry:
            yield _info("cache_config_info", "Tokens of a KV page, and number of pages.", geometry)

    def _counters(self) -> Iterator[Metric]:
        load = self._service.load
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of requests that have their first token.", self._prompt_tokens),
            ("generation_tokens", "Tokens generated.", load.generated_tokens),
            (
                "computed_prefill_tokens",
                "Prompt tokens computed, as opposed to found in the cache.",
                load.prefilled_tokens,
            ),
            ("prefix_cache_queries", "Prompt tokens looked for in the prefix cache.", self._cache_queries),
            ("prefix_cache_hits", "Prompt tokens found there.", self._cache_hits),
            ("num_preemptions", "Times a running request lost its pages to another.", load.preemptions),
            ("corrupted_requests", "Completions that failed, as by NaN in their logits.", self._corrupted),
        ):
            yield CounterMetricFamily(f"jaxinfer:{name}", text, value)
        for name, text, label, counts in (
            ("request_success", "Completions by how they ended.", "finished_reason", self._ended),
            ("admission_rejections", "Requests refused because of load.", "reason", self._rejected),
        ):
            family = CounterMetricFamily(f"jaxinfer:{name}", text, labels=[label])
            for key, count in counts.items():
                family.add_metric([key], count)
            yield family
        family = CounterMetricFamily(
            "jaxinfer:http_requests", "HTTP requests by route and status.", labels=["route", "status"]
        )
        for labels, count in self._http.items():
            family.add_metric(list(labels), count)
        yield family


def _info(name: str, text: str, labels: dict[str, str]) -> Metric:
    family = GaugeMetricFamily(f"jaxinfer:{name}", text, labels=list(labels))
    family.add_metric(list(labels.values()), 1)
    return family
