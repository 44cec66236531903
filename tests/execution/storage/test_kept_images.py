"""Images on disk: what comes back is what left host memory, or the adapter's files are read."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from bad_adapters import tiny_base, write_good_adapter
from numpy.typing import NDArray

from manylora.core.adapters.packed import own_memory
from manylora.core.errors import AdapterError
from manylora.core.types import AdapterVersion
from manylora.execution.storage import kept_images
from manylora.execution.storage.adapter_files import InlineReader
from manylora.execution.storage.arrival import Arrival
from manylora.execution.storage.host_tier import HostAdapter, HostTier
from manylora.execution.storage.kept_images import BLOCK_BYTES, IDLE_S, KeptImages
from manylora.execution.storage.reader import HostReader
from manylora.execution.storage.reader_messages import ReaderSettings

BASE = tiny_base()
SETTINGS = ReaderSettings(base=BASE, max_bytes=1 << 26, dtype="auto")


class Engine:
    """The host tier of an engine, with room on disk for so many small images, and a clock."""

    def __init__(self, folder: Path, num_images: int = 8) -> None:
        self.now = 0.0
        self.folder = folder
        self.kept = KeptImages(folder / "cache", num_images * BLOCK_BYTES, BASE.page, lambda: self.now)
        self.host = HostTier(is_pinned=False)
        self.reader = HostReader(SETTINGS, self.host, [InlineReader()], self.kept)

    def register(self, seed: int) -> AdapterVersion:
        """Read an adapter of its own content from a folder of its own."""
        return self.reader.read(f"a{seed}", str(write_good_adapter(self.folder / f"a{seed}", BASE, seed=seed)))

    def drop(self, version: AdapterVersion) -> NDArray[np.uint8]:
        """Drop an image from host memory and return its bytes, once it was written."""
        adapter = self.reader.drop(version.key)
        assert adapter is not None
        self.kept._writer.submit(lambda: None).result(60)
        return bits(adapter)

    def read_again(self, version: AdapterVersion) -> NDArray[np.uint8]:
        return bits(self.reader.read_again(version))

    def has_files(self, version: AdapterVersion, *, are_there: bool) -> None:
        """Take an adapter's files away, so that its image alone can give it, or put them back."""
        folder, away = Path(version.source), Path(f"{version.source}-away")
        shutil.move(*((away, folder) if are_there else (folder, away)))


def bits(adapter: HostAdapter) -> NDArray[np.uint8]:
    assert adapter.arrival.is_complete
    return adapter.image.numpy().view(np.uint8).copy()


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(kept_images, "_is_in_memory", lambda descriptor: False)
    engine = Engine(tmp_path)
    yield engine
    engine.reader.close()
    engine.kept.close()


def test_an_image_comes_back_without_the_files(engine: Engine) -> None:
    versions = [engine.register(seed) for seed in range(3)]
    images = [engine.drop(version) for version in versions]
    for version in versions:
        engine.has_files(version, are_there=False)
    begun: list[HostAdapter] = []
    for version, image in zip(versions, images, strict=True):
        adapter = engine.reader.read_again(version, begun.append)
        assert begun.pop() is adapter is engine.host.get(version.key)
        assert adapter.layout.dtype == version.dtype
        np.testing.assert_array_equal(bits(adapter), image)
    np.testing.assert_array_equal(engine.drop(versions[0]), images[0])
    assert os.fstat(engine.kept._file.fileno()).st_size < 3 * BLOCK_BYTES, "none is written twice"
    assert os.fstat(engine.kept._file.fileno()).st_nlink == 0, "none but this engine can open it"


def test_a_file_that_changes_is_another_version(engine: Engine) -> None:
    """The image is what was registered, whatever is in the folder by now."""
    before = engine.register(1)
    image = engine.drop(before)
    write_good_adapter(Path(before.source), BASE, seed=2)
    after = engine.reader.read("a1", before.source)
    assert after.key != before.key
    other = engine.drop(after)
    np.testing.assert_array_equal(engine.read_again(before), image)
    np.testing.assert_array_equal(engine.read_again(after), other)
    assert not np.array_equal(image, other)


