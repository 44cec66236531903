"""Operations that differ between a GPU and the CPU: uploads, graph capture, waiting.

Everything that decides (which rows, which tables, which bucket) is the same code on both, so the tests run it on the
CPU. The code that only a GPU runs is ``CudaOps``, short enough to check line by line.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from manylora.core.errors import ConfigError
from manylora.core.isolation.system import yield_to_others

__all__ = ["DeviceOps", "describe_machine", "dtype_name", "find_device", "make_device_ops"]


class DeviceOps:
    """How work reaches a device; this class is the CPU, where every call completes at once.

    Args:
        device: The device of all tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def enter_thread(self) -> None:
        """Let kernels that this thread launches run on the device; once on each thread that launches any."""

    def enter_step_thread(self) -> None:
        """``enter_thread`` for the thread of steps, which computes them here."""
        self.enter_thread()
        yield_to_others()

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return zeros on the host, which copies to the device may read while the host goes on."""
        return torch.zeros(shape, dtype=dtype)

    def upload(self, values: NDArray[np.generic]) -> torch.Tensor:
        """Return a copy of ``values`` on the device, without waiting for the copy."""
        return torch.from_numpy(values.copy())

    def upload_bits(self, bits: NDArray[np.uint8], num_columns: int) -> torch.Tensor:
        """Return bits ``[n, width]``, the lowest of a byte first, as bools ``[n, num_columns]`` on the device."""
        return torch.from_numpy(np.unpackbits(bits, axis=1, bitorder="little", count=num_columns).view(np.bool_))

    def read(self, *tensors: torch.Tensor) -> list[NDArray[Any]]:
        """Return the content of tensors of the device, by one wait for all work that makes them."""
        return [tensor.numpy() for tensor in tensors]

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record ``work`` once it has run; return a function that repeats it on the current values of its tensors.

        ``RuntimeError`` if the work cannot be recorded.
        """
        return work

    def wait(self) -> None:
        """Return once the device has done all work."""


class CudaOps(DeviceOps):
    """CUDA through torch: page-locked memory, asynchronous copies and captured graphs.

    Args:
        device: The GPU, by number; steps run on its current stream.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        # One pool for all graphs: only one replays at a time, so they may share their intermediate tensors.
        self._graph_pool = torch.cuda.graph_pool_handle()

    def enter_thread(self) -> None:
        """Make the GPU the thread's current device: Triton launches on that one, whatever its arguments lie on."""
        torch.cuda.set_device(self.device)

    def enter_step_thread(self) -> None:
        """``enter_thread`` for the thread of steps, whose launches the device must not wait for."""
        self.enter_thread()

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return page-locked zeros."""
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def upload(self, values: NDArray[np.generic]) -> torch.Tensor:
        """Return ``values`` on the device; torch keeps the page-locked copy until the transfer has read it."""
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        return (tensor.pin_memory() if tensor.numel() else tensor).to(self.device, non_blocking=True)

    def upload_bits(self, bits: NDArray[np.uint8], num_columns: int) -> torch.Tensor:
        """Upload the packed bytes and unpack them on the device: an eighth of the bytes of bools."""
        shifts = torch.arange(8, dtype=torch.uint8, device=self.device)
        unpacked = (self.upload(bits)[:, :, None] >> shifts) & 1
        return unpacked.view(torch.bool).flatten(1)[:, :num_columns]

    def read(self, *tensors: torch.Tensor) -> list[NDArray[Any]]:
        """Copy all behind the device's work, then wait once."""
        copies = [
            torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
            for tensor in tensors
        ]
        self.wait()
        return [copy.numpy() for copy in copies]

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record ``work`` as a graph in the shared pool.

        It has run eagerly before (kernels are compiled and libraries have their workspaces). It may touch only tensors
        that it makes itself or that outlive the graph. Errors are checked for this thread only: another thread copies
        adapters during the capture.
        """
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        torch.cuda.synchronize(self.device)
        try:
            with torch.cuda.graph(graph, pool=self._graph_pool, capture_error_mode="thread_local"):
                work()
        except BaseException:
            torch.cuda.set_stream(stream)  # a capture that cannot be ended leaves the thread on its own stream
            raise
        replay: Callable[[], None] = graph.replay
        return replay

    def wait(self) -> None:
        """Wait for the current stream."""
        torch.cuda.current_stream(self.device).synchronize()


def find_device(name: str) -> torch.device:
    """Return the device of that name, a GPU with its number; ``auto`` is the GPU if there is one.

    ``ConfigError`` if there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"Got device = {name!r}, expected auto, cpu or cuda") from error
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ConfigError(f"Got device = {name!r}, but no CUDA device is available")
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a type, as ``float32``."""
    return str(dtype).removeprefix("torch.")


def make_device_ops(device: torch.device) -> DeviceOps:
    """Return the operations for ``device``."""
    return CudaOps(device) if device.type == "cuda" else DeviceOps(device)


def describe_machine(device: torch.device) -> str:
    """Return processor or GPU, threads, and the version of torch."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    processor = next(names, platform.processor() or platform.machine())
    return f"{processor}, {torch.get_num_threads()} threads, torch {torch.__version__}"
