"""Spans of answers, from the times that engines report of ended requests.

An engine reports how long a request waited, was read and answered, and nothing more is measured for a span. The times
are laid out backwards from the end, which is when the report arrives. Names of attributes are vLLM's, whose dashboards
ask for them, beside those of OpenTelemetry's conventions for generative models.

::

    llm_request
      |-- queue ------------|-- prefill --|-- decode --------|
              |- load ------|             first token        last
"""

from __future__ import annotations

from time import time_ns
from typing import Any

from manylora.serving.hosting.protocol import FinishedRequest, Observations
from manylora.serving.http.traces import SpanOfAnswers, Traces

__all__ = ["add_spans"]


def add_spans(traces: Traces, observed: Observations) -> None:
    """Add the requests that ended since an engine's last message; those without a trace have no span."""
    for finished in observed.finished:
        answer_id = finished.request_id.rpartition("-")[0]
        known = traces.answers.get(answer_id)
        if known is None:
            continue
        _add(traces, known, finished, time_ns())
        known.num_left -= 1
        if not known.num_left:
            del traces.answers[answer_id]


def _add(traces: Traces, known: SpanOfAnswers, finished: FinishedRequest, ended_ns: int) -> None:
    prefill_s, decode_s = finished.prefill_s or 0.0, finished.decode_s or 0.0
    queue_s = max(0.0, finished.e2e_s - prefill_s - decode_s)
    began_ns = ended_ns - int(finished.e2e_s * 1e9)
    attributes: dict[str, Any] = {
        **known.attributes,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.response.model": finished.adapter or known.attributes["gen_ai.request.model"],
        "gen_ai.response.finish_reasons": (finished.reason,),
        "gen_ai.request.max_tokens": finished.max_tokens,
        "gen_ai.usage.prompt_tokens": finished.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": finished.num_output_tokens,
        "gen_ai.usage.input_tokens": finished.num_prompt_tokens,
        "gen_ai.usage.output_tokens": finished.num_output_tokens,
        "gen_ai.latency.e2e": finished.e2e_s,
        "gen_ai.latency.time_in_queue": queue_s,
        "manylora.adapter": finished.adapter,
        "manylora.tenant": finished.tenant,
        "manylora.cached_tokens": finished.num_cached_tokens,
        "manylora.preemptions": finished.num_preemptions,
        "manylora.load_seconds": finished.load_s,
        "manylora.engine_seconds": finished.engine_s,
    }
    if finished.prefill_s is not None:
        attributes |= {
            "gen_ai.latency.time_to_first_token": queue_s + prefill_s,
            "gen_ai.latency.time_in_model_prefill": prefill_s,
            "gen_ai.latency.time_in_model_decode": decode_s,
            "gen_ai.latency.time_in_model_inference": prefill_s + decode_s,
        }
    span = traces.start("llm_request", "INTERNAL", known.parent, attributes, began_ns)
    below, at_ns = traces.below(span), began_ns
    parts = [("queue", queue_s)]
    if finished.prefill_s is not None:
        parts += [("prefill", prefill_s), ("decode", decode_s)]
    for name, seconds in parts:
        part = traces.start(name, "INTERNAL", below, {}, at_ns)
        at_ns += int(seconds * 1e9)
        if name == "queue" and finished.load_s:
            loading_ns = int(min(finished.load_s, seconds) * 1e9)
            load = traces.start("load", "INTERNAL", traces.below(part), {}, at_ns - loading_ns)
            load.end(at_ns)
        part.end(at_ns)
    span.end(ended_ns)
