"""Traces of requests, as OpenTelemetry has them, from the router to the engine.

::

    client --traceparent--> POST /v1/chat/completions          the router's span
                              choice
                              relay --traceparent--> POST ...  the server's span
                                                       parse
                                                       llm_request   with vLLM's attributes (metrics/engine_spans.py)

Spans have the times at which work began and ended, and are made where a request begins and ends: nothing is measured
for them in a step. The layer around the application is there only if traces are sent, and the packages of OpenTelemetry
are imported only then. They send spans on a thread of their own, and drop them rather than wait.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from time import time_ns
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from manylora.core import __version__
from manylora.core.errors import ConfigError
from manylora.core.server_config import TraceConfig
from manylora.core.types import SamplingParams

__all__ = ["TRACE", "HttpTrace", "SpanOfAnswers", "TraceLayer", "Traces", "sent_traces"]

TRACE = "manylora.trace"  # key of the ``HttpTrace`` in the scope of a request that has one

PARENT = (b"traceparent", b"tracestate")
LAST_SPANS_S = 2.0
MOST_ANSWERS = 65536  # requests whose answers are awaited; of more, the oldest have no spans of the engine

Headers: TypeAlias = Iterable[tuple[bytes, bytes]]


@dataclass(slots=True)
class SpanOfAnswers:
    """The span that an engine's spans for one HTTP request belong to, and the request's attributes."""

    parent: Any
    attributes: Mapping[str, str | int | float]
    num_left: int  # requests that engines have not ended


class Traces:
    """Makes spans and gives those that have ended to OpenTelemetry's ``processor``.

    The ``service`` is the ``service.name``, unless ``OTEL_SERVICE_NAME`` gives one.
    """

    def __init__(self, processor: Any, service: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.version": __version__})
        if resource.attributes["service.name"].startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": service}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("manylora", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self.answers: OrderedDict[str, SpanOfAnswers] = OrderedDict()
        """Requests that engines answer, by the beginning of their ids."""

    def begin(self, scope: Scope) -> HttpTrace:
        """Begin the span of an HTTP request, below that of its caller."""
        carrier = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in PARENT}
        attributes = {"http.request.method": scope["method"], "http.route": scope["path"]}
        name = f"{scope['method']} {scope['path']}"
        return HttpTrace(self, self.start(name, "SERVER", self._propagator.extract(carrier), attributes))

    def start(
        self, name: str, kind: str, parent: Any, attributes: Mapping[str, Any], began_ns: int | None = None
    ) -> Any:
        """Begin a span, now or at a time in nanoseconds since the epoch; ``kind`` is OpenTelemetry's."""
        from opentelemetry.trace import SpanKind

        return self._tracer.start_span(
            name, context=parent, kind=SpanKind[kind], attributes=attributes, start_time=began_ns
        )

    def below(self, span: Any) -> Any:
        """Return the parent of spans below a span."""
        from opentelemetry.trace import set_span_in_context

        return set_span_in_context(span)

    def headers(self, span: Any) -> list[tuple[bytes, bytes]]:
        """Return the headers that name a span as the parent of the callee's."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self.below(span))
        return [(name.encode(), value.encode()) for name, value in carrier.items()]

    async def close(self) -> None:
        """Send the spans that have ended, in ``LAST_SPANS_S`` at most: a collector that is gone is tried for longer."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, LAST_SPANS_S)


class HttpTrace:
    """The span of an HTTP request that is being answered."""

    def __init__(self, traces: Traces, span: Any) -> None:
        self._traces = traces
        self._span = span
        self._below = traces.below(span)
        self._began_ns = time_ns()

    def submitted(
        self, answer_id: str, sampling: SamplingParams, *, model: str, num_prompts: int, num_answers: int
    ) -> None:
        """Note that the request was read, and goes to an engine under ids that begin with ``answer_id``."""
        self.add("parse", self._began_ns)
        if not self._span.is_recording():  # not sampled
            return
        attributes: dict[str, str | int | float] = {
            "gen_ai.request.id": answer_id,
            "gen_ai.request.model": model,
            "gen_ai.request.n": num_answers,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
        }
        answers = self._traces.answers
        answers[answer_id] = SpanOfAnswers(self._below, attributes, num_prompts * num_answers)
        if len(answers) > MOST_ANSWERS:
            answers.popitem(last=False)

    def add(self, name: str, began_ns: int) -> None:
        """Add a part of the request that ends now."""
        self._traces.start(name, "INTERNAL", self._below, {}, began_ns).end()

    def relay(self, url: str, headers: Headers) -> tuple[Any, list[tuple[bytes, bytes]]]:
        """Begin the span of an attempt at a backend; return it, and the request's headers with it as the parent."""
        span = self._traces.start("relay", "CLIENT", self._below, {"server.address": url})
        kept = [header for header in headers if header[0] not in PARENT]
        return span, [*kept, *self._traces.headers(span)]

    def end(self, status: int) -> None:
        """End the span, with the status of the answer; 0 if there was none."""
        from opentelemetry.trace import StatusCode

        if status:
            self._span.set_attribute("http.response.status_code", status)
        if not 0 < status < 500:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


@dataclass(frozen=True, slots=True)
class TraceLayer:
    """An application around another, with a span for each request to one of the paths."""

    app: ASGIApp
    traces: Traces
    paths: Collection[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http" or scope["path"].removeprefix(scope.get("root_path", "")) not in self.paths:
            await self.app(scope, receive, send)
            return
        trace = scope[TRACE] = self.traces.begin(scope)
        status = 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            trace.end(status)


def sent_traces(config: TraceConfig, service: str) -> Traces | None:
    """Return traces that go to the collector of a configuration; ``None`` if there is none.

    A URL with a path speaks HTTP (``http://host:4318/v1/traces``), one without gRPC (``http://host:4317``).
    ``ConfigError`` if OpenTelemetry's packages are not installed.
    """
    endpoint = config.otlp_traces_endpoint
    if endpoint is None:
        return None
    try:
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        if urlsplit(endpoint).path.strip("/"):
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        else:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"Got otlp_traces_endpoint = {endpoint!r} without {error.name}, expected an install of manylora[otel]"
        ) from None
    return Traces(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)), service)
