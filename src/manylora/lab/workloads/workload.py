"""A workload as data: requests with their times, lengths and adapters; and the random streams that it is drawn from.

Traces and generators make it; the simulator, the load generator and the live engine replay it.
"""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

import numpy as np
import numpy.typing as npt

__all__ = ["ATTENTION", "AdapterSpec", "FloatArray", "IntArray", "RequestSpec", "Streams", "Workload"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """An adapter as a workload names it."""

    name: str
    rank: int  # rank of every module
    targets: tuple[str, ...] = ATTENTION  # last names of the modules it changes, in every layer
    # Whether it is activated behind the shared blocks of a prompt (aLoRA), by the first token that the prompt has to
    # itself.
    is_activated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """One request: its lengths are the true ones, not a predictor's."""

    arrival_s: float  # seconds from the start of the workload
    num_prompt_tokens: int
    num_output_tokens: int  # length of the answer, at least 1
    adapter: str | None = None  # name of an adapter of the workload; ``None`` for the base
    tenant: str = ""  # name of the tenant, for policies that divide the engine by weight
    weight: float = 1.0
    # Names of the blocks its prompt begins with, as in Mooncake's traces: requests with equal leading names have equal
    # leading tokens. The prompt may end inside the last of them, or go on behind it with tokens of its own. Empty: a
    # prompt that no other request shares.
    prefix: tuple[int, ...] = ()
    prefix_block_tokens: int = 512  # tokens in each of those blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests in order of arrival, and the adapters they name."""

    name: str  # name in titles and of files
    requests: tuple[RequestSpec, ...]  # sorted by ``arrival_s``
    adapters: tuple[AdapterSpec, ...] = ()  # every adapter that is registered, asked for or not

    def __post_init__(self) -> None:
        times = [request.arrival_s for request in self.requests]
        assert times == sorted(times), "requests are in order of arrival"

    @property
    def duration_s(self) -> float:
        """Time of the last arrival, in seconds."""
        return self.requests[-1].arrival_s if self.requests else 0.0

    @property
    def rate(self) -> float:
        """Mean requests per second."""
        return len(self.requests) / self.duration_s if self.duration_s else 0.0


class Streams:
    """Independent generators of random numbers, one per source: other lengths leave all arrivals unchanged.

    The same seed, at least 0, and name give the same numbers on every machine.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def of(self, name: str) -> np.random.Generator:
        """Return a new generator of the named stream."""
        return np.random.default_rng([self._seed, crc32(name.encode())])
