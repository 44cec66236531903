"""From the core's events to numbers for histograms, in the engine process.

A few floats per turn leave on the message that carries the tokens, and no record of an ended request is kept
(``measure.recorder`` keeps every request, for runs that are evaluated at their end). Times are those of the events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from manylora.core.events import (
    AdapterAwaited,
    AdapterEvicted,
    AdapterLoaded,
    Event,
    RequestAdmitted,
    RequestArrived,
    RequestFinished,
    StepFinished,
    TokensEmitted,
)
from manylora.core.types import AdapterKey, Tier
from manylora.serving.hosting.protocol import AdapterMove, FinishedRequest, Observations

__all__ = ["Observer"]

MOST_MOVES = 64  # moves of adapters that a message carries; thousands may be unloaded at once


@dataclass(slots=True)
class _InFlight:
    """A request that has not ended: the time of its arrival or last token, its adapter, limit of tokens and tenant."""

    last_at: float
    adapter: str
    max_tokens: int
    tenant: str
    has_token: bool = False
    load_s: float = 0.0


class Observer:
    """An event sink that gathers observations until ``take``. For the loop's thread alone."""

    def __init__(self) -> None:
        self._gathered = Observations()
        self._in_flight: dict[str, _InFlight] = {}
        self._num_first = 0  # first tokens of answers that the step in hand yields
        self._awaiting: dict[AdapterKey, dict[str, float]] = {}  # since when requests lack an adapter alone

    def __call__(self, event: Event) -> None:
        """Add one event."""
        gathered = self._gathered
        match event:
            case TokensEmitted(at=at, request_ids=request_ids):
                in_flight = self._in_flight
                for request_id in request_ids:
                    request = in_flight[request_id]
                    if not request.has_token:
                        self._num_first += 1
                    into = gathered.inter_token_s if request.has_token else gathered.ttft_s
                    values = into.get(request.adapter)
                    if values is None:
                        values = into[request.adapter] = []
                    values.append(at - request.last_at)
                    request.last_at, request.has_token = at, True
            case StepFinished(num_tokens=num_tokens):
                # As in vLLM: a token that decodes counts once, and the last of a prompt beside the one that it yields.
                gathered.step_tokens.append(num_tokens + self._num_first)
                self._num_first = 0
            case RequestArrived(at=at, request_id=request_id, name=name, limit=limit):
                has_token = event.num_answered > 0
                self._in_flight[request_id] = _InFlight(at, name, limit, event.tenant, has_token=has_token)
            case RequestAdmitted(waited_s=waited_s):
                gathered.queue_s.append(waited_s)
            case RequestFinished():
                self._finish(event)
            case AdapterAwaited(at=at, request_id=request_id, adapter=adapter):
                self._awaiting.setdefault(adapter, {})[request_id] = at
            case AdapterLoaded(at=at, adapter=key, tier=tier, took_s=took_s, error=error):
                self._note_move(key, tier, "loaded" if error is None else "failed", took_s, error or "")
                for request_id, since in self._awaiting.pop(key, {}).items():
                    if (waiting := self._in_flight.get(request_id)) is not None:
                        waiting.load_s += at - since
                if error is not None:
                    gathered.num_failed_loads += 1
                elif tier is Tier.DEVICE:
                    gathered.device_loads_s.append(took_s)
                else:
                    gathered.host_loads_s.append(took_s)
            case AdapterEvicted(adapter=key, tier=tier):
                self._note_move(key, tier, "evicted")

    def forget(self, request_ids: list[str]) -> None:
        """Report no end of these requests: they were refused with others."""
        for request_id in request_ids:
            self._in_flight.pop(request_id, None)

    def take(self) -> Observations:
        """Return the observations since the last call."""
        gathered, self._gathered = self._gathered, Observations()
        return gathered

    def _note_move(
        self,
        key: AdapterKey,
        tier: Tier,
        kind: Literal["loaded", "evicted", "failed"],
        took_s: float = 0.0,
        error: str = "",
    ) -> None:
        if len(self._gathered.moves) < MOST_MOVES:
            self._gathered.moves.append(AdapterMove(key, tier, kind, took_s, error))

    def _finish(self, event: RequestFinished) -> None:
        request = self._in_flight.pop(event.request_id, None)
        if request is None:
            return
        first_at, admitted_at = event.first_token_at, event.admitted_at
        self._gathered.finished.append(
            FinishedRequest(
                request.adapter,
                event.reason.value,
                event.at - event.arrived_at,
                event.num_prompt_tokens,
                event.num_output_tokens,
                event.num_cached_tokens,
                request.max_tokens,
                None if first_at is None or admitted_at is None else first_at - admitted_at,
                None if first_at is None else event.at - first_at,
                event.num_preemptions,
                request.tenant,
                event.engine_s,
                event.request_id,
                request.load_s,
            )
        )
