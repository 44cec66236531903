"""Memory of a GPU that is written once, and then mapped read-only by other processes of the machine.

::

    memory = DeviceMemory.make(device, num_bytes)     cuMemCreate, mapped here for writing
    memory.buffer.copy_(...)                          through a tensor
    memory.seal()                                     mapped here read-only, and a descriptor of it: ``memory.fd``
    DeviceMemory.open(device, fd, num_bytes)          in a process that received ``fd``: mapped read-only

The memory lives until no process maps it or holds a descriptor of it, so it outlives the process that made it. That
is why the older handles of CUDA (``cudaIpcGetMemHandle``) are not used: their memory ends with its maker.

The driver refuses a kernel's write through a read-only mapping. It does not refuse a process with the descriptor
another mapping for writing: this guards against mistakes, and does not isolate (docs/adr/0051).

``cuda-bindings`` comes with torch for CUDA.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from typing import Any

import torch

from manylora.core.errors import ConfigError

__all__ = ["DeviceMemory", "find_gpu", "gpu_identity"]

logger = logging.getLogger(__name__)

CHECKED_BYTES = 4096
"""Bytes at the beginning that are compared through a second mapping before the memory is offered to others."""


class DeviceMemory:
    """Memory of one GPU; ``make`` it or ``open`` it. The driver's size is a multiple of its pages.

    It is unmapped once neither this object nor any tensor over ``buffer`` is alive.
    """

    def __init__(self, device: torch.device, mapping: _Mapping, num_bytes: int) -> None:
        self.device = device
        self.num_bytes = num_bytes
        self.fd: int | None = None
        """Descriptor for other processes, closed with this object; ``None`` in readers and until ``seal`` succeeds."""
        self.is_shared = False
        """Whether other processes map it, or may."""
        self._mapping = mapping
        self.buffer = _tensor_over(mapping, device)[:num_bytes]
        """The memory as ``[num_bytes]``, uint8."""

    @classmethod
    def make(cls, device: torch.device, num_bytes: int) -> DeviceMemory | None:
        """Return new memory that can be written; ``None`` where there is no driver of memory that others can map."""
        if device.type != "cuda":
            return None
        try:
            driver = _Driver(device)
            with driver.created(num_bytes) as handle:
                mapping = _Mapping(driver, handle, driver.padded(num_bytes), is_writable=True)
            return cls(device, mapping, num_bytes)
        except (ImportError, RuntimeError) as error:
            logger.warning("base_not_shareable device=%s reason=%s", device, str(error))
            return None

    @classmethod
    def open(cls, device: torch.device, fd: int, num_bytes: int) -> DeviceMemory:
        """Return memory that was made by another process, mapped read-only; ``fd`` stays open.

        ``RuntimeError`` if the driver refuses.
        """
        driver = _Driver(device)
        with driver.imported(fd) as handle:
            mapping = _Mapping(driver, handle, driver.padded(num_bytes), is_writable=False)
        memory = cls(device, mapping, num_bytes)
        memory.is_shared = True
        return memory

    def seal(self) -> None:
        """Map the memory read-only here as well, and get a descriptor of it for others.

        It is mapped a second time before it is offered, as another process would do. Where the driver refuses, ``fd``
        is ``None`` and the memory stays this process's own.
        """
        _wait(self.device)
        fd = None
        try:
            fd = self._mapping.export()
            self._mapping.protect()
            other = DeviceMemory.open(self.device, fd, self.num_bytes)
            if not torch.equal(other.buffer[:CHECKED_BYTES], self.buffer[:CHECKED_BYTES]):
                raise RuntimeError("a second mapping of the memory has another content")
        except RuntimeError as error:
            logger.warning("base_not_shareable device=%s reason=%s", self.device, str(error))
            if fd is not None:
                os.close(fd)
            return
        self.fd, self.is_shared = fd, True
        weakref.finalize(self, os.close, fd)


def gpu_identity(device: torch.device) -> str:
    """Return the identity of a GPU, the same in every process of the machine whatever devices it sees."""
    return str(torch.cuda.get_device_properties(device).uuid)


def find_gpu(identity: str) -> torch.device:
    """Return the device with this identity; ``ConfigError`` if this process does not see it."""
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        if gpu_identity(device) == identity:
            return device
    raise ConfigError(f"Got weights in the memory of GPU {identity}, which this process does not see")


class _Driver:
    """The driver's calls for memory of one device, with their errors raised.

    ``ImportError`` if there are no bindings; ``RuntimeError`` if the device's memory cannot be shared by descriptor.
    """

    def __init__(self, device: torch.device) -> None:
        self._driver: Any = _load_driver()
        driver = self._driver
        _wait(device)  # the calls below need the context that torch makes
        self._kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        attributes = driver.CUdevice_attribute
        for wanted in (
            attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        ):
            if not self.call("cuDeviceGetAttribute", wanted, device.index or 0):
                raise RuntimeError(f"the device lacks {wanted!r}")
        properties = self._properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = self._kind
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device.index or 0

    def call(self, name: str, *arguments: Any) -> Any:
        """Return the result of a call, ``None`` if it has none."""
        error, *results = getattr(self._driver, name)(*arguments)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name}: {error!r}")
        return results[0] if results else None

    def padded(self, num_bytes: int) -> int:
        flag = self._driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        page = int(self.call("cuMemGetAllocationGranularity", self._properties, flag))
        return max(1, -(-num_bytes // page)) * page

    def created(self, num_bytes: int) -> contextlib.AbstractContextManager[Any]:
        """Make memory; its handle is released at the end, mappings and descriptors keep it."""
        return self._released(self.call("cuMemCreate", self.padded(num_bytes), self._properties, 0))

    def imported(self, fd: int) -> contextlib.AbstractContextManager[Any]:
        """Return a handle of another process's memory, released at the end."""
        return self._released(self.call("cuMemImportFromShareableHandle", fd, self._kind))

    def export(self, address: int) -> int:
        """Return a new descriptor of the memory that is mapped at ``address``."""
        with self._released(self.call("cuMemRetainAllocationHandle", address)) as handle:
            return int(self.call("cuMemExportToShareableHandle", handle, self._kind, 0))

    def set_access(self, address: int, size: int, *, is_writable: bool) -> None:
        """Let the device's kernels read, or read and write, a mapping."""
        flags = self._driver.CUmemAccess_flags
        access = self._driver.CUmemAccessDesc()
        access.location = self._properties.location
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if is_writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        self.call("cuMemSetAccess", address, size, [access], 1)

    @contextlib.contextmanager
    def _released(self, handle: Any) -> Any:
        try:
            yield handle
        finally:
            self.call("cuMemRelease", handle)


