"""Types of the answer to ``GET /status``: the server encodes them, ``manylora top`` decodes them.

Names are those of ``EngineStats`` and of ``GET /adapters``. Fields are only added, and readers ignore unknown ones.
Agents report the states of functions to their controller in the same types.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from manylora.core.costs.rank_fit import StepFit
from manylora.core.engine.status import EngineStats
from manylora.core.scaling.autoscaler import ScalingDecision
from manylora.serving.hosting.fleet.resumption import ResumeStats

__all__ = [
    "AdapterRow",
    "FunctionName",
    "FunctionStart",
    "FunctionState",
    "Latency",
    "MeasureNote",
    "Percentiles",
    "ReplicaRow",
    "StatusReport",
]


FunctionName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/@+-]*$")]
Text = Annotated[str, Meta(max_length=4096)]


class MeasureNote(msgspec.Struct, frozen=True):
    """A measure of isolation that is not in force, and the reason."""

    name: Text
    note: Text


class FunctionStart(msgspec.Struct, frozen=True, kw_only=True):
    """The last start of a function."""

    at: float  # its begin, in seconds since the epoch
    begun_from: Text  # the state that the start began from: ``nothing``, ``backbone`` or ``zygote``
    stages_s: dict[str, float]  # seconds of each stage, in order; they add up to ``total_s``
    total_s: float  # from the request, or the decision, until requests are taken
    # From there to the first token of the request that woke it; ``None`` if none did.
    first_token_s: float | None = None


class FunctionState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A function on a node that has ever been awake there since the agent's start."""

    name: FunctionName
    state: Text  # ``asleep``, ``waking``, ``awake``, ``ending`` or ``failed``
    pid: int | None = None
    awake_since: float | None = None  # in seconds since the epoch
    is_held: bool = False  # whether pre-loading keeps it awake: the platform pays then
    num_running: int = 0
    num_waiting: int = 0
    pss_bytes: int = 0  # proportional set size of its process
    own_bytes: int = 0
    adapter_bytes: int = 0
    requests_per_s: float = 0.0  # rate of its requests
    num_starts: int = 0
    num_deaths: int = 0
    last_start: FunctionStart | None = None
    error: Text | None = None  # the reason why it failed
    missing: tuple[MeasureNote, ...] = ()  # measures that are not in force


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of durations in the window, in seconds, and their count."""

    count: int
    p50: float
    p90: float
    p99: float


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Latency over the window; ``None`` without a measurement."""

    ttft_s: Percentiles | None = None  # arrival to first token
    inter_token_s: Percentiles | None = None  # gaps between tokens
    e2e_s: Percentiles | None = None  # arrival to the end
    queue_s: Percentiles | None = None  # arrival to admission; in total only, not by adapter


class AdapterRow(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an adapter; ``GET /adapters/{name}`` has more."""

    name: str
    tier: str
    state: str
    pinned: bool
    generation: int
    rank: int
    num_pages: int
    num_running: int
    num_waiting: int
    num_requests: int
    num_hits: int
    last_used_s: float | None
    latency: Latency
    price: float | None = None
    error: str | None = None


class ReplicaRow(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of the fleet."""

    index: int  # its number, from 0
    state: str
    pid: int | None
    num_restarts: int
    num_in_flight: int  # requests that the API process has given to it
    node: str | None = None  # the node of a cluster that it runs on; ``None`` for the server's machine
    num_running: int | None = None  # as the next five, ``None`` while it does not serve
    num_waiting: int | None = None
    num_pages: int | None = None
    num_free_pages: int | None = None
    num_loads: int | None = None
    num_resident: int | None = None
    fits: tuple[StepFit, ...] = ()  # step-time models fitted to its steps; none before enough of them
    placed: tuple[str, ...] = ()  # adapters on its device, as many as the caller asked for: the most used first
    pinned: tuple[str, ...] = ()  # adapters that are pinned there, likewise


class StatusReport(msgspec.Struct, frozen=True, kw_only=True):
    """The server's state for a live view."""

    state: str  # ``starting``, ``serving``, ``restarting``, ``draining`` or ``stopped``
    model: str  # the base model's name
    version: str  # of manylora
    time: float  # time of the report, in seconds since the epoch; counters of two reports give rates
    started_at: float  # start of the server, in seconds since the epoch
    num_restarts: int  # engines started after the first; each starts its counters at zero
    num_in_flight: int  # HTTP requests being answered
    window_s: float  # length of the latency window, in seconds
    latency: Latency  # of all requests
    base: Latency  # of requests to the base
    page_bytes: int | None = None  # size of a page; ``None`` before the first engine is ready
    engine: EngineStats | None = None  # gauges and counters; ``None`` while no engine serves
    # Highest tier first, then busy ones, then the most requested; as many as the caller asked for.
    adapters: tuple[AdapterRow, ...] = ()
    generation_defaults: dict[str, float] = {}  # sampling defaults of the base model, by name
    replicas: tuple[ReplicaRow, ...] = ()
    resumes: ResumeStats | None = None  # requests that lost their engine
    scaling: ScalingDecision | None = None  # the last decision about the number of engines; ``None`` if it is fixed
    # Isolated functions that have been awake, with the measures that each lacks on this kernel.
    functions: tuple[FunctionState, ...] = ()
