"""The file of content hashes: kept over starts, shared, bounded, and never trusted when it is damaged."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manylora.core.adapters import hash_cache
from manylora.core.adapters.hash_cache import HashCache, KnownContent
from manylora.core.types import AdapterKey

OLD_S = 60.0


def content(index: int, dtype: str = "bfloat16") -> KnownContent:
    return KnownContent(AdapterKey(f"{index:040x}"), dtype, bytes([index % 256]) * 40)


def fill(path: Path, indices: range) -> None:
    cache = HashCache(path)
    for index in indices:
        cache.put(f"s{index}", content(index), age_s=OLD_S)


def test_the_next_start_knows_what_this_one_read(tmp_path: Path) -> None:
    path = tmp_path / "not" / "yet" / "hashes"
    fill(path, range(3))
    assert [HashCache(path).get(f"s{index}") for index in range(4)] == [content(0), content(1), content(2), None]
    size = path.stat().st_size
    fill(path, range(3))
    assert path.stat().st_size == size, "known already"


def test_files_that_were_just_written_are_not_kept(tmp_path: Path) -> None:
    """A write within the same tick of the file system's clock would leave the file key as it is."""
    HashCache(tmp_path / "hashes").put("s", content(1), age_s=0.1)
    assert not (tmp_path / "hashes").exists()


def test_several_writers_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "hashes"
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda first: fill(path, range(first, first + 50)), range(0, 400, 50)))
    cache = HashCache(path)
    assert all(cache.get(f"s{index}") == content(index) for index in range(400))


def test_a_folder_that_cannot_be_written_costs_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = HashCache(tmp_path / "file" / "hashes")
    with caplog.at_level(logging.WARNING):
        cache.put("s", content(1), age_s=OLD_S)
    assert "hash_cache_" in caplog.text
    assert cache.get("s") == content(1), "for the rest of this run"


def test_it_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hash_cache, "MAX_ENTRIES", 20)
    path = tmp_path / "hashes"
    fill(path, range(30))
    cache = HashCache(path)
    assert cache.get("s29") == content(29) and cache.get("s19") is None
    assert len(path.read_bytes().splitlines()) == 10, "the newest half"
    monkeypatch.setattr(hash_cache, "MAX_BYTES", path.stat().st_size)
    fill(path, range(40, 50))
    assert len(path.read_bytes().splitlines()) == 10


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(st.tuples(st.integers(0, 2000), st.binary(max_size=8), st.integers(0, 40)), max_size=6),
    end=st.none() | st.integers(0, 900),
)
def test_a_damaged_file_gives_the_truth_or_nothing(tmp_path: Path, changes, end) -> None:
    path = tmp_path / "hashes"
    path.unlink(missing_ok=True)
    fill(path, range(10))
    data = path.read_bytes()
    for place, new, num_old in changes:
        data = data[:place] + new + data[place + num_old :]
    path.write_bytes(data[:end])
    cache = HashCache(path)
    assert all(cache.get(f"s{index}") in (content(index), None) for index in range(10))
    cache.put("more", content(77), age_s=OLD_S)
    cache.put("again", content(78), age_s=OLD_S)
    assert HashCache(path).get("again") == content(78), "at most one line after a torn one is lost"
