"""The choice of the process that serves a batch: the one that is expected to answer it first.

A process that has more loaded is ready earlier; one on a busy device runs slower, because processes take turns on it.
Both are seconds, so they add up. Of equal ones that with less to load is taken, then that with fewer bytes to evict.

Source: ServerlessLoRA, section 3.3, step 4: "a function instance that has the optimal pre-loaded components". Loads
alone would send every batch to the device with everything loaded, however many run there (equation 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Candidate", "choose_process"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A process, running or to be started, that could serve a batch.

    Args:
        place: Name of its device.
        load_s: Seconds until all that it lacks is loaded; 0 for a warm one.
        wait_s: Seconds until it is free.
        num_batches: Batches that run on its device besides this one.
        evicts_bytes: Bytes that idle artefacts of others must give up for it.
    """

    place: str
    load_s: float
    wait_s: float = 0.0
    num_batches: int = 0
    evicts_bytes: int = 0

    def answers_in_s(self, alone_s: float) -> float:
        """Return the seconds until a batch is answered that takes ``alone_s`` on a device of its own."""
        return max(self.load_s, self.wait_s) + (1 + self.num_batches) * alone_s


def choose_process(candidates: Sequence[Candidate], alone_s: float) -> Candidate | None:
    """Return the process for a batch that takes ``alone_s`` on a device of its own; ``None`` without candidates."""
    return min(
        candidates,
        key=lambda one: (one.answers_in_s(alone_s), one.load_s, one.evicts_bytes, one.place),
        default=None,
    )
