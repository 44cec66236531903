"""Files of registries on disk: fetched once, whole or in parts, compared, within their limit."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import msgspec
import pytest
from registry_server import serving_folder

from manylora.core.adapters.remote import RemoteHead
from manylora.core.adapters.sources import check_registry, resolve_url
from manylora.core.errors import AdapterError, AdapterForbidden, AdapterUnavailable
from manylora.execution.storage import registry_cache
from manylora.execution.storage.http_registry import FIRST_BYTES, HttpRegistry
from manylora.execution.storage.registry_cache import HEADER_BYTES, CachedRegistry, DiskFolder

HOST = "https://host.org"
URL = f"{HOST}/a/adapter_model.safetensors"
CONTENT = os.urandom(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
COMMIT = "c" * 40


class FakeRegistry:
    """One file at every URL; counts the bytes that are asked for behind openings."""

    def __init__(self, content: bytes = CONTENT, etag: str = '"1"', prefix: str = HOST) -> None:
        self.content, self.etag, self.prefix = content, etag, prefix
        self.asked: list[tuple[int, int]] = []
        self.num_opened = self.num_sent = 0
        self.modified = ""
        self.breaks_after: int | None = None
        self.commit = COMMIT

    def allow(self, name: str, url: str) -> str:
        return resolve_url(name, url, [check_registry(self.prefix)])

    def pin(self, name: str, url: str) -> str:
        return url.replace("@main", f"@{self.commit}")

    def open(self, name: str, url: str, max_bytes: int) -> RemoteHead:
        self.num_opened += 1
        return RemoteHead(len(self.content), self.etag, self.modified, self.content[:FIRST_BYTES])

    def parts(self, name: str, url: str, head: RemoteHead, offset: int, length: int) -> Iterator[bytes]:
        self.asked.append((offset, offset + length))
        for at in range(offset, offset + length, 1000):
            if self.breaks_after is not None and at - offset >= self.breaks_after:
                raise AdapterUnavailable(name, "the server answers 503")
            self.num_sent += 1000
            yield self.content[at : min(at + 1000, offset + length)]

    def extend(self) -> None:
        """Bytes may come for longer."""


def cached(asked: Any, folder: Path, max_bytes: int = 1 << 20, **more: Any) -> CachedRegistry:
    return CachedRegistry(asked, str(folder), max_bytes, **more)


def read(registry: CachedRegistry, begin: int = 0, end: int = len(CONTENT), url: str = URL) -> bytes:
    head = registry.open("mine", url, 1 << 20)
    return registry.read("mine", url, msgspec.structs.replace(head, first=b""), begin, end - begin)


def test_ranges_come_once_and_a_later_process_takes_up_where_the_first_broke_off(tmp_path: Path) -> None:
    asked = FakeRegistry()
    first = cached(asked, tmp_path)
    head = msgspec.structs.replace(first.open("mine", URL, 1 << 20), first=b"")
    for begin, end in ((100_000, 120_000), (150_000, 160_500), (160_500, 170_000), (110_000, 115_000)):
        assert first.read("mine", URL, head, begin, end - begin) == CONTENT[begin:end]
    assert asked.asked == [(100_000, 300_000)] and asked.num_sent == 70_000, "one request, and no byte is left out"
    asked.breaks_after = 30_000
    with pytest.raises(AdapterUnavailable):
        read(cached(asked, tmp_path), 110_000, 220_000)
    asked.breaks_after = None
    assert read(cached(asked, tmp_path)) == CONTENT
    assert asked.asked[1:] == [(170_000, 300_000), (FIRST_BYTES, 100_000), (200_000, 300_000)]
    assert read(cached(asked, tmp_path)) == CONTENT and len(asked.asked) == 4
    asked.content, asked.etag = CONTENT[::-1], '"2"'
    assert read(cached(asked, tmp_path)) == CONTENT[::-1], "another file has its place"


def test_a_file_that_made_room_between_two_ranges_is_fetched_again(tmp_path: Path) -> None:
    """The bytes on their way end where others were; now these have gone, too."""
    asked = FakeRegistry()
    read(cached(asked, tmp_path), 150_000, 160_000)
    registry = cached(asked, tmp_path)
    head = msgspec.structs.replace(registry.open("mine", URL, 1 << 20), first=b"")
    assert registry.read("mine", URL, head, 100_000, 10_000) == CONTENT[100_000:110_000]
    assert asked.asked[-1] == (100_000, 150_000)
    DiskFolder(tmp_path, 1 << 20).remove(URL)
    assert registry.read("mine", URL, head, 110_000, 100_000) == CONTENT[110_000:210_000]


def test_a_killed_download_goes_on_at_the_byte_reached(tmp_path: Path) -> None:
    (tmp_path / "web" / "a").mkdir(parents=True)
    (tmp_path / "web" / "a" / "adapter_model.safetensors").write_bytes(CONTENT)
    program = (
        "import sys; from manylora.execution.storage import registry_cache as cache;"
        "from manylora.execution.storage.http_registry import HttpRegistry;"
        "cache.NOTED_BYTES = 1000; url = sys.argv[1] + '/a/adapter_model.safetensors';"
        "registry = cache.CachedRegistry(HttpRegistry([sys.argv[1]]), sys.argv[2], 1 << 20);"
        "head = registry.open('mine', url, 1 << 20); registry.read('mine', url, head, 100000, 200000)"
    )
    with serving_folder(tmp_path / "web") as server:
        server.faults.held_from = 200_000
        process = subprocess.Popen([sys.executable, "-c", program, server.url, str(tmp_path / "cache")])
        while (ranges := kept_ranges(tmp_path / "cache"))[-1:] != [(100_000, 200_000)]:
            assert process.poll() is None
            threading.Event().wait(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        server.faults.released.set()
        assert ranges == [(0, FIRST_BYTES), (100_000, 200_000)]
        registry = cached(HttpRegistry([server.url]), tmp_path / "cache")
        server.asked.clear()
        assert read(registry, 100_000, 300_000, f"{server.url}/a/adapter_model.safetensors") == CONTENT[100_000:]
        assert server.ranges() == ["bytes=200000-299999"]
        registry._asked.close()


def kept_ranges(folder: Path) -> list[tuple[int, int]]:
    for path in folder.glob("[0-9a-f]*"):
        if kept := path.read_bytes()[:HEADER_BYTES].rstrip(b"\0"):
            return msgspec.msgpack.decode(kept, type=registry_cache._Kept).ranges
    return []


def test_a_checksum_is_compared_before_a_byte_is_handed_on(tmp_path: Path) -> None:
    asked = FakeRegistry()
    assert read(cached(asked, tmp_path), 100_000, 100_010, f"{URL}#sha256={SHA256}") == CONTENT[100_000:100_010]
    assert asked.asked == [(FIRST_BYTES, 300_000)], "all of it was fetched for ten bytes"
    for url in (f"{URL}#sha256={'0' * 64}", URL.replace("/a/", "/small/") + f"#sha256={'0' * 64}"):
        asked.content = CONTENT[:100] if "small" in url else CONTENT
        with pytest.raises(AdapterError, match=f"adapter_model.safetensors has the SHA-256 .*, expected {'0' * 64}"):
            read(cached(asked, tmp_path), 10, 20, url)
    with pytest.raises(AdapterError, match="give --cache-dir"):
        CachedRegistry(asked).open("mine", f"{URL}#sha256={SHA256}", 1 << 20)
    with pytest.raises(AdapterUnavailable, match="no room in the cache"):
        asked.content = CONTENT
        read(cached(asked, tmp_path / "small", 100_000), url=f"{URL}#sha256={SHA256}")
    with pytest.raises(AdapterForbidden):
        cached(asked, tmp_path).open("mine", f"https://other.org/a#sha256={SHA256}", 1 << 20)


def test_a_file_of_a_hub_is_compared_with_what_the_hub_tells(tmp_path: Path) -> None:
    url = f"hf://org/name@{COMMIT}/adapter_model.safetensors"
    asked = FakeRegistry(etag=f'"{SHA256}"', prefix="hf://org")
    assert read(cached(asked, tmp_path), url=url) == CONTENT
    assert read(cached(asked, tmp_path), url=url) == CONTENT and asked.num_opened == 1, "a commit is asked for once"
    asked.content = CONTENT[:-1] + b"\0" if CONTENT[-1] else CONTENT[:-1] + b"\1"
    assert len(read(cached(asked, tmp_path / "b"), 0, 200_000, url)) == 200_000
    with pytest.raises(AdapterError, match="has the SHA-256"):
        read(cached(asked, tmp_path / "b"), 200_000, 300_000, url)


def test_offline_files_and_commits_are_those_of_the_cache(tmp_path: Path) -> None:
    asked = FakeRegistry(prefix="hf://org")
    online = cached(asked, tmp_path)
    pinned = online.pin("mine", "hf://org/name@main")
    assert pinned == f"hf://org/name@{COMMIT}"
    read(online, url=f"{pinned}/adapter_model.safetensors")
    asked.commit, num_asked = "d" * 40, len(asked.asked)
    offline = cached(asked, tmp_path, is_offline=True)
    assert offline.pin("mine", "hf://org/name@main") == pinned
    assert read(offline, url=f"{pinned}/adapter_model.safetensors") == CONTENT
    assert (len(asked.asked), asked.num_opened) == (num_asked, 1)
    for ask in (
        lambda: offline.pin("mine", "hf://org/other"),
        lambda: offline.open("mine", "hf://org/other/adapter_config.json", 1 << 20),
    ):
        with pytest.raises(AdapterUnavailable, match="--lora-offline"):
            ask()


def test_what_a_lost_machine_or_a_full_disk_leaves_costs_a_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = FakeRegistry()
    read(cached(asked, tmp_path), 0, 200_000)
    monkeypatch.setattr(registry_cache, "boot_id", lambda: "another")
    assert read(cached(asked, tmp_path)) == CONTENT
    monkeypatch.setattr(registry_cache, "boot_id", lambda: "a third")
    assert read(cached(asked, tmp_path)) == CONTENT and len(asked.asked) == 2, "a whole file is on the disk"
    for path in tmp_path.glob("[0-9a-f]*"):
        path.write_bytes(b"\xff" * 1000)
    assert read(cached(asked, tmp_path)) == CONTENT

    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert read(cached(asked, tmp_path / "full")) == CONTENT
    with pytest.raises(AdapterUnavailable, match="cannot be compared"):
        read(cached(asked, tmp_path / "full"), url=f"{URL}#sha256={SHA256}")


def test_a_file_that_lost_its_end_is_fetched_again(tmp_path: Path) -> None:
    """A range that is written behind the end would leave zeros before it."""
    asked = FakeRegistry()
    read(cached(asked, tmp_path))
    (path,) = tmp_path.glob("[0-9a-f]*")
    os.truncate(path, HEADER_BYTES + 100_000)
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + 200_000)
        file.write(CONTENT[200_000:250_000])
    assert read(cached(asked, tmp_path), 90_000, 210_000) == CONTENT[90_000:210_000]


@pytest.mark.parametrize("etag", ["", 'W/"a"'])
def test_a_file_written_twice_in_a_second_is_the_later_one(tmp_path: Path, etag: str) -> None:
    """Without an ETag that changes with every byte, both have the same identity."""
    asked = FakeRegistry(etag=etag)
    asked.modified = formatdate(usegmt=True)
    assert read(cached(asked, tmp_path)) == CONTENT
    asked.content = CONTENT[::-1]
    assert read(cached(asked, tmp_path)) == CONTENT[::-1]
    asked.modified = formatdate(time.time() - 60, usegmt=True)
    assert read(cached(asked, tmp_path)) == read(cached(asked, tmp_path)) == CONTENT[::-1]
    assert len(asked.asked) == 3, "once its time is past, it is kept"


def test_without_room_no_file_is_left(tmp_path: Path) -> None:
    for number in range(5):
        url = f"{HOST}/{number}/adapter_model.safetensors"
        assert read(cached(FakeRegistry(), tmp_path, 100_000), url=url) == CONTENT
    assert list(tmp_path.glob("[0-9a-f]*")) == []


def test_two_that_read_a_file_fetch_it_once(tmp_path: Path) -> None:
    asked = FakeRegistry()
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(read(cached(asked, tmp_path)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [CONTENT] * 4 and asked.asked == [(FIRST_BYTES, 300_000)]


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: a disk takes seconds to make and remove ten thousand files."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else tmp_path) as folder:
        yield Path(folder)


def test_ten_thousand_files_stay_within_the_limit(memory: Path) -> None:
    size = 100
    folder = DiskFolder(memory, limit := 200 * (HEADER_BYTES + size))

    def used() -> int:
        return sum(path.stat().st_size for path in memory.glob("[0-9a-f]*"))

    for number in range(10_000):
        with folder.locked(f"{HOST}/{number}", RemoteHead(size, '"1"', "")) as file:
            assert file is not None
        if number % 20 == 0:  # read again and again
            with folder.locked(f"{HOST}/0") as file:
                assert file is not None
        if number % 500 == 499:
            assert limit // 2 < used() <= limit
    with folder.locked(f"{HOST}/1") as file, folder.locked(f"{HOST}/9999") as last:
        assert file is None and last is not None
    with folder.locked(f"{HOST}/large", RemoteHead(limit, '"1"', "")) as file:
        assert file is None, "no file takes the place of all"
    assert used() > limit // 2
    (memory / ".used").write_bytes(b"nonsense")
    with folder.locked(f"{HOST}/next", RemoteHead(size, '"1"', "")) as file:
        assert file is not None and used() <= limit


def test_files_that_others_take_the_place_of_stay_within_the_limit(memory: Path) -> None:
    size, folder = 100_000, DiskFolder(memory, 10 * 100_000)

    def keep(url: str, num: int, etag: str) -> bool:
        with folder.locked(url, RemoteHead(num * size - HEADER_BYTES, etag, "")) as file:
            return file is not None

    for url, num, etag in (("a", 4, "1"), ("b", 4, "1"), ("c", 1, "1"), ("a", 6, "2"), ("d", 3, "1"), ("e", 9, "1")):
        assert keep(url, num, etag)
        num_bytes = sum(file.stat().st_size for file in memory.iterdir() if file.name != ".used")
        assert int((memory / ".used").read_text()) == num_bytes <= 10 * size
    assert not keep("e", 11, "2")
    assert int((memory / ".used").read_text()) == 9 * size
