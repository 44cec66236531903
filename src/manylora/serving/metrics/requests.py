"""Histograms and counters of requests under vLLM's names, fed with the engines' observations.

Older dashboards ask for names that vLLM has renamed since; those with the same meaning are shown under both names.

Histograms that count equal values together, and the edges of their buckets.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as CountOf
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from manylora.serving.hosting.protocol import FinishedRequest, Observations

__all__ = [
    "FIRST_TOKEN_S",
    "LOAD_S",
    "NUM_CHOICES",
    "REQUEST_S",
    "TOKENS",
    "TOKEN_S",
    "BatchHistogram",
    "RequestMetrics",
]

FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
TOKEN_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
REQUEST_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
LOAD_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
NUM_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)


class BatchHistogram(Collector):
    """A Prometheus histogram with fixed labels that adds many equal values at once.

    Every token has its gap to the one before, and gaps of one step are often equal: counting equal values together
    costs a tenth of one ``Histogram.observe`` for each.

    Args:
        name: Of the metric.
        text: Its description.
        labels: Its labels, by name.
        registry: Shows it.
        buckets: Upper edges, ascending, without infinity.
    """

    def __init__(
        self, name: str, text: str, labels: Mapping[str, str], *, registry: CollectorRegistry, buckets: Sequence[float]
    ) -> None:
        self._name, self._text, self._labels = name, text, dict(labels)
        self._edges = tuple(buckets)
        self._counts = [0] * (len(self._edges) + 1)
        self._sum = 0.0
        registry.register(self)

    def add(self, value: float, count: int = 1) -> None:
        """Count a value ``count`` times."""
        self._counts[bisect_left(self._edges, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[Metric]:
        """Yield the histogram; prometheus-client calls this."""
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        edges = [*map(str, map(float, self._edges)), "+Inf"]
        buckets = list(zip(edges, accumulate(self._counts), strict=True))
        family.add_metric(list(self._labels.values()), buckets=buckets, sum_value=self._sum)
        yield family


class RequestMetrics:
    """Durations and sizes of requests.

    A request that ended before its first token counts in its end-to-end time and its reason alone.

    Args:
        served_name: The label ``model_name``.
        registry: Shows the metrics.
    """

    def __init__(self, served_name: str, registry: CollectorRegistry) -> None:
        self._served_name = served_name

        def histogram(name: str, text: str, buckets: Sequence[float]) -> BatchHistogram:
            return BatchHistogram(f"vllm:{name}", text, {"model_name": served_name}, registry=registry, buckets=buckets)

        self._ttft = histogram("time_to_first_token_seconds", "Time to first token.", FIRST_TOKEN_S)
        self._inter_token = histogram("inter_token_latency_seconds", "Time between tokens.", TOKEN_S)
        self._inter_token_old = histogram("time_per_output_token_seconds", "Time between tokens.", TOKEN_S)
        self._e2e = histogram("e2e_request_latency_seconds", "Time from arrival to the end.", REQUEST_S)
        self._queue = histogram("request_queue_time_seconds", "Time spent waiting.", REQUEST_S)
        self._inference = histogram("request_inference_time_seconds", "Time from admission to the end.", REQUEST_S)
        self._prefill = histogram("request_prefill_time_seconds", "Time from admission to first token.", REQUEST_S)
        self._decode = histogram("request_decode_time_seconds", "Time from first token to the end.", REQUEST_S)
        self._per_token = histogram(
            "request_time_per_output_token_seconds", "Mean time between a request's tokens.", TOKEN_S
        )
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of ended requests.", TOKENS)
        self._computed = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens that the prefix cache did not hold.", TOKENS
        )
        self._generated = histogram("request_generation_tokens", "Generated tokens of ended requests.", TOKENS)
        self._max_tokens = histogram("request_params_max_tokens", "Limits of tokens of ended requests.", TOKENS)
        self._choices = histogram("request_params_n", "Answers of a request.", NUM_CHOICES)
        self._longest = histogram(
            "request_max_num_generation_tokens", "Tokens of the longest of a request's answers.", TOKENS
        )
        self._steps = histogram("iteration_tokens_total", "Tokens of a step.", TOKENS)
        self._finished = Counter(
            "vllm:request_success", "Ended requests.", ["model_name", "finished_reason"], registry=registry
        )

    def observe(self, observed: Observations) -> None:
        """Add an engine's observations since its last message."""
        values: tuple[tuple[BatchHistogram, Iterable[float]], ...] = (
            (self._queue, observed.queue_s),
            (self._ttft, chain.from_iterable(observed.ttft_s.values())),
            (self._steps, observed.step_tokens),
        )
        for histogram, each in values:
            for value, count in CountOf(each).items():
                histogram.add(value, count)
        # Gaps within one step are mostly equal.
        for gap_s, count in CountOf(chain.from_iterable(observed.inter_token_s.values())).items():
            self._inter_token.add(gap_s, count)
            self._inter_token_old.add(gap_s, count)
        for request in observed.finished:
            self._finish(request)

    def count_answers(self, num_tokens: Sequence[int]) -> None:
        """Add the answers of one request of a client, by their numbers of tokens."""
        self._choices.add(len(num_tokens))
        self._longest.add(max(num_tokens))

    def _finish(self, request: FinishedRequest) -> None:
        self._finished.labels(self._served_name, request.reason).inc()
        self._e2e.add(request.e2e_s)
        self._prompt.add(request.num_prompt_tokens)
        self._generated.add(request.num_output_tokens)
        self._max_tokens.add(request.max_tokens)
        if request.prefill_s is None or request.decode_s is None:
            return
        self._computed.add(request.num_prompt_tokens - request.num_cached_tokens)
        self._prefill.add(request.prefill_s)
        self._decode.add(request.decode_s)
        self._inference.add(request.prefill_s + request.decode_s)
        if request.num_output_tokens > 1:
            self._per_token.add(request.decode_s / (request.num_output_tokens - 1))
