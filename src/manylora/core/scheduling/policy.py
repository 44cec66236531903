"""The interface of scheduling policies, which order the waiting sequences, and their view of the engine.

In each step the core asks the policy for one waiting sequence after the other, tries to admit it, and reports the
outcome. The policy decides whether to offer another one; it never touches memory. It names one sequence *first in
line*: the core lets that one claim every page that running sequences do not hold, and keeps its adapter from younger
ones.

::

    for sequence in policy.squash(now):        # normally none
        core.preempt(sequence)
    policy.begin(now)
    while there are seats and token budget and (sequence := policy.offer()) is not None:
        policy.report(sequence, core.try_admit(sequence))

No request starves under a policy that keeps three rules (each policy says how it does):

1. a sequence that is first in line and was refused is, in the steps that follow, replaced only by one that can use the
   memory sooner: by an older arrival, or where it lacks something other than memory (its queue's tokens, its
   adapter);
2. it is passed a bounded number of times, not counting while its adapter is loading;
3. every sequence comes to be first in line, or is admitted before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, Protocol

from manylora.core.config import SchedulerConfig
from manylora.core.scheduling.prediction.predictor import LengthPredictor
from manylora.core.scheduling.sequence import Sequence

__all__ = ["Nearness", "Outcome", "Policy", "PolicyContext", "QueueStatus"]


class Outcome(Enum):
    """The outcome of an offer."""

    ADMITTED = "admitted"
    NO_PAGES = "no_pages"  # no room for its KV
    ADAPTER_LOADING = "adapter_loading"  # its adapter is on the way to the device and has its pages
    ADAPTER_NO_PAGES = "adapter_no_pages"  # its adapter is not on the device and there is no room for it
    ADAPTER_CAP = "adapter_cap"  # the limit of distinct adapters in a step is reached


class Nearness(IntEnum):
    """The distance of a sequence's adapter to the device; the base is always there."""

    DEVICE = 0
    LOADING = 1
    HOST = 2
    DISK = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus:
    """One queue of a policy, for status pages."""

    num_waiting: int  # sequences in it
    num_running: int | None = None  # sequences admitted from it that have not ended, where the policy counts them
    below: float | None = None  # upper bound of the sizes of its requests; ``None`` for the last queue
    # Tokens that its running requests may hold together; ``None`` where there are no quotas.
    quota_tokens: int | None = None
    used_tokens: int | None = None  # tokens of the quota in use, those lent to other queues included


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyContext:
    """The view that a policy has of its engine."""

    config: SchedulerConfig
    num_pages: int
    block_size: int  # tokens of KV in a page
    predictor: LengthPredictor  # predicts output lengths
    nearness: Callable[[Sequence], Nearness]
    # Pages that an admission could get now; with ``True``, an admission of the first in line.
    num_claimable_pages: Callable[[bool], int]
    prompt_s: Callable[[Sequence], float]  # device time of a sequence's prompt in seconds, by the costs learned so far
    # Finds a policy by name and returns a function that makes one of it after the other, for a policy that divides the
    # sequences among others.
    inner: Callable[[str], Callable[[], Policy]] | None = None
    options: Any = None  # the policy's own ``Options``, checked; ``None`` where it has none


class Policy(Protocol):
    """Holds the waiting sequences and decides their order. It gets the time in seconds, and reads no clock.

    A class that inherits from it has one queue, squashes nothing and keeps nothing about running sequences.
    """

    def __len__(self) -> int:
        """Return the number of waiting sequences."""

    def add(self, sequence: Sequence, now: float) -> None:
        """Add a sequence that arrived."""

    def remove(self, sequence: Sequence) -> None:
        """Forget a waiting sequence that was cancelled or failed."""

    def squash(self, now: float) -> list[Sequence]:
        """Name running sequences to pre-empt before the step, so that an older sequence that they bypassed can run.

        They run on while a step that writes their pages is in flight: a sequence that should still go is named again.
        """
        return []

    def prompts(self, sequences: list[Sequence]) -> list[Sequence]:
        """Return running sequences with unfinished prompts, given by arrival, in the order in which they share a step.

        One that is left out gives its part of the step to waiting sequences.
        """
        return sequences

    def chunk(self, sequence: Sequence) -> int:
        """Return the most tokens of a running sequence's prompt in this step, at least one; asked once a step."""
        return sequence.num_to_run

    def begin(self, now: float) -> None:
        """Begin a step."""

    @property
    def first_in_line(self) -> Sequence | None:
        """The sequence that may claim every page that running sequences do not hold.

        Set by ``begin``. Another may be named once it is admitted, and when a later one is offered before any was
        refused, or comes to be owed its turn.
        """

    def offer(self) -> Sequence | None:
        """Return the next sequence to try, ``None`` to stop for this step. Each at most once a step."""

    def report(self, sequence: Sequence, outcome: Outcome) -> None:
        """Learn whether the sequence that was offered last was admitted; if so, it no longer waits."""

    def finish(self, sequence: Sequence, now: float) -> None:
        """Learn that an admitted sequence ended."""
        return

    def send_back(self, sequence: Sequence, now: float) -> None:
        """Add an admitted sequence again that was pre-empted or squashed; its tokens are kept."""
        self.add(sequence, now)

    def upcoming(self, count: int) -> list[Sequence]:
        """Return up to ``count`` waiting sequences, likeliest to be next first: their adapters are worth fetching."""

    def queues(self) -> tuple[QueueStatus, ...]:
        """Return the policy's queues for status pages, smallest requests first."""
        return (QueueStatus(num_waiting=len(self)),)
