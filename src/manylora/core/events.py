"""Events of the engine core, from which all metrics, tables and plots are derived, live and simulated.

The core calls its sinks with each event, in order, on the loop's thread. Times are seconds on the loop's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from manylora.core.types import AdapterKey, ColdStart, FinishReason, Tier

__all__ = [
    "AdapterAwaited",
    "AdapterEvicted",
    "AdapterLoadStarted",
    "AdapterLoaded",
    "ColdStartChosen",
    "ColdStartEnded",
    "Event",
    "EventSink",
    "PrefixEvicted",
    "RequestAdmitted",
    "RequestArrived",
    "RequestFinished",
    "RequestPreempted",
    "RequestSquashed",
    "StepFinished",
    "StepLaunched",
    "TokensEmitted",
]


@dataclass(frozen=True, slots=True)
class Event:
    """An event at ``at`` seconds."""

    at: float


@dataclass(frozen=True, slots=True)
class RequestArrived(Event):
    """A request was accepted into the waiting set.

    ``name`` is the requested adapter's, empty for the base; ``limit`` is the most tokens of the answer, of which
    ``num_answered`` are from another engine.
    """

    request_id: str
    adapter: AdapterKey | None
    num_prompt_tokens: int
    name: str
    limit: int
    num_answered: int = field(default=0, repr=False)
    tenant: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class RequestAdmitted(Event):
    """A waiting request joined the running set; ``num_cached_tokens`` came from the prefix cache."""

    request_id: str
    adapter: AdapterKey | None
    waited_s: float
    num_cached_tokens: int
    adapter_was_resident: bool


@dataclass(frozen=True, slots=True)
class RequestPreempted(Event):
    """A running request released its pages and waits again; its tokens are kept."""

    request_id: str
    num_tokens_lost: int


@dataclass(frozen=True, slots=True)
class RequestSquashed(Event):
    """A running request waits again because a request that it had overtaken can run now; its tokens are kept."""

    request_id: str
    num_tokens_lost: int


@dataclass(frozen=True, slots=True)
class TokensEmitted(Event):
    """A step yielded one token for each of these requests, in the order of the batch.

    One event per step, because of thousands of tokens a second; it precedes the ``RequestFinished`` of those tokens.
    """

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RequestFinished(Event):
    """A request ended; times are seconds on the loop's clock."""

    request_id: str
    adapter: AdapterKey | None
    reason: FinishReason
    arrived_at: float
    admitted_at: float | None
    first_token_at: float | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    engine_s: float = field(default=0.0, repr=False)  # its part of the seconds of steps, by its tokens in each


@dataclass(frozen=True, slots=True)
class AdapterLoadStarted(Event):
    """A load of an adapter into ``tier`` began."""

    adapter: AdapterKey
    tier: Tier
    num_bytes: int


@dataclass(frozen=True, slots=True)
class AdapterAwaited(Event):
    """A waiting request could be admitted now except for its adapter, which is loading.

    It has a slot in the batch, tokens of the step and pages for its KV. Loading is on its critical path until the
    adapter's next ``AdapterLoaded``. Emitted once for each load, and again for the load into the next tier.
    """

    request_id: str
    adapter: AdapterKey


@dataclass(frozen=True, slots=True)
class ColdStartChosen(Event):
    """A mode was chosen for a request whose adapter is not on the device; again when its adapter moved meanwhile.

    ``expected_s`` has the predicted time from now to the first token for every mode, possible or not. Not emitted
    where the executor can only wait.
    """

    request_id: str
    adapter: AdapterKey
    mode: ColdStart
    expected_s: Mapping[ColdStart, float]


@dataclass(frozen=True, slots=True)
class ColdStartEnded(Event):
    """A cold request has its first token, ``actual_s`` seconds after its mode was chosen.

    ``is_measured`` is false if it waited for anything but its adapter, so that nothing is learnt from it.
    """

    request_id: str
    adapter: AdapterKey
    mode: ColdStart
    expected_s: float
    actual_s: float
    is_measured: bool


@dataclass(frozen=True, slots=True)
class AdapterLoaded(Event):
    """An adapter arrived in ``tier`` after ``took_s`` seconds, or failed with ``error``."""

    adapter: AdapterKey
    tier: Tier
    took_s: float
    error: str | None = None


@dataclass(frozen=True, slots=True)
class AdapterEvicted(Event):
    """An idle (or unloaded) adapter left ``tier``."""

    adapter: AdapterKey
    tier: Tier
    num_pages: int


@dataclass(frozen=True, slots=True)
class PrefixEvicted(Event):
    """Idle prefix blocks were dropped."""

    num_pages: int


@dataclass(frozen=True, slots=True)
class StepLaunched(Event):
    """A step was launched."""

    step_id: int
    num_sequences: int
    num_tokens: int
    num_adapters: int


@dataclass(frozen=True, slots=True)
class StepFinished(Event):
    """A step completed, ``took_s`` seconds after its launch."""

    step_id: int
    took_s: float
    num_sequences: int
    num_tokens: int


EventSink = Callable[[Event], None]
