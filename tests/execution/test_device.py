"""What a GPU needs of the threads and captures around it, with its calls replaced."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from live_executor import executor_of, finish, folders, load, run, sequence

from manylora.core.clock import WallClock
from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig
from manylora.core.isolation.system import STEP_NICENESS
from manylora.core.plan import StepPlan
from manylora.core.types import Tier
from manylora.execution.build import build_parts
from manylora.execution.device import CudaOps, DeviceOps
from manylora.execution.storage.adapter_files import InlineReader

__all__ = ["folders"]


def test_threads_that_launch_enter_the_device(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []
    monkeypatch.setattr(DeviceOps, "enter_thread", lambda self: entered.append(threading.current_thread().name))
    memory = MemoryConfig(block_size=4, num_pages=64)
    config = EngineConfig(model=ModelConfig(model=str(folders["base"]), device="cpu"), memory=memory)
    parts = build_parts(config, WallClock(), readers=[InlineReader()])
    try:
        version = parts.reader.read("one", str(folders["one"]))
        assert load(parts, version, Tier.DEVICE, tuple(range(version.num_pages))) is None
        run(parts, sequence([1, 2, 3], 0, 3, 40, version.key, seq_id=0))
        assert executor_of(parts).runner.resident
    finally:
        parts.close()
    assert {name.partition("_")[0] for name in entered} == {"MainThread", "manylora-step", "manylora-copy"}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a priority is the whole process's")
def test_steps_yield_to_all_other_threads(folders: dict[str, Path]) -> None:
    """The link, the reader and the text of answers need milliseconds, and steps always have more to do."""

    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    found: list[int] = []
    memory = MemoryConfig(block_size=4, num_pages=64)
    config = EngineConfig(model=ModelConfig(model=str(folders["base"]), device="cpu"), memory=memory)
    parts = build_parts(config, WallClock(), readers=[InlineReader()])
    try:
        executor = executor_of(parts)
        executor.runner.logits_hook = lambda plan, rows: found.append(priority())
        finish(executor.launch(StepPlan(step_id=1, sequences=(sequence([1, 2, 3], 0, 3, 40),)), 0.0))
    finally:
        parts.close()
    assert found == [min(19, priority() + STEP_NICENESS)]


def test_a_capture_that_breaks_off_gives_the_thread_its_stream_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.cuda.graph`` leaves its stream last, behind the call that ends the capture and may raise."""
    current = ["own"]

    @contextmanager
    def graph(graph: object, **options: object) -> Iterator[None]:
        current[0] = "capture"
        yield
        raise RuntimeError("operation failed due to a previous error during capture")

    fake = SimpleNamespace(
        graph=graph,
        CUDAGraph=object,
        graph_pool_handle=object,
        synchronize=lambda device: None,
        current_stream=lambda device: current[0],
        set_stream=lambda stream: current.__setitem__(0, stream),
    )
    monkeypatch.setattr(torch, "cuda", fake)
    with pytest.raises(RuntimeError, match="previous error"):
        CudaOps(torch.device("cuda", 1)).capture(lambda: None)
    assert current == ["own"]
