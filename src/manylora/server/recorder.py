"""From the core's events to numbers for histograms, in the engine process.

Events are many and small; what leaves is a handful of floats per turn, riding on the message that carries the
tokens. Nothing here looks at the clock: every event says when it happened.
"""

from __future__ import annotations

from manylora.events import (
    AdapterLoaded,
    Event,
    RequestAdmitted,
    RequestArrived,
    RequestFinished,
    TokensEmitted,
)
from manylora.server.protocol import FinishedRequest, Observations
from manylora.types import FinishReason, Tier

__all__ = ["Recorder"]


class Recorder:
    """An event sink that gathers observations until somebody takes them. For the loop's thread alone."""

    def __init__(self) -> None:
        self._gathered = Observations()
        self._arrived_at: dict[str, float] = {}
        self._last_token_at: dict[str, float] = {}
        self._stopped: set[str] = set()

    def __call__(self, event: Event) -> None:
        """Take one event."""
        gathered = self._gathered
        match event:
            case TokensEmitted(at=at, request_id=request_id, num_tokens=num_tokens, is_first=is_first):
                if is_first:
                    gathered.ttft_s.append(at - self._arrived_at.get(request_id, at))
                elif request_id in self._last_token_at:
                    gap_s = (at - self._last_token_at[request_id]) / max(num_tokens, 1)
                    gathered.inter_token_s.extend([gap_s] * num_tokens)
                self._last_token_at[request_id] = at
            case RequestArrived(at=at, request_id=request_id):
                self._arrived_at[request_id] = at
            case RequestAdmitted(waited_s=waited_s):
                gathered.queue_s.append(waited_s)
            case RequestFinished():
                self._finish(event)
            case AdapterLoaded(tier=tier, took_s=took_s, error=error):
                if error is not None:
                    gathered.num_failed_loads += 1
                elif tier is Tier.DEVICE:
                    gathered.device_loads_s.append(took_s)
                else:
                    gathered.host_loads_s.append(took_s)

    def note_stopped(self, request_ids: list[str]) -> None:
        """Count the coming cancellation of these as a good end: their text reached a stop string."""
        self._stopped.update(request_id for request_id in request_ids if request_id in self._arrived_at)

    def take(self) -> Observations:
        """Return what was gathered since the last call."""
        gathered, self._gathered = self._gathered, Observations()
        return gathered

    def _finish(self, event: RequestFinished) -> None:
        self._arrived_at.pop(event.request_id, None)
        self._last_token_at.pop(event.request_id, None)
        reason = event.reason
        if event.request_id in self._stopped:
            self._stopped.discard(event.request_id)
            reason = FinishReason.STOP if reason is FinishReason.CANCELLED else reason
        self._gathered.finished.append(
            FinishedRequest(reason.value, event.at - event.arrived_at, event.num_prompt_tokens, event.num_output_tokens)
        )
