"""What ``GET /status`` says, as types: the server encodes them, ``manylora top`` decodes them.

Names are those of ``EngineStats`` and of ``GET /adapters``. Fields are only ever added, and readers ignore those they
do not know.
"""

from __future__ import annotations

import msgspec

from manylora.engine.status import AdapterStatus, EngineStats

__all__ = ["AdapterRow", "Latency", "Percentiles", "StatusReport", "adapter_row"]


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of the window, in seconds, and how many there were."""

    count: int
    p50: float
    p90: float
    p99: float


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Latency over the window; ``None`` where there was nothing to measure.

    Args:
        ttft_s: Arrival to first token.
        inter_token_s: Gaps between tokens.
        e2e_s: Arrival to the end.
        queue_s: Arrival to admission; only in all, not by adapter.
    """

    ttft_s: Percentiles | None = None
    inter_token_s: Percentiles | None = None
    e2e_s: Percentiles | None = None
    queue_s: Percentiles | None = None


class AdapterRow(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter in short; ``GET /adapters/{name}`` has the rest."""

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


class StatusReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a live view needs.

    Args:
        state: ``starting``, ``serving``, ``restarting``, ``draining`` or ``stopped``.
        model: The base model's name.
        version: Of manylora.
        time: When this was true, in seconds since the epoch: counters of two reports make rates.
        started_at: When the server started, in seconds since the epoch.
        num_restarts: Engines started after the first; counters begin again with each.
        num_in_flight: HTTP requests being answered.
        window_s: What latencies are taken over, in seconds.
        latency: Of all requests.
        base: Of requests to the base.
        page_bytes: Size of a page; ``None`` before the first engine is ready.
        engine: Gauges and counters; ``None`` while there is no engine to ask.
        adapters: By tier, the busy ones first, then those asked for most; at most as many as the caller wanted.
    """

    state: str
    model: str
    version: str
    time: float
    started_at: float
    num_restarts: int
    num_in_flight: int
    window_s: float
    latency: Latency
    base: Latency
    page_bytes: int | None = None
    engine: EngineStats | None = None
    adapters: tuple[AdapterRow, ...] = ()


def adapter_row(status: AdapterStatus, latency: Latency) -> AdapterRow:
    """Put an adapter's state and latency together."""
    return AdapterRow(
        name=status.name,
        tier=status.tier.value,
        state=status.state,
        pinned=status.is_pinned,
        generation=status.generation,
        rank=status.version.rank,
        num_pages=status.version.num_pages,
        num_running=status.num_running,
        num_waiting=status.num_waiting,
        num_requests=status.num_requests,
        num_hits=status.num_hits,
        last_used_s=status.last_used_s,
        latency=latency,
        price=status.price,
    )
