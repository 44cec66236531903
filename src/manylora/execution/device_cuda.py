"""The GPU's side of ``DeviceOps``: page-locked memory, asynchronous copies, and captured graphs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["CudaOps"]


class CudaOps:
    """CUDA through torch.

    Args:
        device: The GPU; its current stream is the one steps run on.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # One pool for all graphs: only one replays at a time, so they may share their intermediate tensors.
        self._graph_pool = torch.cuda.graph_pool_handle()

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return page-locked zeros."""
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def upload(self, values: NDArray[np.generic]) -> torch.Tensor:
        """Return ``values`` on the device; torch keeps the page-locked copy until the transfer has read it."""
        return torch.from_numpy(np.ascontiguousarray(values)).pin_memory().to(self.device, non_blocking=True)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record ``work`` as a graph in the shared pool.

        It has run eagerly before (kernels are compiled and libraries have their workspaces), and must touch nothing
        but tensors that outlive the graph and those it makes itself. Errors are checked for this thread alone:
        adapters are copied on another while we record.
        """
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        with torch.cuda.graph(graph, pool=self._graph_pool, capture_error_mode="thread_local"):
            work()
        replay: Callable[[], None] = graph.replay
        return replay

    def wait(self) -> None:
        """Wait for the current stream."""
        torch.cuda.current_stream(self.device).synchronize()
