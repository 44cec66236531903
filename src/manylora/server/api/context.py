"""The parts that routes share: made when the server starts, told to the routes by the app's state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request

from manylora.config import EngineConfig, ServerConfig
from manylora.hosting.fleet import Fleet
from manylora.server.auth import Gate
from manylora.server.metrics.latency import LatencyWindow
from manylora.server.metrics.prometheus import Metrics
from manylora.text import Tokenizer

__all__ = ["Context", "context_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The server's parts.

    Args:
        engine_config: The engines' configuration.
        config: The HTTP face's.
        fleet: The engines.
        tokenizer: The base model's.
        gate: Lets requests pass, by key.
        metrics: Shown by ``/metrics``.
        latency: Of the last minute.
        lora_roots: Directories that adapters may be loaded from at run time.
        fingerprint: Of all that answers depend on beside the adapter: ``system_fingerprint``.
        started_at: When, in seconds since the epoch.
        epoch_s: Tells the time for people, in seconds since the epoch.
        monotonic_s: Tells the time for durations, in seconds.
    """

    engine_config: EngineConfig
    config: ServerConfig
    fleet: Fleet
    tokenizer: Tokenizer
    gate: Gate
    metrics: Metrics
    latency: LatencyWindow
    lora_roots: tuple[Path, ...]
    fingerprint: str
    started_at: int
    epoch_s: Callable[[], float]
    monotonic_s: Callable[[], float]


def context_of(request: Request) -> Context:
    """Return the server's parts."""
    context = request.app.state.context
    assert isinstance(context, Context)
    return context