class _Mapping:
    """A place in this process's addresses over device memory, unmapped with this object."""

    def __init__(self, driver: _Driver, handle: Any, size: int, *, is_writable: bool) -> None:
        self._driver, self.size = driver, size
        with contextlib.ExitStack() as undo:
            self._address = int(driver.call("cuMemAddressReserve", size, 0, 0, 0))
            undo.callback(driver.call, "cuMemAddressFree", self._address, size)
            driver.call("cuMemMap", self._address, size, 0, handle, 0)
            undo.callback(driver.call, "cuMemUnmap", self._address, size)
            driver.set_access(self._address, size, is_writable=is_writable)
            end = weakref.finalize(self, undo.pop_all().close)
            end.atexit = False  # the driver may be gone then, and frees all that a process had

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The memory as bytes, for torch, which keeps this object. Torch has no read-only tensors."""
        return {"shape": (self.size,), "typestr": "|u1", "data": (self._address, False), "version": 3}

    def export(self) -> int:
        """Return a new descriptor of the memory."""
        return self._driver.export(self._address)

    def protect(self) -> None:
        """Refuse writes through this mapping."""
        self._driver.set_access(self._address, self.size, is_writable=False)


def _load_driver() -> Any:
    from cuda.bindings import driver

    return driver


def _tensor_over(mapping: _Mapping, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(mapping, device=device)


def _wait(device: torch.device) -> None:
    """Wait for the device; its context is this thread's afterwards."""
    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)
