"""A GPU's stream: against a driver that is a thread here, and on a GPU where there is one."""

from __future__ import annotations

import ctypes
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from enum import IntEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from live_executor import finish, folders, run, sequence  # noqa: F401
from msgspec import structs

pytest.importorskip("numba")
from thread_stream import await_word

from manylora.core.clock import WallClock
from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig
from manylora.core.errors import EngineDead
from manylora.core.plan import IN_HOST, AdapterLoad
from manylora.core.types import AdapterVersion, Tier
from manylora.execution.assist import cuda
from manylora.execution.assist.cuda import CudaStream, HostFunctionStream
from manylora.execution.assist.exchange import Assistant
from manylora.execution.assist.words import DONE, NUM_WORDS, write_word
from manylora.execution.assist.workers import Worker, WorkerTask
from manylora.execution.build import build_parts
from manylora.execution.storage.adapter_files import InlineReader

KINDS = [CudaStream, HostFunctionStream]


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_SUPPORTED = 801


class ThreadDriver:
    """The calls of ``cuda.bindings.driver`` that a stream makes, executed in order by a thread."""

    CUresult = Result
    CUstreamWriteValue_flags = SimpleNamespace(CU_STREAM_WRITE_VALUE_DEFAULT=0)
    CUstreamWaitValue_flags = SimpleNamespace(CU_STREAM_WAIT_VALUE_GEQ=0)

    def __init__(self) -> None:
        self.is_supported = True
        self.operations: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._execute, daemon=True).start()

    def _execute(self) -> None:
        while (operation := self.operations.get()) is not None:
            operation()

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, address

    def cuStreamWriteValue32(self, stream: int, address: int, value: int, flags: int) -> tuple[Any, ...]:
        if not self.is_supported:
            return (Result.CUDA_ERROR_NOT_SUPPORTED,)
        self.operations.put(lambda: write_word(_words_at(address), 0, value))
        return (Result.CUDA_SUCCESS,)

    def cuStreamWaitValue32(self, stream: int, address: int, value: int, flags: int) -> tuple[Any, ...]:
        self.operations.put(lambda: await_word(_words_at(address), 0, value))
        return (Result.CUDA_SUCCESS,)

    def cuLaunchHostFunc(self, stream: ctypes.c_void_p, function: ctypes.c_void_p, order: ctypes.c_void_p) -> int:
        assert function.value is not None
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function.value)
        self.operations.put(lambda: call(order))
        return Result.CUDA_SUCCESS


def _words_at(address: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_uint32 * 1).from_address(address))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadDriver]:
    monkeypatch.setattr(CudaStream, "handle", 0)
    monkeypatch.setattr(CudaStream, "host_memory", lambda self, size: torch.zeros(size, dtype=torch.uint8))
    driver = ThreadDriver()
    monkeypatch.setattr(cuda, "_load_library", lambda: driver)
    yield driver
    driver.operations.put(None)


@pytest.mark.parametrize("kind", KINDS)
def test_flags_travel_in_order(kind: type[CudaStream], driver: ThreadDriver) -> None:
    stream = kind(torch.device("cpu"), driver)  # type: ignore[arg-type]
    worker = Worker(stream, 100)
    task = WorkerTask.of(torch.ones(8), (), None)
    worker.begin()
    for _ in range(100):
        number = worker.post(task)
        worker.wait(number)
    is_done = threading.Event()
    driver.operations.put(is_done.set)
    assert is_done.wait(60)
    worker.end()
    assert worker.words[DONE] == number == 200 and not worker.has_failed
    assert not task.result.any(), "a result is zeroed before it is computed"
    worker.close()


def test_a_refused_operation_is_an_error(driver: ThreadDriver) -> None:
    driver.is_supported = False
    stream = CudaStream(torch.device("cpu"), driver)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="NOT_SUPPORTED"):
        stream.write_value(np.zeros(NUM_WORDS, np.uint32), 0, 2)


def test_bindings_that_lack_a_call_leave_the_next_kind_or_none(
    driver: ThreadDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    words = np.zeros(NUM_WORDS, np.uint32)
    monkeypatch.setattr(cuda, "_probe", lambda stream, device: stream.write_value(words, 0, 1))
    monkeypatch.delattr(ThreadDriver, "cuStreamWriteValue32")
    stream = cuda.open_stream(torch.device("cpu"))
    assert type(stream) is HostFunctionStream
    await_word(words, 0, 1)  # the driver's thread has run its function, so it may be freed
    monkeypatch.delattr(ThreadDriver, "cuLaunchHostFunc")
    assert cuda.open_stream(torch.device("cpu")) is None


class DeafDriver(ThreadDriver):
    """A device that sees no word of the host, but its own, which another stream writes."""

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY=0, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING=1
    )

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[int] = []  # addresses that are polled
        self.is_released = threading.Event()
        self.can_release = True

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, 1

    def cuStreamWaitValue32(self, stream: int, address: int, value: int, flags: int) -> tuple[Any, ...]:
        self.waits.append(address)
        self.operations.put(self.is_released.wait)
        self.operations.put(lambda: self.waits.remove(address))
        return (Result.CUDA_SUCCESS,)

    def cuStreamWriteValue32(self, stream: int, address: int, value: int, flags: int) -> tuple[Any, ...]:
        if address not in self.waits:
            return super().cuStreamWriteValue32(stream, address, value, flags)
        if self.can_release:
            self.is_released.set()
        return (Result.CUDA_SUCCESS,)


