"""Threads, tiers and isolation of the torch executor on a tiny model."""

from __future__ import annotations

import gc
import shutil
import signal
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from live_executor import (
    BLOCK,
    READER_PROCESS,
    clock,
    executor_of,
    finish,
    folders,
    load,
    pages_for,
    parts,
    run,
    sequence,
)
from msgspec import structs
from safetensors.torch import load_file

from manylora.core.clock import WallClock
from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig
from manylora.core.plan import IN_HOST, AdapterLoad, StepPlan, StepResult
from manylora.core.ports import EngineParts
from manylora.core.types import AdapterKey, Tier
from manylora.execution.build import build_parts
from manylora.execution.kernels.cpu.support import find_compiled
from manylora.execution.lora.kernels import LORA_KERNELS
from manylora.execution.storage import kept_images
from manylora.execution.storage.adapter_files import InlineReader
from manylora.execution.storage.arrival import Arrival
from manylora.execution.storage.host_tier import HostAdapter
from manylora.execution.storage.page_tensor import Link
from manylora.execution.storage.reader_process import ReaderProcess

__all__ = ["clock", "folders", "parts"]


def test_work_is_polled_and_wakes_the_clock(parts: EngineParts, clock: WallClock) -> None:
    work = parts.executor.launch(StepPlan(step_id=1, sequences=(sequence([1, 2, 3], 0, 3, 0),)), 0.0)
    assert work.ready_at == float("inf")
    clock.wait_until(clock.now() + 60)  # returns when woken
    assert finish(work) == work.poll(0.0)


