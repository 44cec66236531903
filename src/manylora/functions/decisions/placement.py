"""The choice of a place: of the process that serves a batch, and of the node that serves a function.

The place that is expected to answer first is taken. One that has more loaded is ready earlier; one whose device is busy
runs slower, because processes take turns on it. Both are seconds, so they add up. Of equal places that with less to
load is taken, then that with fewer bytes to evict, then that with fewer functions.

A simulation asks for every batch, since its processes can start on any device. A live controller asks once for each
function, whose requests then go to one node, and again when that node is lost or another one joins.

Source: ServerlessLoRA, section 3.3, step 4: "a function instance that has the optimal pre-loaded components". Loads
alone would send every batch to the device with everything loaded, however many run there (equation 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Candidate", "choose_place"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A place that could serve a batch or a function.

    Args:
        place: Name of the device or the node.
        load_s: Seconds until all that it lacks is loaded; 0 for a warm process.
        wait_s: Seconds until its process is free.
        num_batches: Batches that run there besides this one.
        evicts_bytes: Bytes that idle artefacts of others must give up for it.
        num_functions: Other functions that only this place serves.
    """

    place: str
    load_s: float
    wait_s: float = 0.0
    num_batches: int = 0
    evicts_bytes: int = 0
    num_functions: int = 0

    def answers_in_s(self, alone_s: float) -> float:
        """Return the seconds until a batch is answered that takes ``alone_s`` on a device of its own."""
        return max(self.load_s, self.wait_s) + (1 + self.num_batches) * alone_s

    def order(self, alone_s: float) -> tuple[float, ...]:
        """Return the key by which places are compared, the best first; ``alone_s`` as of ``answers_in_s``."""
        return self.answers_in_s(alone_s), self.load_s, self.evicts_bytes, self.num_functions


def choose_place(candidates: Sequence[Candidate], alone_s: float) -> Candidate | None:
    """Return the place for a batch that takes ``alone_s`` on a device of its own; ``None`` without candidates."""
    return min(candidates, key=lambda one: (*one.order(alone_s), one.place), default=None)
