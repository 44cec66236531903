"""A GPU's stream: writes and waits of words as stream memory operations, or as host functions.

``cuStreamWriteValue32`` and ``cuStreamWaitValue32`` are executed by the GPU's front end, between kernels: no kernel
polls, and no thread of the host takes part. The write comes behind a fence, so the copies before it are seen with it.
Both are in every driver from CUDA 12 on, but not under every virtualisation: a small exchange at the start finds out.
Host functions do the same from a thread of the driver, at tens of microseconds each. They are launched through the
driver's own library: the bindings run them under the interpreter's lock, and a wait would keep it from the thread that
is to write the word.

``cuda-bindings`` comes with torch for CUDA.
"""

from __future__ import annotations

import ctypes
import logging
import time
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, types

from manylora.core.errors import EngineDead
from manylora.execution.assist.words import Words, is_reached, pause, write_word
from manylora.execution.kernels.cpu.atomics import load_word, pointer_to, store_word

__all__ = ["CudaStream", "HostFunctionStream", "open_stream"]

logger = logging.getLogger(__name__)

NUM_ORDERS = 1 << 16  # orders of host functions that may be outstanding: several steps' worth
PROBE_S = 5.0  # longest wait for a word of the probe

_unreleased: list[tuple[CudaStream, Words]] = []
"""Streams that hang, and the words that they read, which must not be freed before the process ends."""


class CudaStream:
    """Torch's current stream of ``device``; see ``workers.DeviceStream``.

    ``driver`` is ``cuda.bindings.driver``.
    """

    def __init__(self, device: torch.device, driver: ModuleType) -> None:
        self._device = device
        self._driver: Any = driver
        self._places: dict[int, int] = {}  # words on the host -> the same for the device

    @property
    def handle(self) -> int:
        """The stream's handle."""
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Return page-locked zeros, which every device maps."""
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def write_value(self, words: Words, index: int, value: int) -> None:
        """Enqueue the write of a word, behind a fence."""
        driver = self._driver
        flags = int(driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT)
        self._check(driver.cuStreamWriteValue32(self.handle, self._place(words) + 4 * index, value, flags))

    def wait_value(self, words: Words, index: int, value: int) -> None:
        """Enqueue a wait; the driver compares by cyclic difference, as ``protocol.is_reached`` does."""
        driver = self._driver
        flags = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
        self._check(driver.cuStreamWaitValue32(self.handle, self._place(words) + 4 * index, value, flags))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy from or to page-locked memory."""
        target.copy_(source, non_blocking=True)

    def join(self) -> None:
        """Do nothing: kernels are on the same stream."""

    def wait(self) -> None:
        """Wait for the stream."""
        torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Wait for the stream."""
        self.wait()

    def _place(self, words: Words) -> int:
        address = words.ctypes.data
        if address not in self._places:
            _, place = self._check(self._driver.cuMemHostGetDevicePointer(address, 0))
            self._places[address] = int(place)
        return self._places[address]

    def _check(self, answer: tuple[Any, ...]) -> tuple[Any, ...]:
        if answer[0] != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"CUDA driver: {answer[0]!r}")
        return answer


class HostFunctionStream(CudaStream):
    """The same operations as host functions, which are compiled and hold no interpreter lock."""

    def __init__(self, device: torch.device, driver: ModuleType) -> None:
        super().__init__(device, driver)
        self._orders = np.zeros((NUM_ORDERS, 2), np.int64)
        self._num_orders = 0
        self._library = _load_library()

    def write_value(self, words: Words, index: int, value: int) -> None:
        """Enqueue a host function that writes a word."""
        self._launch(_write.address, words, index, value)

    def wait_value(self, words: Words, index: int, value: int) -> None:
        """Enqueue a host function that waits for a word."""
        self._launch(_wait.address, words, index, value)

    def _launch(self, function: int, words: Words, index: int, value: int) -> None:
        order = self._orders[self._num_orders % NUM_ORDERS]
        self._num_orders += 1
        order[:] = words.ctypes.data + 4 * index, value
        places = (ctypes.c_void_p(place) for place in (self.handle, function, order.ctypes.data))
        if error := self._library.cuLaunchHostFunc(*places):
            raise RuntimeError(f"CUDA driver: cuLaunchHostFunc returned {error}")


def _load_library() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def open_stream(device: torch.device) -> CudaStream | None:
    """Return the stream with the fastest operations that work here, ``None`` if there are none.

    ``EngineDead`` if a stream of the device hangs: this process cannot use the device any more.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        logger.info("assistant_off reason=%s", error)
        return None
    for kind in (CudaStream, HostFunctionStream):
        try:
            stream = kind(device, driver)
            _probe(stream, device)
        except EngineDead:
            raise
        except Exception as error:  # other versions of the bindings lack a name, or take other arguments
            logger.info("assist_stream_refused kind=%s reason=%s", kind.__name__, error)
        else:
            return stream
    return None


def _probe(stream: CudaStream, device: torch.device) -> None:
    """Exchange two words with the device, on a stream of its own.

    ``EngineDead`` if the stream hangs; ``RuntimeError`` if the driver refuses an operation, or a word does not arrive.
    """
    attributes = stream._driver.CUdevice_attribute
    for wanted in (
        attributes.CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY,
        attributes.CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING,
    ):
        _, value = stream._check(stream._driver.cuDeviceGetAttribute(wanted, device.index or 0))
        if not value:
            raise RuntimeError(f"the device lacks {wanted}")
    words = stream.host_memory(128).numpy().view(np.uint32)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        is_done = torch.cuda.Event()
        try:
            stream.wait_value(words, 0, 1)
            stream.write_value(words, 16, 1)
        finally:  # an operation that was refused leaves those before it
            is_done.record()
            write_word(words, 0, 1)
            if not (is_seen := _is_reached_within(PROBE_S, is_done)):
                _release(stream, device, words, is_done)
    if not is_seen:
        raise RuntimeError("the stream does not see a word that the host wrote")
    if words[16] != 1:
        raise RuntimeError("the host does not see a word that the stream wrote")


def _release(stream: CudaStream, device: torch.device, words: Words, is_done: torch.cuda.Event) -> None:
    """Let a stream that waits for a word pass by the device's own write: it reads the memory that we free.

    ``EngineDead`` if the stream still waits. A wait for all work of the device, as its allocator does, would hang.
    """
    with torch.cuda.stream(torch.cuda.Stream(device)):
        stream.write_value(words, 0, 1)
        if not _is_reached_within(PROBE_S, is_done):
            _unreleased.append((stream, words))
            raise EngineDead("A stream of the GPU waits for a word of the host and cannot be released.")
        stream.wait()


def _is_reached_within(seconds: float, event: torch.cuda.Event) -> bool:
    deadline = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(1e-4)
    return True


def _write_order(order: Any) -> None:
    fields = carray(order, 2, np.int64)
    store_word(carray(pointer_to(fields[0]), 1, np.uint32), 0, np.uint32(fields[1]))


def _await_order(order: Any) -> None:
    fields = carray(order, 2, np.int64)
    words = carray(pointer_to(fields[0]), 1, np.uint32)
    spins = 0
    while not is_reached(np.int64(load_word(words, 0)), fields[1]):
        spins = pause(spins)


_write, _wait = (cfunc(types.void(types.voidptr), cache=True)(order) for order in (_write_order, _await_order))
