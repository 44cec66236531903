"""The few things that differ between a GPU and the CPU in how a step is carried out, behind one small seam.

Everything that decides (which rows, which tables, which bucket) is the same code on both, so that it runs in the
tests; the code for the GPU alone is here and in ``device_cuda``, and short enough to check line by line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["DeviceOps", "DirectOps", "make_device_ops"]


class DeviceOps(Protocol):
    """How work reaches a device."""

    @property
    def device(self) -> torch.device:
        """Where tensors live."""
        ...

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return zeros on the host that copies to the device may read while the host goes on."""
        ...

    def upload(self, values: NDArray[np.generic]) -> torch.Tensor:
        """Return ``values`` on the device, without waiting for the copy."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record ``work`` once it has run; return a function that repeats it on the current values of its tensors.

        Raises:
            RuntimeError: It cannot be recorded.
        """
        ...

    def wait(self) -> None:
        """Return once everything given to the device has been done."""
        ...


class DirectOps:
    """The CPU: everything at once, nothing to wait for; a capture is the work itself.

    Args:
        device: The CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return zeros."""
        return torch.zeros(shape, dtype=dtype)

    def upload(self, values: NDArray[np.generic]) -> torch.Tensor:
        """Return a tensor of its own memory, as a copy on a device would be."""
        return torch.from_numpy(values.copy())

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return ``work``."""
        return work

    def wait(self) -> None:
        """Return."""


def make_device_ops(device: torch.device) -> DeviceOps:
    """Return the operations for ``device``."""
    if device.type == "cuda":
        from manylora.execution.device_cuda import CudaOps

        return CudaOps(device)
    return DirectOps(device)
