"""Prometheus metrics of isolated functions: states, memory, starts, and the measures that a kernel does not have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from manylora.functions.wire import FunctionState

__all__ = ["function_metrics"]


def function_metrics(states: Sequence[FunctionState]) -> Iterator[Metric]:
    """Yield the metrics of functions that have been awake; only those that are awake have series of their own."""
    by_state = GaugeMetricFamily("manylora_functions", "Functions that have been awake, by state.", labels=["state"])
    for state, count in Counter(one.state for one in states).items():
        by_state.add_metric([state], count)
    yield by_state
    awake = [one for one in states if one.state == "awake"]
    memory = GaugeMetricFamily(
        "manylora_function_memory_bytes", "Proportional set size of a function's process.", labels=["function"]
    )
    missing = GaugeMetricFamily(
        "manylora_function_isolation_missing", "Functions awake without a measure of isolation.", labels=["measure"]
    )
    for one in awake:
        memory.add_metric([one.name], one.pss_bytes)
    for measure, count in Counter(note.name for one in awake for note in one.missing).items():
        missing.add_metric([measure], count)
    yield memory
    yield missing
    starts = CounterMetricFamily("manylora_function_starts", "Processes of functions that were woken.")
    starts.add_metric([], sum(one.num_starts for one in states))
    deaths = CounterMetricFamily("manylora_function_deaths", "Processes of functions that died.")
    deaths.add_metric([], sum(one.num_deaths for one in states))
    yield starts
    yield deaths
    cold = GaugeMetricFamily(
        "manylora_function_start_seconds", "The last start of a function that is awake.", labels=["function", "stage"]
    )
    for one in awake:
        if one.last_start is not None:
            for stage, took_s in one.last_start.stages_s.items():
                cold.add_metric([one.name, stage], took_s)
    yield cold