class ThreadEvent:
    """A ``torch.cuda.Event`` of a driver."""

    def __init__(self, driver: ThreadDriver) -> None:
        self._driver, self._is_done = driver, threading.Event()

    def record(self) -> None:
        self._driver.operations.put(self._is_done.set)

    def query(self) -> bool:
        return self._is_done.is_set()


@pytest.fixture
def deaf(driver: ThreadDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeafDriver]:
    deaf = DeafDriver()
    monkeypatch.setattr(cuda, "_load_library", lambda: deaf)
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=deaf))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: ThreadEvent(deaf))
    monkeypatch.setattr(CudaStream, "wait", lambda self: None)
    monkeypatch.setattr(cuda, "PROBE_S", 0.1)
    yield deaf
    deaf.is_released.set()
    deaf.operations.put(None)


def test_a_probe_that_is_not_answered_leaves_no_stream_on_its_words(deaf: DeafDriver) -> None:
    assert type(cuda.open_stream(torch.device("cpu"))) is HostFunctionStream
    assert not deaf.waits and not cuda._unreleased


def test_a_probe_that_is_refused_halfway_leaves_no_stream_on_its_words(deaf: DeafDriver) -> None:
    deaf.is_supported = False
    assert type(cuda.open_stream(torch.device("cpu"))) is HostFunctionStream
    assert not deaf.waits and not cuda._unreleased


def test_a_stream_that_cannot_be_released_ends_the_engine_and_its_words_stay(
    deaf: DeafDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_unreleased", unreleased := [])
    deaf.can_release = False
    with pytest.raises(EngineDead, match="cannot be released"):
        cuda.open_stream(torch.device("cpu"))
    ((_, words),) = unreleased
    assert deaf.waits == [words.ctypes.data]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_gives_assisted_rows_the_logits_of_pages(
    kind: type[CudaStream],
    dtype: str,
    folders: dict[str, Path],  # noqa: F811
) -> None:
    from cuda.bindings import driver  # type: ignore[import-not-found,unused-ignore]

    device = torch.device("cuda", 0)
    stream = kind(device, driver)
    cuda._probe(stream, device)
    config = EngineConfig(
        model=ModelConfig(model=str(folders["base"]), device="cuda", dtype=dtype),
        memory=MemoryConfig(block_size=4, num_pages=64),
    )
    parts = build_parts(
        config,
        WallClock(),
        open_assistant=lambda _, base: Assistant(stream, base, num_workers=2),
        readers=[InlineReader()],
    )
    try:
        assert parts.reads_host
        versions = [parts.reader.read(name, str(folders[name])) for name in ("one", "two")]

        def load_of(version: AdapterVersion, number: int) -> AdapterLoad:
            first = (40, 50)[number]
            return AdapterLoad(version=version, tier=Tier.DEVICE, pages=tuple(range(first, first + version.num_pages)))

        for number, version in enumerate(versions):
            assert finish(parts.executor.load_adapter(load_of(version, number), 0.0)).error is None
        plan = [
            sequence(list(range(5, 17)), 0, 12, 0, versions[0].key, 0),
            sequence([8, 9], 0, 2, 8, versions[1].key, 1),
            sequence([8, 9], 0, 2, 16, None, 2),
        ]
        warm = run(parts, *plan)
        for cold in ((0,), (1,), (0, 1)):
            placed = [structs.replace(part, placement=IN_HOST) if i in cold else part for i, part in enumerate(plan)]
            tolerance = 1e-4 if dtype == "float32" else 0.05
            for number in cold:
                parts.executor.drop_adapter(versions[number].key, Tier.DEVICE)
            torch.testing.assert_close(run(parts, *placed), warm, atol=tolerance, rtol=tolerance)
            # The copy is in flight, or over: the device takes over as much as has arrived when the step comes to it.
            works = [parts.executor.load_adapter(load_of(versions[number], number), 0.0) for number in cold]
            torch.testing.assert_close(run(parts, *placed), warm, atol=tolerance, rtol=tolerance)
            assert all(finish(work).error is None for work in works)
    finally:
        parts.close()
