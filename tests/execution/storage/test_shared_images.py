"""Images that engines share: one packs, the others map the same pages, and nothing is held of what is gone."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from bad_adapters import adapter_tensors, tiny_base, write_good_adapter
from safetensors.numpy import save_file

from manylora.execution.storage import shared_images
from manylora.execution.storage.host_tier import HostTier
from manylora.execution.storage.reader import HostReader
from manylora.execution.storage.reader_messages import ReaderSettings
from manylora.execution.storage.reader_process import ReaderProcess
from manylora.execution.storage.shared_images import NOTE, SharedImages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="images are shared by descriptors in /proc")

BASE = tiny_base()
SETTINGS = ReaderSettings(base=BASE, max_bytes=1 << 26, dtype="auto")


Held: TypeAlias = Callable[[], tuple[int, int]]


class Engine:
    """The host tier of an engine, with one reader."""

    def __init__(self, root: Path) -> None:
        self.process = ReaderProcess()
        self.host = HostTier(is_pinned=False)
        self._reader = HostReader(replace(SETTINGS, urgent_root=str(root)), self.host, [self.process])

    @property
    def has_packed(self) -> bool:
        return self.process._process is not None

    def read(self, folder: Path) -> torch.Tensor:
        adapter = self.host.get(self._reader.read("mine", str(folder)).key)
        assert adapter is not None
        return adapter.image

    def drop_all(self) -> None:
        for key in list(self.host._adapters):
            self.host.drop(key)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[[], Engine]]:
    made: list[Engine] = []

    def make() -> Engine:
        made.append(Engine(tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.process.close()


def count_held() -> tuple[int, int]:
    """Return the open descriptors and the mappings of images in this process."""
    links = (Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
    num_open = sum("manylora-adapter" in os.readlink(link) for link in links if link.is_symlink())
    return num_open, Path("/proc/self/maps").read_text().count("manylora-adapter")


@pytest.fixture
def held() -> Held:
    """Descriptors and mappings beside those that tests before have left."""
    gc.collect()
    before = count_held()

    def now() -> tuple[int, int]:
        num_open, num_mapped = count_held()
        return num_open - before[0], num_mapped - before[1]

    return now


def test_one_engine_packs_and_the_others_map_its_pages(
    tmp_path: Path, engine: Callable[[], Engine], held: Held
) -> None:
    folder = write_good_adapter(tmp_path / "1", BASE)
    first, second = engine(), engine()
    images = first.read(folder), second.read(folder)
    assert (first.has_packed, second.has_packed) == (True, False)
    assert images[0].data_ptr() != images[1].data_ptr() and torch.equal(*images)
    images[0][0, 0] = 7.0
    assert images[1][0, 0] == 7.0
    assert held() == (1, 2)


def test_an_engine_that_finds_no_image_packs_its_own(tmp_path: Path, engine: Callable[[], Engine], held: Held) -> None:
    folder = write_good_adapter(tmp_path / "1", BASE)
    first, second = engine(), engine()
    image = first.read(folder).clone()
    first.drop_all()
    with open(os.devnull) as other:  # it has the number that the image had, if any has
        assert held() == (0, 0)
        assert torch.equal(second.read(folder), image)
        assert second.has_packed and not other.closed
    (folder / NOTE).write_bytes(b"\xc1 no note")
    assert torch.equal(engine().read(folder), image)


def test_nothing_is_held_of_versions_that_are_gone(
    tmp_path: Path, engine: Callable[[], Engine], held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_images, "MOST_HELD", 4)
    engines = [engine(), engine()]
    for number in range(12):
        folder = write_good_adapter(tmp_path / str(number), BASE, seed=number % 6)  # the second six are known
        for one in engines:
            one.read(folder)
        assert held() == (min(number + 1, 4), 2 * min(number + 1, 6))
    for one in engines:
        one.drop_all()
    assert held() == (0, 0)


def test_what_engines_settle_themselves_and_other_folders_are_not_shared(
    tmp_path: Path, engine: Callable[[], Engine]
) -> None:
    process = engine().process
    shared = SharedImages(SETTINGS, str(tmp_path / "published"))
    folder = write_good_adapter(tmp_path / "published" / "dora", BASE, use_dora=True)
    tensors = adapter_tensors(BASE)
    sizes = {key.replace("lora_B.weight", "lora_magnitude_vector"): b for key, b in tensors.items() if "lora_B" in key}
    save_file(tensors | {key: abs(b[:, 0]) + 1 for key, b in sizes.items()}, folder / "adapter_model.safetensors")
    with shared.locked(str(folder)) as published:
        assert published is not None
        assert process.read("mine", str(folder), published).layout.needs_base
        assert published.find() is None and published.offered is None
    link = tmp_path / "published" / "link"
    link.symlink_to(write_good_adapter(tmp_path / "tenant", BASE))  # whose owner could write a note of its own
    for path in (tmp_path / "tenant", link, tmp_path / "published" / ".." / "tenant", tmp_path / "published" / "gone"):
        with shared.locked(str(path)) as published:
            assert published is None
