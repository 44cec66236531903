"""Memory of a GPU for several processes: against a driver whose device memory is a file in memory, and on a GPU.

The driver here maps that file with the rights that it was told, so a write through a read-only mapping ends the
process, and whoever forgets to release a handle or an address is found out.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_base_weights import FAMILIES, NUMBERS, logits, save

from manylora.core.config import GIB, ModelConfig
from manylora.core.errors import ConfigError
from manylora.core.ports import SharedBase
from manylora.execution.model import base_weights, device_memory
from manylora.execution.model.base_weights import BaseWeights, map_weights, share_weights
from manylora.execution.model.device_memory import DeviceMemory, find_gpu
from manylora.execution.model.freeze import freeze, gather, load_weights
from manylora.execution.model.load import load_model
from manylora.execution.model.precision import Precision
from manylora.execution.page_budget import bytes_for_pages
from manylora.serving.hosting.links.base_share import BaseShare

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="descriptors of memory are Linux's")

GPU = torch.device("cuda", 0)
IDENTITY = "5d1b2c34-0000-0000-0000-000000000001"
PAGE = 65_536

RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
FIXED = 0x10


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_SUPPORTED = 801


class FileDriver:
    """The calls of ``cuda.bindings.driver`` that share memory, over files in memory.

    ``refused`` names calls that fail, each after a number of times at which it does not.
    """

    CUresult = Result
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READ=1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=102,
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED=103,
    )

    def __init__(self) -> None:
        self.refused: dict[str, int] = {}
        self.attribute = 1
        self.handles: dict[int, int] = {}  # descriptor of the memory -> times it must be released
        self.reserved: dict[int, int] = {}  # address -> size
        self.mapped: dict[int, int] = {}  # address -> descriptor
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *([ctypes.c_int] * 3), ctypes.c_long]
        self._libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cu"):
            refused = self.refused
            if name in refused:
                if not refused[name]:
                    return lambda *_: (Result.CUDA_ERROR_NOT_SUPPORTED,)
                refused[name] -= 1
        return super().__getattribute__(name)

    @property
    def is_clean(self) -> bool:
        """Whether everything was given back."""
        return not (self.handles or self.reserved or self.mapped)

    def CUmemAllocationProp(self) -> SimpleNamespace:
        return SimpleNamespace(location=SimpleNamespace())

    def CUmemAccessDesc(self) -> SimpleNamespace:
        return SimpleNamespace()

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, self.attribute

    def cuMemGetAllocationGranularity(self, properties: Any, flag: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, PAGE

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[Any, ...]:
        assert size > 0 and size % PAGE == 0 and properties.requestedHandleTypes == 1
        fd = os.memfd_create("device")
        os.ftruncate(fd, size)
        return Result.CUDA_SUCCESS, self._handle(fd)

    def cuMemImportFromShareableHandle(self, fd: int, kind: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, self._handle(os.dup(fd))

    def cuMemRetainAllocationHandle(self, address: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, self._handle(os.dup(self.mapped[address]))

    def cuMemExportToShareableHandle(self, handle: int, kind: int, flags: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, os.dup(handle)

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:
        del self.handles[handle]
        os.close(handle)
        return (Result.CUDA_SUCCESS,)

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> tuple[Any, ...]:
        place = self._libc.mmap(None, size, 0, RESERVED, -1, 0)
        self.reserved[place] = size
        return Result.CUDA_SUCCESS, place

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[Any, ...]:
        if os.fstat(handle).st_size < size:
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        assert self.reserved[address] == size
        assert self._libc.mmap(address, size, 0, mmap.MAP_SHARED | FIXED, handle, 0) == address
        self.mapped[address] = os.dup(handle)
        return (Result.CUDA_SUCCESS,)

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> tuple[Any, ...]:
        assert count == len(access) == 1 and address in self.mapped
        assert self._libc.mprotect(address, size, access[0].flags) == 0
        return (Result.CUDA_SUCCESS,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[Any, ...]:
        os.close(self.mapped.pop(address))
        self._libc.mmap(address, size, 0, RESERVED | FIXED, -1, 0)
        return (Result.CUDA_SUCCESS,)

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Any, ...]:
        assert address not in self.mapped and self.reserved.pop(address) == size
        self._libc.munmap(address, size)
        return (Result.CUDA_SUCCESS,)

    def _handle(self, fd: int) -> int:
        self.handles[fd] = 1
        return fd


def tensor_over(mapping: Any, device: torch.device) -> torch.Tensor:
    """Do what torch does with the interface of a GPU's array: the tensor keeps the object."""
    interface = mapping.__cuda_array_interface__
    address, is_read_only = interface["data"]
    assert not is_read_only and interface["typestr"] == "|u1"
    content = (ctypes.c_uint8 * interface["shape"][0]).from_address(address)
    content.mapping = mapping
    return torch.frombuffer(content, dtype=torch.uint8)