@pytest.mark.parametrize("fault", ["bit", "zeros", "cut"])
def test_a_damaged_image_is_not_served(fault: str, engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    version = engine.register(0)
    image = engine.drop(version)
    descriptor = engine.kept._file.fileno()
    if fault == "cut":
        os.ftruncate(descriptor, image.size - 1)
    else:
        byte = os.pread(descriptor, 1, 1000)[0]
        os.pwrite(descriptor, bytes([byte ^ 4]) if fault == "bit" else bytes(512), 1000)
    np.testing.assert_array_equal(engine.read_again(version), image)
    assert "image_damaged" in caplog.text
    engine.host.drop(version.key)
    engine.has_files(version, are_there=False)
    with pytest.raises(AdapterError, match="no directory"):
        engine.read_again(version)
    engine.has_files(version, are_there=True)
    engine.read_again(version)
    engine.drop(version)
    engine.has_files(version, are_there=False)
    np.testing.assert_array_equal(engine.read_again(version), image)


def test_a_version_that_is_gone_leaves_nothing(engine: Engine) -> None:
    kept, waiting = engine.register(0), engine.register(1)
    engine.drop(kept)
    engine.reader.forget(kept.key)
    may_write = threading.Event()
    engine.kept._writer.submit(may_write.wait)
    engine.reader.drop(waiting.key)
    assert waiting.key in engine.kept._waiting
    engine.reader.forget(waiting.key)
    may_write.set()
    engine.kept._writer.submit(lambda: None).result(60)
    assert not engine.kept._kept and not engine.kept._waiting
    assert len(engine.kept._free) == engine.kept._num_blocks, "their room is free again"


def test_an_image_beyond_the_file_displaces_none(engine: Engine) -> None:
    first, second = engine.register(0), engine.register(1)
    engine.drop(first)
    engine.now = 2 * IDLE_S
    engine.kept._most_blocks = 0
    engine.drop(second)
    assert list(engine.kept._kept) == [first.key]


def test_a_full_file_keeps_what_is_used(tmp_path: Path, engine: Engine) -> None:
    engine.kept._most_blocks = 2
    versions = [engine.register(seed) for seed in range(4)]
    for version in versions[:3]:
        engine.drop(version)
        engine.now += 1
    assert list(engine.kept._kept) == [one.key for one in versions[:2]], "there was no room for the third"
    engine.now = IDLE_S - 1
    engine.read_again(versions[0])
    engine.now += 2
    engine.drop(versions[3])
    assert list(engine.kept._kept) == [versions[0].key, versions[3].key], "the one that was not used makes room"
    assert os.fstat(engine.kept._file.fileno()).st_size <= 2 * BLOCK_BYTES
    assert not engine.kept._waiting


def test_a_full_disk_keeps_nothing_more(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = (engine.register(seed) for seed in range(3))
    engine.drop(first)
    disk = SimpleNamespace(f_bavail=100, f_blocks=1000, f_frsize=BLOCK_BYTES)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fstatvfs", lambda descriptor: disk)
        engine.drop(second)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", lambda *given: os.write(os.open("/dev/full", os.O_WRONLY), b"1"))
        engine.drop(third)
    assert list(engine.kept._kept) == [first.key]
    assert "image_not_kept" in caplog.text
    assert len(engine.kept._free) == 1, "its block is free again"


def test_an_image_whose_blocks_were_given_away_meanwhile_is_not_served(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.kept._most_blocks = 1
    first, second = engine.register(1), engine.register(2)
    image = engine.drop(first)

    def memory(num_bytes: int) -> object:
        """Between the look at the list and the read, the other image takes the block."""
        monkeypatch.setattr(kept_images, "own_memory", own_memory)
        engine.now += 2 * IDLE_S
        engine.drop(second)
        return own_memory(num_bytes)

    monkeypatch.setattr(kept_images, "own_memory", memory)
    monkeypatch.setattr(kept_images, "_sum", lambda memory: 0)  # as if both had one sum
    np.testing.assert_array_equal(engine.read_again(first), image)
    assert list(engine.kept._kept) == [second.key]


def test_threads_read_and_replace_images_at_once(engine: Engine) -> None:
    engine.kept._most_blocks = 3
    versions = [engine.register(seed) for seed in range(6)]
    images = [bits(engine.reader.read_again(version)) for version in versions]
    held = [engine.host.get(version.key) for version in versions]
    found, wrong = [0], []

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        for _ in range(100):
            engine.now += IDLE_S  # every image may be replaced at any time
            one = int(rng.integers(len(versions)))
            adapter = held[one]
            assert adapter is not None
            engine.kept.keep(versions[one].key, adapter)
            engine.kept._writer.submit(lambda: None).result(60)
            one = int(rng.integers(len(versions)))
            packed = engine.kept.find(versions[one])
            if packed is not None:
                found[0] += 1
                if not np.array_equal(packed.image.view(np.uint8), images[one]):
                    wrong.append(one)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.kept._writer.submit(lambda: None).result(60)
    assert found[0] and not wrong
    blocks = sorted([*engine.kept._free, *(block for one in engine.kept._kept.values() for block in one.blocks)])
    assert blocks == list(range(engine.kept._num_blocks)) and len(blocks) <= 3, "every block has one owner"


def test_an_image_that_is_not_whole_or_was_settled_is_left_out(engine: Engine) -> None:
    version = engine.register(0)
    adapter = engine.host.get(version.key)
    assert adapter is not None
    engine.kept.keep(version.key, HostAdapter(adapter.layout, adapter.image, Arrival(version.num_pages)))
    engine.kept.keep(version.key, HostAdapter(replace(adapter.layout, needs_base=True), adapter.image, adapter.arrival))
    assert not engine.kept._waiting
    engine.kept.keep(version.key, adapter)
    assert engine.kept._waiting or engine.kept._kept


def test_few_dropped_images_wait_in_memory(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_images, "WAITING_BYTES", 1)
    versions = [engine.register(seed) for seed in range(3)]
    gate = threading.Event()
    engine.kept._writer.submit(gate.wait, 60)
    for version in versions:
        engine.reader.drop(version.key)
    gate.set()
    engine.kept._writer.submit(lambda: None).result(60)
    assert list(engine.kept._kept) == [versions[0].key]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells where files are")
def test_no_image_is_kept_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shared = Path("/dev/shm")
    if not shared.is_mount():
        pytest.skip("no file system of memory")
    assert KeptImages.open(str(shared), 1 << 20, BASE.page) is None
    assert "is in memory" in caplog.text
    assert KeptImages.open(None, 1 << 20, BASE.page) is None
    assert KeptImages.open(str(tmp_path), 0, BASE.page) is None
    (tmp_path / "file").write_text("")
    assert KeptImages.open(str(tmp_path / "file"), 1 << 20, BASE.page) is None
