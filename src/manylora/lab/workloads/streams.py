"""Random streams, one per source: another distribution of lengths leaves all arrivals unchanged."""

from __future__ import annotations

from zlib import crc32

import numpy as np
import numpy.typing as npt

__all__ = ["FloatArray", "IntArray", "Streams"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class Streams:
    """Independent generators of random numbers, each by its name, all from one seed.

    Args:
        seed: At least 0; the same seed and name give the same numbers on every machine.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def of(self, name: str) -> np.random.Generator:
        """Return a new generator of the named stream."""
        return np.random.default_rng([self._seed, crc32(name.encode())])
