"""Histograms and counters of requests under vLLM's names, fed with the engines' observations.

Older dashboards ask for names that vLLM has renamed since; those with the same meaning are shown under both names.
"""

from __future__ import annotations

from collections import Counter as CountOf
from collections.abc import Iterable, Sequence
from itertools import chain

from prometheus_client import CollectorRegistry, Counter

from manylora.hosting.protocol import FinishedRequest, Observations
from manylora.server.metrics.histogram import FIRST_TOKEN_S, NUM_CHOICES, REQUEST_S, TOKEN_S, TOKENS, BatchHistogram

__all__ = ["RequestMetrics"]


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