def install(put: Callable[[Any, str, Any], None], driver: FileDriver) -> None:
    """Put the driver in the place of CUDA's."""
    put(device_memory, "_load_driver", lambda: driver)
    put(device_memory, "_tensor_over", tensor_over)
    put(device_memory, "_wait", lambda device: None)
    put(base_weights, "gpu_identity", lambda device: IDENTITY)
    put(base_weights, "find_gpu", lambda identity: GPU)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileDriver]:
    found = FileDriver()
    install(monkeypatch.setattr, found)
    yield found
    gc.collect()  # Triton's interpreter leaves cycles
    assert found.is_clean


def sealed(content: bytes = b"weights") -> DeviceMemory:
    memory = DeviceMemory.make(GPU, len(content))
    assert memory is not None and memory.fd is None and not memory.is_shared
    memory.buffer.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    memory.seal()
    return memory


def is_refused(write: Callable[[], object]) -> bool:
    """Return whether a write ends the process that tries it."""
    child = os.fork()
    if not child:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # pytest's handler would print a traceback
        write()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


def test_memory_is_written_once_and_read_by_all(driver: FileDriver) -> None:
    memory = DeviceMemory.make(GPU, 7)
    assert memory is not None and memory.buffer.shape == (7,)
    assert not is_refused(lambda: memory.buffer.fill_(1))
    memory = sealed()
    assert memory.fd is not None and memory.is_shared
    other = DeviceMemory.open(GPU, memory.fd, 7)
    assert bytes(other.buffer.tolist()) == b"weights" and other.fd is None and other.is_shared
    assert is_refused(lambda: memory.buffer.fill_(1)) and is_refused(lambda: other.buffer.fill_(1))


def test_a_tensor_keeps_the_memory(driver: FileDriver) -> None:
    memory = sealed()
    fd, part = memory.fd, memory.buffer[2:4]
    assert fd is not None
    del memory
    assert part.tolist() == list(b"ig") and driver.mapped
    with pytest.raises(OSError):
        os.fstat(fd)


@pytest.mark.parametrize(
    "call",
    [
        "cuDeviceGetAttribute",
        "cuMemGetAllocationGranularity",
        "cuMemCreate",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
    ],
)
def test_without_such_memory_weights_are_private(call: str, driver: FileDriver) -> None:
    driver.refused[call] = 0
    assert DeviceMemory.make(GPU, 7) is None
    assert driver.is_clean


