"""Metrics with a label for the adapter, kept as requests end, and dropped with the adapter.

Tokens per adapter are always there: two series each, enough to share costs by. Latency histograms are three times
some twenty series each, too many for a scrape of a thousand adapters, and so an option
(``ServerConfig.adapter_histograms``). Without, ``GET /status`` has the last minute's percentiles.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from manylora.hosting.protocol import Observations

__all__ = ["FIRST_TOKEN_S", "REQUEST_S", "TOKEN_S", "AdapterMetrics"]

FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
TOKEN_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
REQUEST_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)


class AdapterMetrics:
    """Counters, and on demand histograms, by adapter's name.

    Args:
        registry: Shows them.
        has_histograms: Whether latencies are kept as well.
        max_adapters: Most names at once; the one that came first makes room. Nobody may ever scrape, so ``keep_only``
            cannot be all that bounds them.
    """

    def __init__(self, registry: CollectorRegistry, *, has_histograms: bool, max_adapters: int) -> None:
        self._names: dict[str, None] = {}
        self._max_adapters = max_adapters

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ["adapter_name"], registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram | None:
            if not has_histograms:
                return None
            return Histogram(name, text, ["adapter_name"], registry=registry, buckets=buckets)

        self._prompt = counter("manylora_adapter_prompt_tokens", "Prompt tokens of ended requests, by adapter.")
        self._generated = counter("manylora_adapter_generation_tokens", "Tokens generated for ended requests.")
        self._ttft = histogram("manylora_adapter_time_to_first_token_seconds", "Time to first token.", FIRST_TOKEN_S)
        self._inter_token = histogram("manylora_adapter_inter_token_latency_seconds", "Time between tokens.", TOKEN_S)
        self._e2e = histogram("manylora_adapter_e2e_request_latency_seconds", "Arrival to the end.", REQUEST_S)

    def observe(self, observed: Observations) -> None:
        """Take the engine's observations since its last message."""
        for request in observed.finished:
            if request.adapter:
                self._admit(request.adapter)
                self._prompt.labels(request.adapter).inc(request.num_prompt_tokens)
                self._generated.labels(request.adapter).inc(request.num_output_tokens)
                if self._e2e is not None:
                    self._e2e.labels(request.adapter).observe(request.e2e_s)
        for histogram, by_adapter in ((self._ttft, observed.ttft_s), (self._inter_token, observed.inter_token_s)):
            if histogram is None:
                continue
            for name, values in by_adapter.items():
                if name:
                    self._admit(name)
                    child = histogram.labels(name)
                    for value in values:
                        child.observe(value)

    def keep_only(self, names: Collection[str]) -> None:
        """Forget every other adapter."""
        for name in [name for name in self._names if name not in names]:
            self._forget(name)

    def _admit(self, name: str) -> None:
        if name not in self._names:
            if len(self._names) >= self._max_adapters:
                self._forget(next(iter(self._names)))
            self._names[name] = None

    def _forget(self, name: str) -> None:
        del self._names[name]
        for family in (self._prompt, self._generated, self._ttft, self._inter_token, self._e2e):
            if family is not None:
                family.remove(name)
