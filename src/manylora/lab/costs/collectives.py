"""Collectives of devices that share a model: those of a step, and how long each takes.

The calls are those that ``execution`` makes (`model/share.py`, `lora/kernels.py`; `collectives.py` counts them)::

    for    call    in a step                                       tensor of each of N devices
    base   sum     1 behind the embedding, 2 in each layer;        [tokens, hidden size]
                   3 in one with shared experts
    base   gather  1 if a token is sampled                         [sampled, vocabulary / N], float32
    lora   sum     1 in each layer and group that adapters change  x A^T of its rows

A kernel that finds weights by table adds up its scratch, ``[tokens, room]`` in float32, where captured steps have room
for large ranks; others add up ``[rows, rank]`` of each adapter in the type of activations. A sum sends 2 (N - 1) / N of
the tensor from each device, in 2 (N - 1) hops of a ring. A gather brings N - 1 tensors to the first device, in one hop.
NCCL takes the protocol that it expects to be the quickest::

    start + hops x hop + bytes / (share of the link's bandwidth)

Source: NCCL, src/graph/tuning.cc, for the start and the hop of each protocol and what it makes of the bandwidth. Its
trees have the same latency on one host as rings, and less bandwidth; sums inside an NVSwitch are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from manylora.core.costs.features import StepFeatures
from manylora.lab.catalog.dims import ModelDims
from manylora.lab.catalog.hardware import Hardware

__all__ = ["MOST_TOKENS", "ROOM_RANK", "CollectiveCall", "CollectiveCost"]

ROOM_RANK, MOST_TOKENS = 384, 1024
"""Least columns of a table's scratch in captured steps, and tokens of the largest (``execution.step_graphs``)."""


class _Protocol(NamedTuple):
    """A protocol of NCCL: what it costs, and the bandwidth that it has."""

    start_s: float
    hop_s: float
    share: float
    most_bytes_per_s: float = float("inf")


_PROTOCOLS = {
    "nvlink": (
        _Protocol(6.6e-6, 0.6e-6, 1 / 4, 87.7e9),  # LL: a flag with every 4 bytes
        _Protocol(14e-6, 1.9e-6, 0.92),  # LL128: a flag with every 120 bytes
        _Protocol(8.4e-6, 3.4e-6, 1.0),  # Simple
    ),
    "pcie": (_Protocol(6.6e-6, 1.0e-6, 1 / 4), _Protocol(8.4e-6, 5.7e-6, 1.0)),  # without LL128
}


class CollectiveCall(NamedTuple):
    """Calls of one kind in a step; ``num_bytes`` is the tensor of one device in one call."""

    purpose: Literal["base", "lora"]
    num_calls: int
    num_bytes: int
    is_gather: bool = False


class CollectiveCost:
    """Prices the collectives of steps.

    Args:
        dims: The model.
        hardware: Each device.
        size: Devices, at least two.
        targets: Modules that adapters change.
        is_by_table: Whether the kernels of adapters find weights by table.
    """

    def __init__(
        self, dims: ModelDims, hardware: Hardware, size: int, targets: tuple[str, ...], *, is_by_table: bool
    ) -> None:
        self._dims = dims
        self._size = size
        self._is_by_table = is_by_table
        self._stacks = [len(changed) for group in dims.groups if (changed := set(group) & set(targets))]
        sparse = dims.num_layers - dims.num_dense_layers if dims.num_shared_experts else 0
        self._num_sums = 1 + 2 * dims.num_layers + sparse
        self._vocab_size = -(-dims.vocab_size // size)
        link = hardware.all_reduce_bytes_per_s
        self._protocols = [
            (one.start_s, one.hop_s, min(one.share * link, one.most_bytes_per_s))
            for one in _PROTOCOLS[hardware.peer_link]
        ]

    def calls(self, step: StepFeatures) -> Iterator[CollectiveCall]:
        """Yield the calls of a step."""
        dims = self._dims
        yield CollectiveCall("base", self._num_sums, step.num_tokens * dims.hidden_size * dims.element_bytes)
        if step.num_sampled:
            yield CollectiveCall("base", 1, 4 * step.num_sampled * self._vocab_size, is_gather=True)
        if not step.num_adapted:
            return
        if self._is_by_table:
            room = max(step.max_rank * max(self._stacks), ROOM_RANK if step.num_tokens <= MOST_TOKENS else 0)
            yield CollectiveCall("lora", dims.num_layers * len(self._stacks), 4 * step.num_tokens * room)
            return
        for num_modules in self._stacks:
            yield CollectiveCall("lora", dims.num_layers, step.row_rank * num_modules * dims.element_bytes)

    def time_s(self, call: CollectiveCall) -> float:
        """Return the duration of each of these calls, in seconds."""
        others = self._size - 1
        on_ring = 2 * others / self._size * call.num_bytes
        hops, num_bytes = (1, others * call.num_bytes) if call.is_gather else (2 * others, on_ring)
        return min(start_s + hops * hop_s + num_bytes / rate for start_s, hop_s, rate in self._protocols)

    def step_time_s(self, step: StepFeatures) -> float:
        """Return the duration of a step's collectives, in seconds; nothing else runs beside them."""
        return sum(call.num_calls * self.time_s(call) for call in self.calls(step))
