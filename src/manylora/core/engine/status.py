"""What an engine counts and reports: counters and sinks of events; snapshots for status pages, clients and metrics."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from manylora.core.costs.rank_fit import StepFit
from manylora.core.events import Event, EventSink, PrefixEvicted
from manylora.core.scheduling import QueueStatus
from manylora.core.types import AdapterVersion, Tier

__all__ = ["AdapterStatus", "ColdStartStatus", "Counters", "EngineStats", "Telemetry"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStatus:
    """One registered name."""

    name: str
    version: AdapterVersion
    generation: int  # 1 when first loaded, one more with every replacement in place
    tier: Tier  # highest tier its weights are in
    # ``idle``, ``active``, ``loading``, ``failed`` (its weights cannot be read) or ``evicting`` (waiting for its last
    # request to end).
    state: str
    is_pinned: bool
    num_running: int
    num_waiting: int
    num_requests: int  # requests for it since it was loaded
    num_hits: int  # of these, the requests that found it on the device
    last_used_s: float | None  # seconds since its last use, ``None`` if never used
    # Value of keeping it on the device while it idles there, in seconds of reloading saved per second and page;
    # ``None`` where it is in use, in another tier, or the eviction policy has another unit.
    price: float | None = None
    error: str | None = None  # the reason why its weights could not be read, if they could not


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStartStatus:
    """Cold starts in one mode, from the choice of the mode to the first token."""

    mode: str  # ``wait``, ``assist`` or ``layers``
    num_starts: int  # requests that got their first token
    num_measured: int  # requests that waited for nothing but their adapter; all figures below are of these
    expected_s: float  # sum of the predicted times to first token
    actual_s: float  # sum of the actual times
    error_s: float  # mean absolute error of the predictions
    relative_error: float  # mean of the errors relative to the actual times
    correction: float  # factor on the predicted delay, from predictions that were wrong; 1 at the start


@dataclass(slots=True, kw_only=True)
class Counters:
    """Events since the start of an engine; each is counted where it happens."""

    num_loads: int = 0  # host to device copies completed
    num_disk_loads: int = 0  # disk to host reads completed by the engine
    num_evictions: int = 0  # adapters dropped from the device for room
    num_prefix_evictions: int = 0  # prefix pages dropped for room
    num_preemptions: int = 0  # sequences pre-empted because memory was short
    num_squashes: int = 0  # sequences pre-empted for one that they had passed
    num_steps: int = 0
    num_prompt_tokens: int = 0  # prompt tokens of admitted requests
    num_cached_tokens: int = 0  # of these, the tokens that the prefix cache held
    num_generated_tokens: int = 0
    num_answers: int = 0  # requests that ended with a stop token or string, or at their limit
    num_answer_tokens: int = 0  # their generated tokens
    num_adapter_requests: int = 0  # requests for an adapter
    num_adapter_hits: int = 0  # of these, the requests that found it on the device when it was first looked up
    num_not_activated: int = 0  # requests whose prompt lacks the tokens that activate their adapter: the base answered
    num_prefetches: int = 0  # loads started before the admission of their sequences


@dataclass(slots=True, kw_only=True)
class EngineStats(Counters):
    """Gauges and counters of one engine at one time."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    num_kv_pages: int  # pages of running sequences (shared prefix pages in use count here)
    num_prefix_pages: int  # pages of idle prefix blocks
    num_adapter_pages: int  # pages of adapters on the device or loading
    num_registered: int  # registered adapter names
    num_resident: int  # adapter versions on the device
    num_loading: int  # versions loading to the device
    num_active: int  # versions that a running sequence uses
    num_host: int  # versions in the host tier
    host_bytes: int
    running_adapters: tuple[str, ...]  # names of adapters with running requests, sorted
    waiting_adapters: tuple[str, ...]  # names of adapters with waiting requests, sorted
    num_failed: int = 0  # versions whose weights could not be read
    num_only_host: int = 0  # versions whose highest tier is the host
    num_only_disk: int = 0  # versions that are only on disk
    resident_adapters: tuple[str, ...] = ()  # names of adapters on the device, sorted
    fits: tuple[StepFit, ...] = ()  # step-time models fitted to this engine's steps; none before enough steps
    queues: tuple[QueueStatus, ...] = ()  # the policy's queues, smallest requests first
    # Cold starts by mode, of the modes that the executor can do; empty if it can only wait.
    cold_starts: tuple[ColdStartStatus, ...] = ()
    # How the base's weights are kept and multiplied: a line for each kind, the largest first.
    base_weights: tuple[str, ...] = ()


_forget = deque[Event](maxlen=0).append  # without a sink, emitting is not even a call of Python


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