def test_the_loop_is_woken_when_the_step_behind_is_on_its_way(
    parts: EngineParts, clock: WallClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its turn takes the interpreter's lock, which the thread that launches the next step needs."""
    executor, may_begin, happened = executor_of(parts), threading.Event(), []
    batch, forward = executor.runner._batch, executor.runner._forward
    monkeypatch.setattr(clock, "wake", lambda: happened.append("wake"))
    monkeypatch.setattr(executor.runner, "_batch", lambda *own: happened.append("prepare") or batch(*own))
    monkeypatch.setattr(
        executor.runner, "_forward", lambda *own, **named: happened.append("run") or forward(*own, **named)
    )
    executor._steps.submit(may_begin.wait)
    parts_of = [sequence([1, 2, 3], 0, 3, 0), sequence([1, 2], 0, 2, 0, AdapterKey("unknown")), sequence([4], 0, 1, 0)]
    steps = [executor.launch(StepPlan(step_id=1, sequences=(part,)), 0.0) for part in parts_of]
    may_begin.set()
    assert isinstance(finish(steps[2]), StepResult)
    with pytest.raises(KeyError):
        finish(steps[1])
    executor._steps.submit(lambda: None).result()
    # The second step fails before it is on its way, so the loop hears of it, and of the first, with the third.
    assert happened == ["prepare", "run", "prepare", "wake", "run", "wake"]


def test_a_failed_step_raises_where_it_is_polled(parts: EngineParts) -> None:
    plan = StepPlan(step_id=1, sequences=(sequence([1, 2], 0, 2, 0, AdapterKey("unknown")),))
    with pytest.raises(KeyError, match="unknown"):
        finish(parts.executor.launch(plan, 0.0))
    assert run(parts, sequence([1, 2], 0, 2, 0)).isfinite().all()


def test_sequences_come_back_in_the_plans_order(parts: EngineParts, folders: dict[str, Path]) -> None:
    versions = [parts.reader.read(name, str(folders[name])) for name in ("one", "two")]
    assert load(parts, versions[0], Tier.DEVICE, pages_for(versions[0])) is None
    second = tuple(range(20, 20 + versions[1].num_pages))
    assert load(parts, versions[1], Tier.DEVICE, second) is None
    plan = [
        sequence([5, 6, 7], 0, 3, 0, versions[0].key, 0),
        sequence([8, 9], 0, 2, 1, None, 1),
        sequence([5, 6, 7], 0, 3, 2, versions[1].key, 2),
        sequence([8, 9], 0, 2, 3, versions[0].key, 3),
    ]
    together = run(parts, *plan)
    for row, part in enumerate(plan):
        torch.testing.assert_close(run(parts, part)[0], together[row], atol=1e-5, rtol=1e-5)
    assert (together[0] - together[2]).abs().max() > 1e-3


def test_a_load_that_cannot_be_done_is_a_result(parts: EngineParts, folders: dict[str, Path]) -> None:
    version = parts.reader.read("one", str(folders["one"]))
    assert "pages" in (load(parts, version, Tier.DEVICE, (1,) * (version.num_pages + 1)) or "")
    parts.executor.drop_adapter(version.key, Tier.HOST)
    gone = replace(version, source=str(folders["one"] / "gone"))
    assert "no directory" in (load(parts, gone, Tier.DEVICE, pages_for(version)) or "")


def test_a_lost_host_copy_is_read_again(parts: EngineParts, folders: dict[str, Path]) -> None:
    version = parts.reader.read("one", str(folders["one"]))
    parts.executor.drop_adapter(version.key, Tier.HOST)
    assert load(parts, version, Tier.DEVICE, pages_for(version)) is None
    assert run(parts, sequence([1, 2], 0, 2, 0, version.key)).isfinite().all()


def test_an_image_on_disk_gives_the_logits_of_the_files(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_images, "_is_in_memory", lambda descriptor: False)
    config = EngineConfig(
        model=ModelConfig(model=str(folders["base"]), device="cpu"),
        memory=MemoryConfig(block_size=BLOCK, num_pages=64),
        cache_dir=str(tmp_path / "cache"),
    )
    engine = build_parts(config, WallClock())
    executor = executor_of(engine)
    version = engine.reader.read("one", str(shutil.copytree(folders["one"], tmp_path / "one")))
    assert load(engine, version, Tier.DEVICE, pages_for(version)) is None
    part = sequence([1, 2], 0, 2, 0, version.key)
    from_files = run(engine, part)
    for tier in (Tier.DEVICE, Tier.HOST):
        executor.drop_adapter(version.key, tier)
    kept = executor._reader._kept
    assert kept is not None
    kept._writer.submit(lambda: None).result(60)
    shutil.rmtree(tmp_path / "one")
    assert load(engine, version, Tier.HOST) is None
    assert load(engine, version, Tier.DEVICE, pages_for(version)) is None
    torch.testing.assert_close(run(engine, part), from_files, atol=0, rtol=0)
    engine.close()
    assert kept._file.closed


@pytest.mark.parametrize("kernel", ["grouped", "naive", "reference"])
def test_a_host_image_gives_the_logits_of_pages(
    kernel: str, parts: EngineParts, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_of(parts).runner._step, "kernel", LORA_KERNELS[kernel])
    versions = [parts.reader.read(name, str(folders[name])) for name in ("one", "two")]
    for version, pages in zip(versions, (range(40, 50), range(50, 60)), strict=True):
        assert load(parts, version, Tier.DEVICE, tuple(pages)[: version.num_pages]) is None
    plan = [
        sequence(list(range(5, 17)), 0, 12, 0, versions[0].key, 0),
        sequence([8, 9], 0, 2, 8, versions[1].key, 1),
        sequence([8, 9], 0, 2, 16, None, 2),
    ]
    on_device = run(parts, *plan)
    for in_host in ((0,), (1,), (0, 1)):
        placed = [structs.replace(part, placement=IN_HOST) if i in in_host else part for i, part in enumerate(plan)]
        torch.testing.assert_close(run(parts, *placed), on_device, atol=0, rtol=0)


def test_a_step_keeps_the_host_image_that_it_reads(parts: EngineParts, folders: dict[str, Path]) -> None:
    """Whatever happens to the tier before the step has begun; and one that was lost is read again."""
    version = parts.reader.read("one", str(folders["one"]))
    assert load(parts, version, Tier.DEVICE, pages_for(version)) is None
    part = structs.replace(sequence([5, 6, 7], 0, 3, 0, version.key), placement=IN_HOST)
    expected = run(parts, part)

    executor, may_begin, rows = executor_of(parts), threading.Event(), []
    executor._steps.submit(may_begin.wait)
    executor.runner.logits_hook = lambda plan, logits: rows.append(logits)
    steps = [executor.launch(StepPlan(step_id=1, sequences=(part,)), 0.0)]
    executor._host.drop(version.key)  # behind the executor's back: lost
    steps.append(executor.launch(StepPlan(step_id=2, sequences=(part,)), 0.0))
    executor.drop_adapter(version.key, Tier.HOST)
    executor.drop_adapter(version.key, Tier.DEVICE)
    may_begin.set()
    for step in steps:
        finish(step)
    torch.testing.assert_close(rows, [expected, expected], atol=0, rtol=0)


@pytest.mark.parametrize("is_gone", [False, True])
def test_an_image_that_cannot_be_had_ends_its_own_sequences(
    is_gone: bool, parts: EngineParts, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Its read has failed, or it was lost and its files are gone."""
    path = shutil.copytree(folders["one"], tmp_path / "one")
    version = parts.reader.read("one", str(path))
    assert load(parts, version, Tier.DEVICE, pages_for(version)) is None
    parts.executor.drop_adapter(version.key, Tier.DEVICE)
    executor = executor_of(parts)
    adapter = executor._host.drop(version.key)
    assert adapter is not None
    if is_gone:
        shutil.rmtree(path)
    else:
        executor._host._adapters[version.key] = adapter = HostAdapter(
            adapter.layout, torch.zeros_like(adapter.image), Arrival(version.num_pages)
        )
        adapter.arrival.fail("its reader died")
    cold = structs.replace(sequence([5, 6, 7], 0, 3, 0, version.key), placement=IN_HOST)
    other = sequence([8, 9], 0, 2, 8, None, 1)
    result = finish(executor.launch(StepPlan(step_id=1, sequences=(cold, other)), 0.0))
    assert isinstance(result, StepResult)
    assert result.failed.keys() == {0} and result.tokens.keys() == {1}
    assert ("no directory" if is_gone else "its reader died") in result.failed[0]
    assert run(parts, other).isfinite().all()


def test_an_idle_engine_keeps_no_image_that_was_dropped(parts: EngineParts, folders: dict[str, Path]) -> None:
    version = parts.reader.read("one", str(folders["one"]))
    run(parts, structs.replace(sequence([5, 6, 7], 0, 3, 0, version.key), placement=IN_HOST))
    executor = executor_of(parts)
    adapter = executor._host.get(version.key)
    assert adapter is not None
    view = weakref.ref(next(iter(adapter.in_place().groups.values())).a[0].weight)
    del adapter
    assert view() is not None
    executor.drop_adapter(version.key, Tier.HOST)
    executor._steps.submit(gc.collect).result()
    assert view() is None


def test_a_slow_copy_goes_in_few_slices(parts: EngineParts) -> None:
    """Each takes processor time and the interpreter lock from the steps beside it."""
    pages = executor_of(parts)._copies.pages
    link, filled = Link(pages, 1), list[int]()
    link.close()  # it does not sleep any more
    link.copy(range(20, 60), torch.zeros_like(pages.flat[20:60]), filled.append)
    assert filled == [5, 10, 15, 20, 25, 30, 35, 40]


@READER_PROCESS
def test_a_paced_link_keeps_to_its_bandwidth_until_it_is_closed(parts: EngineParts, folders: dict[str, Path]) -> None:
    version = parts.reader.read("one", str(folders["one"]))
    executor, plain = executor_of(parts), sequence([1, 2], 0, 2, 0, version.key)
    image = executor._host.get(version.key).image  # type: ignore[union-attr]
    assert load(parts, version, Tier.DEVICE, pages_for(version)) is None
    expected = run(parts, plain)
    executor.drop_adapter(version.key, Tier.DEVICE)
    executor._copies.link = Link(executor._copies.pages, image.nbytes * 5)
    began_at = time.perf_counter()
    assert load(parts, version, Tier.DEVICE, pages_for(version)) is None
    assert 0.2 <= time.perf_counter() - began_at < 5
    torch.testing.assert_close(run(parts, plain), expected, atol=0, rtol=0)

    executor._copies.link = Link(executor._copies.pages, 1)
    work = executor.load_adapter(AdapterLoad(version=version, tier=Tier.DEVICE, pages=pages_for(version)), 0.0)
    time.sleep(0.01)
    assert work.poll(0.0) is None
    executor.close()
    assert work.poll(0.0) is not None


@READER_PROCESS
@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DEVICE])
def test_a_read_that_a_close_ends_is_no_fault_of_the_files(
    parts: EngineParts, folders: dict[str, Path], caplog: pytest.LogCaptureFixture, tier: Tier
) -> None:
    executor = executor_of(parts)
    version = parts.reader.read("one", str(folders["one"]))
    executor.drop_adapter(version.key, Tier.HOST)
    for reader in executor._reader._readers:
        if isinstance(reader, ReaderProcess) and reader._process is not None:
            reader._process.send_signal(signal.SIGSTOP)
    pages = pages_for(version) if tier is Tier.DEVICE else ()
    work = executor.load_adapter(AdapterLoad(version=version, tier=tier, pages=pages), 0.0)
    while len(executor._reader._free) == len(executor._reader._readers):
        time.sleep(0.001)
    executor.close()
    ended = finish(work)
    assert ended.error is not None and "closing" in ended.error
    assert "load_failed" not in caplog.text and "reader_process_lost" not in caplog.text


def test_a_bin_file_holds_the_same_version(parts: EngineParts, folders: dict[str, Path], tmp_path: Path) -> None:
    path = shutil.copytree(folders["one"], tmp_path / "bin")
    torch.save(load_file(path / "adapter_model.safetensors"), path / "adapter_model.bin")
    (path / "adapter_model.safetensors").unlink()
    assert parts.reader.read("bin", str(path)).key == parts.reader.read("one", str(folders["one"])).key


def test_a_host_load_reads_the_files_again(
    parts: EngineParts, folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = shutil.copytree(folders["one"], tmp_path / "adapter")
    version = parts.reader.read("mine", str(path))
    parts.executor.drop_adapter(version.key, Tier.HOST)
    assert load(parts, version, Tier.HOST) is None
    assert load(parts, version, Tier.DEVICE, pages_for(version)) is None

    parts.executor.drop_adapter(version.key, Tier.HOST)
    shutil.copy(folders["two"] / "adapter_model.safetensors", path / "adapter_model.safetensors")
    assert "changed" in (load(parts, version, Tier.HOST) or "")
    shutil.rmtree(path)
    assert load(parts, version, Tier.HOST) == "there is no directory at its path", "clients are not told the path"
    assert str(path) in caplog.text


def test_dropping_gives_host_memory_back(parts: EngineParts, folders: dict[str, Path]) -> None:
    version = parts.reader.read("one", str(folders["one"]))
    assert load(parts, version, Tier.DEVICE, pages_for(version)) is None
    host = executor_of(parts)._host
    adapter = host.get(version.key)
    assert adapter is not None and adapter.image.nbytes == version.host_bytes
    image = weakref.ref(adapter.image)
    del adapter
    parts.executor.drop_adapter(version.key, Tier.HOST)
    gc.collect()
    assert image() is None and host.get(version.key) is None
    # The device copy does not need it.
    assert run(parts, sequence([1, 2], 0, 2, 0, version.key)).isfinite().all()
    parts.executor.drop_adapter(version.key, Tier.DEVICE)
    with pytest.raises(KeyError):
        run(parts, sequence([1, 2], 0, 2, 0, version.key))


def test_the_same_weights_are_kept_once(parts: EngineParts, folders: dict[str, Path], tmp_path: Path) -> None:
    path = shutil.copytree(folders["one"], tmp_path / "copy")
    first, second = parts.reader.read("a", str(folders["one"])), parts.reader.read("b", str(path))
    assert first.key == second.key and replace(first, source="") == replace(second, source="")
    assert len(executor_of(parts)._host._adapters) == 1


@pytest.mark.parametrize("is_compiled", [True, False])
def test_what_a_page_held_before_does_not_reach_its_next_owner(
    is_compiled: bool, parts: EngineParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_compiled:
        monkeypatch.setattr("manylora.execution.attention.kv.find_compiled", lambda: None)
    tokens = [7, 8, 9, 10, 11, 12, 13]
    other = sequence([3, 4, 5], 0, 3, 8, None, 1)
    run(parts, other)
    run(parts, sequence(tokens, 0, 6, 0))
    clean = run(parts, sequence(tokens, 6, 1, 0), sequence([3, 4, 5, 6], 3, 1, 8, None, 1))
    executor_of(parts)._copies.pages.flat[:8] = float("nan")
    run(parts, sequence(tokens, 0, 6, 0))
    dirty = run(parts, sequence(tokens, 6, 1, 0), sequence([3, 4, 5, 6], 3, 1, 8, None, 1))
    torch.testing.assert_close(dirty, clean)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_models_and_adapters_are_near_float32(
    dtype: str, parts: EngineParts, folders: dict[str, Path], clock: WallClock
) -> None:
    config = EngineConfig(
        model=ModelConfig(model=str(folders["base"]), device="cpu", dtype=dtype),
        memory=MemoryConfig(block_size=BLOCK, num_pages=128),
    )
    half = build_parts(config, clock, readers=[InlineReader()])
    try:
        rows = []
        for each in (parts, half):
            version = each.reader.read("one", str(folders["one"]))
            assert load(each, version, Tier.DEVICE, pages_for(version)) is None
            prompt = run(each, sequence([5, 6, 7], 0, 3, 0, version.key))
            rows.append(torch.cat([prompt, run(each, sequence([5, 6, 7, 8], 3, 1, 0, version.key))]))
    finally:
        half.close()
    assert half.base.page.element_bytes == 2 and half.base.fingerprint != parts.base.fingerprint
    torch.testing.assert_close(rows[1], rows[0], atol=0.03, rtol=0.1)


def test_a_load_makes_what_the_compiled_kernels_keep_with_weights(parts: EngineParts, folders: dict[str, Path]) -> None:
    """So the first step on the adapter takes no longer than any other."""
    if find_compiled() is None:
        pytest.skip("nothing is compiled here")
    version = parts.reader.read("one", str(folders["one"]))
    assert load(parts, version, Tier.DEVICE, pages_for(version)) is None
    prepared = executor_of(parts)._resident[version.key].memory.prepared
    before = dict(prepared)
    assert before
    assert run(parts, sequence([1, 2], 0, 2, 0, version.key)).isfinite().all()
    assert prepared.keys() == before.keys()
    assert all(prepared[key] is value for key, value in before.items())
