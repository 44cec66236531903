"""Reading in a process of its own: the same adapter, the same refusals, and no harm when the helper dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from bad_adapters import tiny_base, write_good_adapter

from manylora.adapters.read import read_adapter
from manylora.errors import AdapterError, AdapterNotFound
from manylora.execution.storage.host_tier import HostTier
from manylora.execution.storage.reader import HostReader
from manylora.execution.storage.reader_process import PackingProcess

BASE = tiny_base()
LIMIT = 1 << 26


@pytest.fixture(scope="module")
def helper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PackingProcess]:
    """A helper that starts in a folder where a file has the name of a module."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "pickle.py").write_text("raise ImportError('the wrong pickle')")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        helper = PackingProcess(BASE, max_bytes=LIMIT, dtype="auto")
        yield helper
    helper.close()


def test_it_packs_what_we_would_pack(helper: PackingProcess, tmp_path: Path) -> None:
    for rank in (3, 3, 8):
        folder = write_good_adapter(tmp_path / f"a{rank}", BASE, rank=rank, seed=rank)
        found = helper.read("mine", str(folder))
        expected = read_adapter("mine", folder, BASE, max_bytes=LIMIT, dtype="auto")
        assert found is not None and found.version == expected.version and found.layout == expected.layout
        np.testing.assert_array_equal(found.image, expected.image)


def test_it_refuses_by_the_same_name(helper: PackingProcess, tmp_path: Path) -> None:
    with pytest.raises(AdapterNotFound, match="no directory"):
        helper.read("mine", str(tmp_path / "nowhere"))
    folder = write_good_adapter(tmp_path / "a", BASE)
    (folder / "adapter_model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(AdapterError, match="damaged") as caught:
        helper.read("mine", str(folder))
    assert caught.value.adapter == "mine"


def test_a_helper_that_died_costs_one_adapter_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_good_adapter(tmp_path / "a", BASE)
    store = HostTier(is_pinned=False)
    reader = HostReader(BASE, store, max_bytes=LIMIT, dtype="auto")
    try:
        version = reader.read("mine", str(folder))
        for is_killed in (False, True, False):
            store.drop(version.key)
            if is_killed:
                process = reader._helper._process
                assert process is not None
                process.kill()
                process.wait()
            image = reader.read_again(version).image
            assert image.shape[0] == version.num_pages
            assert ("packing_process_lost" in caplog.text) == is_killed
            caplog.clear()
    finally:
        reader.close()
    assert reader._helper._process is None


def test_other_weights_in_its_place_are_not_taken(tmp_path: Path) -> None:
    folder = write_good_adapter(tmp_path / "a", BASE, seed=0)
    reader = HostReader(BASE, HostTier(is_pinned=False), max_bytes=LIMIT)
    try:
        version = reader.read("mine", str(folder))
        write_good_adapter(folder, BASE, seed=1)
        with pytest.raises(AdapterError, match="changed since it was registered"):
            reader.read_again(version)
    finally:
        reader.close()