def test_a_device_or_an_installation_without_it_says_so(
    driver: FileDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver.attribute = 0
    assert DeviceMemory.make(GPU, 7) is None

    def missing() -> None:
        raise ImportError("no cuda-bindings")

    monkeypatch.setattr(device_memory, "_load_driver", missing)
    assert DeviceMemory.make(GPU, 7) is None
    assert "the device lacks" in caplog.text and "no cuda-bindings" in caplog.text
    assert DeviceMemory.make(torch.device("cpu"), 7) is None


@pytest.mark.parametrize(
    ("call", "after"),
    [
        ("cuMemRetainAllocationHandle", 0),
        ("cuMemExportToShareableHandle", 0),
        ("cuMemSetAccess", 1),
        ("cuMemSetAccess", 2),
        ("cuMemImportFromShareableHandle", 0),
        ("cuMemMap", 1),
    ],
)
def test_what_others_could_not_map_is_not_offered(call: str, after: int, driver: FileDriver) -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    driver.refused[call] = after
    memory = sealed()
    assert memory.fd is None and not memory.is_shared
    assert bytes(memory.buffer.tolist()) == b"weights"
    del memory
    assert driver.is_clean and len(os.listdir("/proc/self/fd")) == open_before


def test_other_content_behind_the_descriptor_is_found(
    driver: FileDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    empty = sealed(bytes(7))
    assert empty.fd is not None
    fd = empty.fd
    monkeypatch.setattr(
        driver, "cuMemImportFromShareableHandle", lambda *_: (Result.CUDA_SUCCESS, driver._handle(os.dup(fd)))
    )
    assert sealed().fd is None and "another content" in caplog.text


def shared_model(folder: Path) -> tuple[ModelConfig, BaseWeights, SharedBase]:
    """Return a model whose weights are in the memory of the driver."""
    model = save(FAMILIES["llama"], folder)
    loaded = load_model(model)
    weights = freeze(loaded, NUMBERS, *gather(loaded, GPU))
    shared = share_weights(weights)
    assert shared is not None and shared.gpu == IDENTITY
    return model, weights, shared


def test_a_model_over_mapped_memory_gives_the_same_logits(tmp_path: Path, driver: FileDriver) -> None:
    model, weights, shared = shared_model(tmp_path)
    mapped = map_weights(replace(shared, file=os.dup(shared.file)))
    assert share_weights(mapped) is None
    expected = logits(model)
    torch.testing.assert_close(logits(model, mapped), expected)
    torch.testing.assert_close(logits(model, weights), expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels read memory of a GPU there, which this is not")
@pytest.mark.parametrize("base", ["auto", "int4"])
def test_codes_in_mapped_memory_give_the_same_logits(base: str, tmp_path: Path, driver: FileDriver) -> None:
    pytest.importorskip("triton")
    pytest.importorskip("numba")
    model = replace(save(FAMILIES["tied"], tmp_path), base_dtype=base)
    _, weights = load_weights(model, lambda config: replace(load_model(config), device=GPU))
    assert isinstance(weights.memory, DeviceMemory) and weights.is_narrow == (base == "int4")
    shared = share_weights(weights)
    assert shared is not None
    frequencies = [entry.dtype for entry in weights.manifest.entries if entry.names[0].endswith("inv_freq")]
    assert set(frequencies) == {"float32"}
    kept = "stored" if base == "auto" else base
    expected = logits(
        model, freeze(load_model(model), Precision(torch.float32, kept, is_rounded=False, is_by_row=True))
    )
    torch.testing.assert_close(logits(model, map_weights(replace(shared, file=os.dup(shared.file)))), expected)


def test_weights_that_cannot_be_mapped_are_a_named_error(tmp_path: Path, driver: FileDriver) -> None:
    _, _weights, shared = shared_model(tmp_path)
    driver.refused["cuMemImportFromShareableHandle"] = 0
    file = os.dup(shared.file)
    with pytest.raises(ConfigError, match="cannot be mapped: cuMemImportFromShareableHandle"):
        map_weights(replace(shared, file=file))
    with pytest.raises(OSError):
        os.fstat(file)


def make_and_wait(folder: str) -> None:
    """Be the engine that loads the model: say what it shares, and wait to be killed."""
    install(setattr, FileDriver())
    model, weights, shared = shared_model(Path(folder))
    Path(folder, "manifest").write_bytes(shared.manifest)
    print(shared.file, shared.num_bytes, flush=True)
    sys.stdin.read()
    del model, weights


def test_the_weights_outlive_the_engine_that_made_them(tmp_path: Path, driver: FileDriver) -> None:
    share = BaseShare()
    code = f"import test_device_memory; test_device_memory.make_and_wait({str(tmp_path)!r})"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as maker:
        assert maker.stdout is not None
        fd, num_bytes = map(int, maker.stdout.readline().split())
        manifest = (tmp_path / "manifest").read_bytes()

        async def give() -> SharedBase | None:
            assert await share.take() is None
            share.give(SharedBase(file=fd, num_bytes=num_bytes, manifest=manifest, gpu=IDENTITY), maker.pid)
            return await share.take()

        base = asyncio.run(give())
        maker.kill()
    assert base is not None and base.gpu == IDENTITY
    model = ModelConfig(model=str(tmp_path), device="cpu")
    weights = map_weights(replace(base, file=os.dup(base.file)))
    share.close()
    torch.testing.assert_close(logits(model, weights), logits(model))


def test_a_base_is_loaded_once() -> None:
    share = BaseShare()

    async def scenario() -> None:
        assert await share.take() is None
        waiting = asyncio.create_task(share.take())
        await asyncio.sleep(0)
        assert not waiting.done()
        share.give(None, os.getpid())
        assert await waiting is None

    asyncio.run(scenario())
    share.close()


def test_a_gpu_that_is_not_seen_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(device_memory, "gpu_identity", lambda device: f"gpu-{device.index}")
    assert find_gpu("gpu-1") == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="GPU gpu-2, which this process does not see"):
        find_gpu("gpu-2")


def test_an_engine_alone_leaves_what_others_use() -> None:
    use = {"free": 60 * GIB, "total": 80 * GIB, "reserved": 15 * GIB, "base": 0, "activations": GIB}
    found = bytes_for_pages(**use, is_base_shared=False, utilization=0.9, num_on_device=1)
    assert found == int(72 * GIB) - 20 * GIB - GIB


@given(
    num=st.integers(2, 8),
    base=st.integers(0, 16 * GIB),
    activations=st.integers(0, GIB),
    is_shared=st.booleans(),
    utilization=st.floats(0.1, 1.0),
)
def test_engines_on_one_device_fill_their_parts_and_no_more(
    num: int, base: int, activations: int, is_shared: bool, utilization: float
) -> None:
    total, context = 80 * GIB, GIB // 2
    used = base if is_shared else 0
    pages = []
    for _ in range(num):  # one after the other; each sees what the earlier ones use
        used += context + (0 if is_shared else base)
        use = {"total": total, "free": total - used, "reserved": 0, "base": base, "activations": activations}
        found = bytes_for_pages(**use, is_base_shared=is_shared, utilization=utilization / num, num_on_device=num)
        pages.append(max(0, found))
        used += pages[-1]
    if all(pages):
        asked = total * utilization - num * (context + activations) - (base if is_shared else num * base)
        assert sum(pages) <= asked + num
        if sum(pages) < asked - 2 * num:  # the device is full
            assert total - used - activations <= context + base
    assert used <= total or not any(pages)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_another_process_reads_what_was_written() -> None:
    memory = DeviceMemory.make(torch.device("cuda", 0), 5_000_000)
    assert memory is not None
    expected = torch.arange(5_000_000, device="cuda").to(torch.uint8)
    memory.buffer.copy_(expected)
    memory.seal()
    assert memory.fd is not None
    code = (
        "import torch; from manylora.execution.model.device_memory import DeviceMemory\n"
        f"found = DeviceMemory.open(torch.device('cuda', 0), {memory.fd}, 5_000_000).buffer\n"
        "assert torch.equal(found, torch.arange(5_000_000, device='cuda').to(torch.uint8))\n"
        "try:\n    found.fill_(1); torch.cuda.synchronize()\nexcept RuntimeError:\n    print('refused')"
    )
    done = subprocess.run([sys.executable, "-c", code], pass_fds=[memory.fd], capture_output=True, text=True)
    assert done.stdout.strip() == "refused", done.stderr
    assert torch.equal(memory.buffer, expected)
