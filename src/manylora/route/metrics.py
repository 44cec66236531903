"""Prometheus metrics of the router itself, by backend."""

from __future__ import annotations

from collections import Counter as CountOf
from collections.abc import Iterable, Iterator
from enum import Enum

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from manylora.core.routing.view import Sent
from manylora.route.backend import Backend, BackendState

__all__ = ["AttemptEnd", "ProxyMetrics", "is_of_book"]

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
RESIDENT = {True: "yes", False: "no", None: "unknown"}


class AttemptEnd(Enum):
    """The end of one attempt at a backend."""

    ANSWERED = "answered"  # the client has the whole answer, also an error of the backend that was passed on
    BROKEN = "broken"  # the answer broke off behind its first byte
    REFUSED = "refused"  # the backend did not take the request (429, 502, 503, 504, or 404 of an adapter)
    FAILED = "failed"  # no answer: no connection, lost, illegal
    CANCELLED = "cancelled"  # the client went


class ProxyMetrics(Collector):
    """Counts attempts, failures, hits and latencies; gauges are read when they are scraped."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._backends: Iterable[Backend] = ()
        one, two = ["backend"], ["backend", "outcome"]
        self._attempts = self._counter("requests", "Attempts at backends by outcome.", two)
        self._failures = self._counter("failures", "Attempts that failed, by reason.", ["backend", "reason"])
        self._refused = self._counter("refused", "Requests that the router itself answered, by status.", ["status"])
        self._adapters = self._counter(
            "adapter_requests", "Requests for adapters, by residency when they were sent.", ["backend", "resident"]
        )
        self._arms = self._counter(
            "arm_requests", "Attempts for public names, by version and outcome.", ["name", "model", "outcome"]
        )
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of answered requests, as estimated.", one)
        self._cached = self._counter(
            "cached_tokens", "Of these, tokens that the backend's prefix cache was expected to hold.", one
        )
        self._first_byte = self._histogram("first_byte_seconds", "Time to the first byte of a body.", one)
        self._duration = self._histogram("request_seconds", "Time of answered requests at the backend.", one)

    def attempt(self, backend: Backend, outcome: AttemptEnd, seconds: float) -> None:
        """Count the end of an attempt."""
        if backend.is_leaving:  # its series are gone
            return
        self._attempts.labels(backend.url, outcome.value).inc()
        if outcome is AttemptEnd.ANSWERED:
            self._duration.labels(backend.url).observe(seconds)

    def arm(self, name: str, model: str, outcome: AttemptEnd) -> None:
        """Count the end of an attempt for a public name."""
        self._arms.labels(name, model, outcome.value).inc()

    def failure(self, backend: Backend, reason: str) -> None:
        """Count a failed attempt."""
        if not backend.is_leaving:
            self._failures.labels(backend.url, reason).inc()

    def refused(self, status: str) -> None:
        """Count a request that the router itself answered."""
        self._refused.labels(status).inc()

    def begun(self, backend: Backend, sent: Sent, seconds: float, is_resident: bool | None) -> None:
        """Count an answer that has begun: its prompt, its time to the first byte, its adapter's residency."""
        if backend.is_leaving:
            return
        if sent.adapter is not None:
            self._adapters.labels(backend.url, RESIDENT[is_resident]).inc()
        self._prompt.labels(backend.url).inc(sent.num_prompt_tokens)
        self._cached.labels(backend.url).inc(sent.num_cached_tokens)
        self._first_byte.labels(backend.url).observe(seconds)

    def left(self, backend: Backend) -> None:
        """Drop the series of a backend."""
        by_backend = self._attempts, self._failures, self._adapters, self._prompt, self._cached
        for metric in (*by_backend, self._first_byte, self._duration):
            metric.remove_by_labels({"backend": backend.url})

    def render(self, backends: Iterable[Backend]) -> bytes:
        """Return the metrics as Prometheus text."""
        self._backends = backends
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges."""
        backends = list(self._backends)
        states = CountOf(backend.health.state for backend in backends)
        family = GaugeMetricFamily("manylora_route_backends", "Backends by state.", labels=["state"])
        for state in BackendState:
            family.add_metric([state.value], states[state])
        yield family
        for name, text, values in (
            ("up", "1 for a backend that gets requests.", [float(one.health.is_up) for one in backends]),
            ("in_flight", "Requests of this router under way.", [one.num_in_flight for one in backends]),
            ("load", "Requests that the router counts with, those of others too.", [one.view.load for one in backends]),
            ("models", "Models that it lists.", [len(one.cards) for one in backends]),
            ("reported_running", "Requests that it says run.", [one.metrics.num_running for one in backends]),
            ("reported_waiting", "Requests that it says wait.", [one.metrics.num_waiting for one in backends]),
            ("reported_kv_usage", "Share of KV memory in use.", [one.metrics.kv_usage for one in backends]),
        ):
            family = GaugeMetricFamily(f"manylora_route_backend_{name}", text, labels=["backend"])
            for backend, value in zip(backends, values, strict=True):
                if value is not None:
                    family.add_metric([backend.url], value)
            yield family
        surplus = CounterMetricFamily(
            "manylora_route_surplus_answers", "Connections closed for bytes behind an answer.", labels=["backend"]
        )
        for backend in backends:
            surplus.add_metric([backend.url], backend.pool.num_surplus)
        yield surplus

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(f"manylora_route_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, labels: list[str]) -> Histogram:
        return Histogram(f"manylora_route_{name}", text, labels, registry=self._registry, buckets=SECONDS)


def is_of_book(family: Metric) -> bool:
    """Whether metrics are of the book of requests, which is the same in all workers: gauges are.

    Counters are of a worker, and so is their label: one that starts again begins them anew, which a sum would hide.
    """
    return family.type == "gauge" and not family.name.endswith("_created")
