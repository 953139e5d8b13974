"""OpenTelemetry spans: one a request, within the trace that its `traceparent` header names, and one for each phase in the engine.

OpenTelemetry is optional. With an endpoint, spans are sent there over OTLP/HTTP; without one they go to whatever provider the process
has (`opentelemetry-instrument`, or an application around this server), which by default drops them. Spans hold counts and times, never text.
Attribute names are those of OpenTelemetry's conventions for HTTP and generative AI.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web

import jaxinfer
from jaxinfer.engine.service import RequestStream
from jaxinfer.errors import ConfigError
from jaxinfer.server.call import call_of, route_of

_UNTRACED = frozenset(("/health", "/ready", "/metrics"))
_MAX_STREAMS = 16  # of one request that have spans of their own
_NOTES = {
    "model": "gen_ai.response.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "finish_reasons": "gen_ai.response.finish_reasons",
}


class Tracing:
    """Makes spans for one server."""

    def __init__(self, endpoint: str | None, *, provider: Any = None):
        """
        Args:
          endpoint: OTLP/HTTP traces address such as http://localhost:4318/v1/traces; None: use `provider`.
          provider: a TracerProvider; None: the process's own.
        Raises:
          ConfigError: OpenTelemetry, or its exporter, is not installed.
        """
        self._owned: Any = None
        if endpoint is not None:
            self._owned = provider = _exporting(endpoint)
        self._api = _import("opentelemetry.trace")
        self._propagate = _import("opentelemetry.propagate")
        self._tracer = self._api.get_tracer("jaxinfer", jaxinfer.__version__, provider)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """A span around the handler; the log line gets its trace id."""
        route = route_of(request)
        if route in _UNTRACED:
            return await handler(request)
        call = call_of(request)
        span = self._tracer.start_span(
            f"{request.method} {route}",
            context=self._propagate.extract(request.headers),
            kind=self._api.SpanKind.SERVER,
            attributes={"http.request.method": request.method, "http.route": route},
        )
        if span.is_recording():
            call.note["trace_id"] = self._api.format_trace_id(span.get_span_context().trace_id)
        try:
            response = await handler(request)
            span.set_attribute("http.response.status_code", response.status)
            if response.status >= 500:
                span.set_status(self._api.StatusCode.ERROR)
            return response
        except asyncio.CancelledError:
            span.set_attribute("error.type", "client_closed_request")
            raise
        except BaseException as error:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(self._api.StatusCode.ERROR)
            raise
        finally:
            for note, attribute in _NOTES.items():
                if note in call.note:
                    span.set_attribute(attribute, call.note[note])
            self._phases(span, call.streams)
            span.end()

    async def close(self, app: web.Application) -> None:
        """Sends what is left; for aiohttp's on_cleanup."""
        if self._owned is not None:
            await asyncio.to_thread(self._owned.shutdown)

    def _phases(self, parent: Any, streams: Sequence[RequestStream]) -> None:
        """Spans for the queue, the prompt and the decoding of requests that have left the engine or are about to."""
        if not parent.is_recording():
            return
        context = self._api.set_span_in_context(parent)
        epoch = time.time_ns() - time.perf_counter_ns()
        now = time.perf_counter()
        for stream in streams[:_MAX_STREAMS]:
            started = None if stream.output is None else stream.output.started
            if started is None:  # an engine that does not say
                started = stream.first_token
            times = [stream.submitted, started, stream.first_token, stream.finished]
            for name, begin, end in zip(("queue", "prefill", "decode"), times, times[1:], strict=False):
                if begin is not None:
                    span = self._tracer.start_span(
                        name, context=context, start_time=epoch + round(begin * 1e9)
                    )
                    span.end(epoch + round((now if end is None else end) * 1e9))


def make_tracing(endpoint: str | None) -> Tracing | None:
    """None when nothing is asked for and OpenTelemetry is not installed. Raises ConfigError as `Tracing` does."""
    try:
        return Tracing(endpoint)
    except ConfigError:
        if endpoint is not None:
            raise
        return None


def _exporting(endpoint: str) -> Any:
    sdk, export = _import("opentelemetry.sdk.trace"), _import("opentelemetry.sdk.trace.export")
    resources = _import("opentelemetry.sdk.resources")
    exporter = _import("opentelemetry.exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter
    resource = resources.Resource.create({"service.name": "jaxinfer"})
    provider = sdk.TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(export.BatchSpanProcessor(exporter(endpoint=endpoint)))
    return provider


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            f"tracing needs {name}: install opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http"
        ) from None
