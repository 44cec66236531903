"""The link of a tier in virtual time, as one thread that copies pieces in the order in which they are there.

::

    read A    | layer 0 | layer 1 | layer 2 |            a file, in the order of the layers
    copy A              | 0 |     | 1 |       | 2 |      chained: a piece for each layer, once that has been read
    copy B                  | all layers......|          an image that is there: one piece

So a copy that follows its read leaves the link to others while it waits, and is delayed by those that begin meanwhile.
That is how the live link serves loads (``execution/storage/device_load.py``).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

__all__ = ["LoadTimeline", "SimulatedLink"]


@dataclass(slots=True, eq=False)
class LoadTimeline:
    """A load that brings the layers of an adapter in their order; times in seconds.

    Loads that begin later may put off those of its pieces that wait for the tier below.

    Args:
        arrivals: Time at which each layer has arrived.
        begins_at: Time of its turn on the link, from which on its layout is known.
        uses: Intervals in which it was to use the link when it began.
    """

    arrivals: list[float]
    begins_at: float = 0.0
    uses: Seq[tuple[float, float]] = ()

    @property
    def ends_at(self) -> float:
        """Time at which all layers have arrived."""
        return self.arrivals[-1]


@dataclass(slots=True, eq=False)
class _LayerCopy:
    """Layers of a load that are copied together from ``ready_at`` on; none for the table of a chained copy."""

    load: LoadTimeline
    layers: range
    ready_at: float
    seconds: float
    is_first: bool = True
    begins_at: float = 0.0
    ends_at: float = 0.0

    def begin(self, free_at: float) -> None:
        """Plan it behind the piece before it."""
        self.begins_at = at = max(free_at, self.ready_at)
        self.ends_at = at + self.seconds
        if self.is_first:
            self.load.begins_at = at
        num_layers = len(self.layers)
        for number, layer in enumerate(self.layers, 1):
            self.load.arrivals[layer] = at + self.seconds * (number / num_layers)


class SimulatedLink:
    """One link, first in, first out."""

    def __init__(self) -> None:
        self._pieces: list[_LayerCopy] = []  # that had not ended by the last load, in order

    @property
    def free_at(self) -> float:
        """Time at which the last piece ends; 0 if there is none."""
        return self._pieces[-1].ends_at if self._pieces else 0.0

    def busy(self) -> Iterator[tuple[float, float]]:
        """Yield the intervals in which it is in use, in order: all that had not ended by the last load."""
        if not self._pieces:
            return
        begins_at, ends_at = self._pieces[0].begins_at, self._pieces[0].ends_at
        for piece in self._pieces:
            if piece.begins_at > ends_at:
                yield begins_at, ends_at
                begins_at = piece.begins_at
            ends_at = piece.ends_at
        yield begins_at, ends_at

    def load(self, now: float, load_s: float, num_layers: int, below: LoadTimeline | None = None) -> LoadTimeline:
        """Start a load.

        Args:
            now: The time, in seconds.
            load_s: Its duration on an idle link.
            num_layers: Layers of the model, each an equal part of the load.
            below: The load into the tier below, if that is in flight: a layer is copied once it has arrived there.
        """
        del self._pieces[: bisect_right(self._pieces, now, key=lambda piece: piece.ends_at)]
        load = LoadTimeline([0.0] * num_layers)
        if below is None:
            pieces = [_LayerCopy(load, range(num_layers), now, load_s)]
        else:
            pieces = [_LayerCopy(load, range(0), max(now, below.begins_at), 0.0)]
            for layer, arrives_at in enumerate(below.arrivals):
                ready_at, seconds = max(now, arrives_at), load_s / num_layers
                pieces.append(_LayerCopy(load, range(layer, layer + 1), ready_at, seconds, is_first=False))
        first = bisect_right(self._pieces, pieces[0].ready_at, key=lambda piece: piece.ready_at)
        free_at = self._pieces[first - 1].ends_at if first else 0.0
        for piece in pieces:
            insort(self._pieces, piece, key=lambda one: one.ready_at)
        for piece in self._pieces[first:]:
            piece.begin(free_at)
            free_at = piece.ends_at
        load.uses = [(piece.begins_at, piece.ends_at) for piece in pieces if piece.seconds]
        return load
