"""Collectives of the workers that share a model: sums, and columns that one worker gathers.

One process group of torch, gloo on CPUs and NCCL on GPUs. Calls are counted by purpose, with their bytes: those of the
base are the price of sharing it, those of LoRA what adapters add to it. All workers make the same calls in the same
order, or they wait for one another until ``PATIENCE_S`` is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import torch
from torch import distributed

__all__ = ["BASE", "LORA", "PATIENCE_S", "Collectives", "Purpose", "Store", "file_store"]

PATIENCE_S = 30.0
"""Time that a worker waits for the others in a collective, and the engine for a sign of life of a worker. All run the
same step, so they are apart by what their cores lose to other processes."""

Store: TypeAlias = Any  # a store of ``torch.distributed``, which exports none of its types

Purpose = Literal["base", "lora"]
BASE: Purpose = "base"
LORA: Purpose = "lora"


def file_store(path: str, size: int) -> Store:
    """Return the store of workers that see one file system."""
    return distributed.FileStore(path, size)  # type: ignore[attr-defined]


class Collectives:
    """The collectives of one of ``size`` workers; worker 0 gathers.

    ``meet`` waits until all workers are about to open their groups; it returns the store that they have in common.
    """

    def __init__(self, meet: Callable[[], Store], rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.calls = Counter[Purpose]()
        self.num_bytes = Counter[Purpose]()  # of the tensors of one worker
        self._meet = meet

    def open(self, device: torch.device) -> None:
        """Meet the others; before the first collective, of tensors on ``device``."""
        self._device = device
        self._group = _open(self._meet(), self.rank, self.size, device)

    @property
    def is_first(self) -> bool:
        """Whether this is worker 0."""
        return self.rank == 0

    def sum(self, x: torch.Tensor, purpose: Purpose = BASE) -> torch.Tensor:
        """Add up ``x``, which is contiguous, over the workers, in place; return it."""
        self._count(x, purpose)
        self._group.allreduce([x]).wait()
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the columns ``[n, ...]`` of all workers, side by side, on worker 0; ``None`` on the others."""
        self._count(x, BASE)
        options = distributed.GatherOptions()
        options.rootRank = 0
        x = x.contiguous()
        outputs = [[torch.empty_like(x) for _ in range(self.size)]] if self.is_first else []
        self._group.gather(outputs, [x], options).wait()
        return torch.cat(outputs[0], dim=-1) if self.is_first else None

    def least(self, number: int) -> int:
        """Return the least of a number of each worker."""
        numbers = torch.zeros(self.size, dtype=torch.int64, device=self._device)
        numbers[self.rank] = number
        self._group.allreduce([numbers]).wait()
        return int(numbers.min())

    def _count(self, x: torch.Tensor, purpose: Purpose) -> None:
        self.calls[purpose] += 1
        self.num_bytes[purpose] += x.nbytes


def _open(store: Store, rank: int, size: int, device: torch.device) -> Any:
    """Return the process group of a device; those of CPUs talk over the loopback interface alone."""
    patience = timedelta(seconds=PATIENCE_S)
    if device.type == "cpu":
        gloo: Any = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = patience
        return gloo(store, rank, size, options)
    nccl: Any = distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = patience
    with torch.cuda.device(device):
        return nccl(store, rank, size, options)
