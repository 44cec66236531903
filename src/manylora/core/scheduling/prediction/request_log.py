"""The request log: one JSON line per finished request, with sizes and sampling caps, no prompt and no answer."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from typing import TextIO

from manylora.core.events import Event, RequestArrived, RequestFinished
from manylora.core.types import FinishReason

__all__ = ["LoggedRequest", "RequestLog"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRequest:
    """One finished request."""

    arrived_at: float  # seconds on the server's clock
    adapter: str  # the requested name, empty for the base
    prompt_tokens: int
    output_tokens: int
    max_tokens: int | None  # the request's own cap, ``None`` for none
    limit: int  # the cap in effect: its own, or the limit of the model and the memory
    temperature: float  # 0 is greedy
    has_schema: bool  # whether the answer had to match a JSON schema
    finish: str  # ``stop`` or ``length``; others are not logged, because their length is not the answer's


class RequestLog:
    """An event sink that writes the log. An error of the disk ends the log, not the engine that emits the events.

    The file is line-buffered, so that a crash loses nothing that was finished.
    """

    def __init__(self, file: TextIO) -> None:
        self._file: TextIO | None = file
        self._arrived: dict[str, RequestArrived] = {}

    def __call__(self, event: Event) -> None:
        """Take an event."""
        match event:
            case RequestArrived(request_id=request_id):
                self._arrived[request_id] = event
            case RequestFinished(request_id=request_id, reason=reason, num_output_tokens=num_output_tokens):
                arrived = self._arrived.pop(request_id)
                if self._file is not None and reason in (FinishReason.STOP, FinishReason.LENGTH):
                    record = LoggedRequest(
                        arrived_at=round(arrived.at, 6),
                        adapter=arrived.name,
                        prompt_tokens=arrived.num_prompt_tokens,
                        output_tokens=num_output_tokens,
                        max_tokens=arrived.max_tokens,
                        limit=arrived.limit,
                        temperature=arrived.temperature,
                        has_schema=arrived.has_schema,
                        finish=reason.value,
                    )
                    try:
                        self._file.write(json.dumps(asdict(record), separators=(",", ":")) + "\n")
                    except OSError as error:
                        logger.error("request_log_ended reason=%s", error)
                        self._file = None
