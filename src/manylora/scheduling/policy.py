"""Who goes first: the interface every policy implements.

Each step the core asks the policy for one waiting sequence after the other, tries to admit it, and tells the
policy what happened; the policy decides whether to go on to the next, and never touches memory itself. The
policy names one sequence *first in line*: the core lets it claim whatever running sequences do not hold and keeps
its adapter from younger ones, so a policy that puts the same one first until it is admitted starves nobody.

::

    policy.begin(now)
    while there are seats and token budget and (sequence := policy.offer()) is not None:
        policy.report(sequence, core.try_admit(sequence))
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from manylora.scheduling.sequence import Sequence

__all__ = ["Outcome", "Policy"]


class Outcome(Enum):
    """What became of an offered sequence."""

    ADMITTED = "admitted"
    NO_PAGES = "no_pages"
    """No room for its KV."""
    ADAPTER_LOADING = "adapter_loading"
    """Its adapter is on its way to the device and has its pages."""
    ADAPTER_NO_PAGES = "adapter_no_pages"
    """Its adapter is not on the device and there is no room for it."""
    ADAPTER_CAP = "adapter_cap"
    """As many distinct adapters run as may."""


class Policy(Protocol):
    """Holds the waiting sequences and decides their order. Told the time, in seconds; reads no clock."""

    def __len__(self) -> int:
        """Return how many sequences wait."""
        ...

    def add(self, sequence: Sequence, now: float) -> None:
        """Take in a sequence that arrived, or that was pre-empted and waits again."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Forget a waiting sequence: it was cancelled or failed."""
        ...

    def begin(self, now: float) -> None:
        """Begin a step."""
        ...

    @property
    def first_in_line(self) -> Sequence | None:
        """The sequence that is owed whatever running ones do not hold; fixed from ``begin`` to the next ``begin``."""
        ...

    def offer(self) -> Sequence | None:
        """Return the next sequence to try, ``None`` to stop for this step. Each at most once a step."""
        ...

    def report(self, sequence: Sequence, outcome: Outcome) -> None:
        """Learn what became of the sequence just offered; one that was admitted waits no more."""
        ...

    def finish(self, sequence: Sequence, now: float) -> None:
        """Learn that an admitted sequence ended or was pre-empted."""
        ...
