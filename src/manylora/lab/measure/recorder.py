"""The recorder: an event sink of one replica that makes records, on the wall clock and on the virtual one.

A request's waits are recorded apart::

    arrived            awaited      loaded        admitted         first token                finished
      |---- queueing ------------------------------|                   |                          |
      |                   |- adapter -|            |                   |- gap -|- gap -| ....     |
      |---------------------------- TTFT ------------------------------|                          |

*Adapter* is the part of loading that delayed the request: it would have been admitted (``AdapterAwaited``) if its load
had ended. Several such spans add up. Loading while the request also waits for a seat, step tokens or pages is not
counted. Neither is a load that a pre-empted request awaits after its first token: that is a gap.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from manylora.core.engine.status import EngineStats
from manylora.core.errors import ManyloraError
from manylora.core.events import (
    AdapterAwaited,
    AdapterLoaded,
    AdapterLoadStarted,
    Event,
    RequestAdmitted,
    RequestArrived,
    RequestFinished,
    RequestSquashed,
    StepFinished,
    StepLaunched,
    TokensEmitted,
)
from manylora.core.types import AdapterKey, FinishReason, Request, Tier
from manylora.lab.measure.records import GAUGES, Loads, RequestRecord, Timeline

__all__ = ["Recorder"]


@dataclass(slots=True)
class _OpenRequest:
    """A request that has not ended."""

    name: str
    last_token_at: float | None = None
    gaps_s: array[float] = field(default_factory=lambda: array("d"))
    was_resident: bool | None = None
    awaited_from: float | None = None
    adapter_wait_s: float = 0.0
    num_squashes: int = 0


class Recorder:
    """An event sink that records every request, and a timeline of the replica. Only the loop's thread may use it.

    An adapter that has no rank has rank 0 in the records.
    """

    def __init__(
        self, *, replica: int = 0, ranks: Mapping[str, int] | None = None, sample_every_s: float = 1.0
    ) -> None:
        self.records: list[RequestRecord] = []
        self.timeline = Timeline(
            gauges={name: array("d") for name in GAUGES}, loads={Tier.HOST: Loads(), Tier.DEVICE: Loads()}
        )
        self._replica = replica
        self._ranks = ranks or {}
        self._stats: Callable[[], EngineStats] | None = None
        self._sample_every_s = sample_every_s
        self._next_sample_at = 0.0
        self._in_flight: dict[str, _OpenRequest] = {}
        self._awaiting: dict[AdapterKey, list[_OpenRequest]] = {}
        self._load_bytes: dict[tuple[AdapterKey, Tier], int] = {}
        self._link_free_at = {Tier.HOST: 0.0, Tier.DEVICE: 0.0}
        # A lookup by type: about 100,000 events a minute arrive here, too many for match.
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            TokensEmitted: self._on_tokens,
            StepLaunched: self._on_launch,
            StepFinished: self._on_step,
            RequestArrived: self._on_arrival,
            RequestAdmitted: self._on_admission,
            RequestSquashed: self._on_squash,
            RequestFinished: self._on_end,
            AdapterAwaited: self._on_wait,
            AdapterLoadStarted: self._on_load_start,
            AdapterLoaded: self._on_load,
        }

    def watch(self, stats: Callable[[], EngineStats]) -> None:
        """Sample an engine through its ``EngineCore.stats`` from now on. Without this the timeline has no samples."""
        self._stats = stats

    def __call__(self, event: Event) -> None:
        """Record one event."""
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    def refuse(self, request: Request, error: ManyloraError, now: float) -> None:
        """Record a request that the engine refused at ``now`` seconds."""
        self.records.append(
            RequestRecord(
                request_id=request.request_id,
                adapter=request.model if request.model in self._ranks else "",
                rank=self._ranks.get(request.model, 0),
                num_prompt_tokens=len(request.prompt),
                num_output_tokens=0,
                arrived_at=now,
                admitted_at=None,
                first_token_at=None,
                finished_at=now,
                error=str(error),
                replica=self._replica,
            )
        )

    # -- requests ----------------------------------------------------------------------------------------------------

    def _on_arrival(self, event: RequestArrived) -> None:
        self._in_flight[event.request_id] = _OpenRequest(event.name)

    def _on_admission(self, event: RequestAdmitted) -> None:
        if event.adapter is not None:
            self._in_flight[event.request_id].was_resident = event.adapter_was_resident

    def _on_squash(self, event: RequestSquashed) -> None:
        self._in_flight[event.request_id].num_squashes += 1

    def _on_tokens(self, event: TokensEmitted) -> None:
        now, in_flight = event.at, self._in_flight
        for request_id in event.request_ids:
            request = in_flight[request_id]
            if request.last_token_at is not None:
                request.gaps_s.append(now - request.last_token_at)
            request.last_token_at = now

    def _on_end(self, event: RequestFinished) -> None:
        request = self._in_flight.pop(event.request_id)
        _end_wait(request, event.at)
        is_whole = event.reason in (FinishReason.STOP, FinishReason.LENGTH)
        self.records.append(
            RequestRecord(
                request_id=event.request_id,
                adapter=request.name,
                rank=self._ranks.get(request.name, 0),
                num_prompt_tokens=event.num_prompt_tokens,
                num_output_tokens=event.num_output_tokens,
                arrived_at=event.arrived_at,
                admitted_at=event.admitted_at,
                first_token_at=event.first_token_at,
                finished_at=event.at,
                max_gap_s=max(request.gaps_s, default=0.0),
                was_resident=request.was_resident,
                adapter_wait_s=request.adapter_wait_s,
                num_cached_tokens=event.num_cached_tokens,
                num_preemptions=event.num_preemptions,
                num_squashes=request.num_squashes,
                error=None if is_whole else event.reason.value,
                replica=self._replica,
                gaps_s=request.gaps_s,
            )
        )

    # -- steps -------------------------------------------------------------------------------------------------------

    def _on_launch(self, event: StepLaunched) -> None:
        if event.at >= self._next_sample_at and self._stats is not None:
            self._sample(self._stats(), event.at)
            self._next_sample_at = event.at + self._sample_every_s

    def _sample(self, stats: EngineStats, now: float) -> None:
        timeline = self.timeline
        timeline.at.append(now)
        for name, column in timeline.gauges.items():
            column.append(getattr(stats, name))
        timeline.queues.append(tuple(queue.num_waiting for queue in stats.queues))

    def _on_step(self, event: StepFinished) -> None:
        steps = self.timeline.steps
        steps.took_s.append(event.took_s)
        steps.num_sequences.append(event.num_sequences)

    # -- loads -------------------------------------------------------------------------------------------------------

    def _on_wait(self, event: AdapterAwaited) -> None:
        request = self._in_flight[event.request_id]
        if request.awaited_from is None and request.last_token_at is None:
            request.awaited_from = event.at
            self._awaiting.setdefault(event.adapter, []).append(request)

    def _on_load_start(self, event: AdapterLoadStarted) -> None:
        self._load_bytes[event.adapter, event.tier] = event.num_bytes

    def _on_load(self, event: AdapterLoaded) -> None:
        now, tier = event.at, event.tier
        for request in self._awaiting.pop(event.adapter, ()):
            _end_wait(request, now)
        num_bytes = self._load_bytes.pop((event.adapter, tier))
        started_at, self._link_free_at[tier] = max(now - event.took_s, self._link_free_at[tier]), now
        if event.error is None:
            loads = self.timeline.loads[tier]
            loads.at.append(now)
            loads.busy_s.append(now - started_at)
            loads.num_bytes.append(num_bytes)


def _end_wait(request: _OpenRequest, now: float) -> None:
    """End a span in which a request waited for nothing but its adapter, if one is open."""
    if request.awaited_from is not None:
        request.adapter_wait_s += now - request.awaited_from
        request.awaited_from = None
