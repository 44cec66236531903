"""Isolated functions as the server reports them: their states in ``GET /status``, and their Prometheus metrics.

The states are also what agents report to the controller of functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

__all__ = ["FunctionName", "FunctionStart", "FunctionState", "MeasureNote", "function_metrics"]

FunctionName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/@+-]*$")]
Text = Annotated[str, Meta(max_length=4096)]


class MeasureNote(msgspec.Struct, frozen=True):
    """A measure of isolation that is not in force, and the reason."""

    name: Text
    note: Text


class FunctionStart(msgspec.Struct, frozen=True, kw_only=True):
    """The last start of a function.

    Args:
        at: Its begin, in seconds since the epoch.
        begun_from: The state that the start began from: ``nothing``, ``backbone`` or ``zygote``.
        stages_s: Seconds of each stage, in order; they add up to ``total_s``.
        total_s: From the request, or the decision, until requests are taken.
        first_token_s: From there to the first token of the request that woke it; ``None`` if none did.
    """

    at: float
    begun_from: Text
    stages_s: dict[str, float]
    total_s: float
    first_token_s: float | None = None


class FunctionState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A function on a node that has ever been awake there since the agent's start.

    Args:
        state: ``asleep``, ``waking``, ``awake``, ``ending`` or ``failed``.
        awake_since: In seconds since the epoch.
        is_held: Whether pre-loading keeps it awake: the platform pays then.
        pss_bytes: Proportional set size of its process.
        requests_per_s: Rate of its requests.
        error: The reason why it failed.
        missing: Measures that are not in force.
    """

    name: FunctionName
    state: Text
    pid: int | None = None
    awake_since: float | None = None
    is_held: bool = False
    num_running: int = 0
    num_waiting: int = 0
    pss_bytes: int = 0
    own_bytes: int = 0
    adapter_bytes: int = 0
    requests_per_s: float = 0.0
    num_starts: int = 0
    num_deaths: int = 0
    last_start: FunctionStart | None = None
    error: Text | None = None
    missing: tuple[MeasureNote, ...] = ()


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
