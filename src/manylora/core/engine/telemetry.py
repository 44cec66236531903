"""What an engine counts and reports: counters since its start, and the sinks of its events."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from manylora.core.events import Event, EventSink, PrefixEvicted

__all__ = ["Counters", "Telemetry"]


_forget = deque[Event](maxlen=0).append  # without a sink, emitting is not even a call of Python


@dataclass(slots=True)
class Counters:
    """Events since the start, by the names of ``EngineStats``; each is counted where it happens."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_answers: int = 0
    num_answer_tokens: int = 0
    num_adapter_requests: int = 0
    num_adapter_hits: int = 0
    num_not_activated: int = 0
    num_loads: int = 0
    num_disk_loads: int = 0
    num_evictions: int = 0
    num_prefix_evictions: int = 0
    num_prefetches: int = 0
    num_preemptions: int = 0
    num_squashes: int = 0


class Telemetry:
    """The counters of an engine, and ``emit``, which gives an event to every sink, in order."""

    def __init__(self, sinks: Seq[EventSink] = ()) -> None:
        self.counters = Counters()
        self.has_sinks = bool(sinks)  # else events that are made for each step need not be made
        self._sinks = tuple(sinks)
        self.emit: EventSink = sinks[0] if len(sinks) == 1 else self._emit_to_all if sinks else _forget

    def prefix_dropped(self, num_pages: int, now: float) -> None:
        """Learn that the page cache claimed pages of idle prefix blocks."""
        self.counters.num_prefix_evictions += num_pages
        self.emit(PrefixEvicted(now, num_pages))

    def _emit_to_all(self, event: Event) -> None:
        for sink in self._sinks:
            sink(event)
