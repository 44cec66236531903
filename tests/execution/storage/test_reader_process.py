"""Reading in a process of its own: the same adapter, the same refusals, and no harm when the process dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Pipe
from multiprocessing.reduction import recv_handle
from pathlib import Path

import numpy as np
import pytest
import torch
from bad_adapters import tiny_base, write_good_adapter
from safetensors.numpy import load_file

from manylora.core.adapters.hash_cache import HashCache
from manylora.core.adapters.read import ReadRules, read_adapter
from manylora.core.adapters.sources import host_of
from manylora.core.errors import AdapterError, AdapterNotFound
from manylora.core.types import AdapterVersion
from manylora.execution.storage import reader_messages, reader_service
from manylora.execution.storage.adapter_files import InlineReader
from manylora.execution.storage.host_tier import HostTier
from manylora.execution.storage.reader import NUM_PER_HOST, NUM_READERS, NUM_REMOTE, HostReader, ReadQueue, RemotePlaces
from manylora.execution.storage.reader_messages import AdapterRefused, Again, Packed, Pages, ReaderSettings
from manylora.execution.storage.reader_process import ReaderProcess

BASE = tiny_base()
LIMIT = 1 << 26
SETTINGS = ReaderSettings(base=BASE, max_bytes=LIMIT, dtype="auto")


@pytest.fixture(scope="module")
def helper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReaderProcess]:
    """A helper that starts in a folder where a file has the name of a module."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "pickle.py").write_text("raise ImportError('the wrong pickle')")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        helper = ReaderProcess()
        helper.start()
        helper.configure(SETTINGS)
        yield helper
    helper.close()


def test_it_packs_what_we_would_pack(helper: ReaderProcess, tmp_path: Path) -> None:
    for rank in (3, 3, 8):
        folder = write_good_adapter(tmp_path / f"a{rank}", BASE, rank=rank, seed=rank)
        found = helper.read("mine", str(folder))
        expected = read_adapter("mine", folder, ReadRules(base=BASE, max_bytes=LIMIT, dtype="auto"))
        assert found.version == expected.version and found.layout == expected.layout
        np.testing.assert_array_equal(found.image, expected.image)


def test_it_refuses_by_the_same_name(helper: ReaderProcess, tmp_path: Path) -> None:
    with pytest.raises(AdapterNotFound, match="no directory"):
        helper.read("mine", str(tmp_path / "nowhere"))
    folder = write_good_adapter(tmp_path / "a", BASE)
    (folder / "adapter_model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(AdapterError, match="damaged") as caught:
        helper.read("mine", str(folder))
    assert caught.value.adapter == "mine"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a priority is the whole process's")
def test_only_urgent_reads_have_the_priority_of_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A step that waits for layers would wait long for a read of lower priority."""
    found: list[int] = []
    served = reader_service._Answers.read_layers

    def note_and_read(self: reader_service._Answers, version: AdapterVersion) -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        served(self, version)

    monkeypatch.setattr(reader_service._Answers, "read_layers", note_and_read)
    here, there = Pipe()
    usual = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    version = read_adapter(
        "mine", write_good_adapter(tmp_path / "a", BASE), ReadRules(base=BASE, max_bytes=LIMIT)
    ).version
    nowhere = replace(version, source=str(tmp_path / "nowhere"))
    thread = threading.Thread(target=reader_service.serve, args=(there, SETTINGS), daemon=True)
    thread.start()
    for is_urgent in (True, False, True):
        here.send(Again(nowhere, is_urgent))
        assert isinstance(reader_messages.receive(here, 60), AdapterRefused)
    here.close()
    thread.join()
    assert found == [usual, min(19, usual + reader_service.NICENESS), usual]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a descriptor is sent to a process by its number")
@pytest.mark.parametrize("scratch_bytes", [0, reader_service.SCRATCH_BYTES])
def test_images_are_the_same_wherever_they_are_packed(
    scratch_bytes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What an adapter before it left in memory that is used again shows nowhere, not in the padding either."""
    monkeypatch.setattr(reader_service, "SCRATCH_BYTES", scratch_bytes)
    here, there = Pipe()
    thread = threading.Thread(target=reader_service.serve, args=(there, SETTINGS), daemon=True)
    thread.start()
    for rank in (16, 3, 8):
        folder = write_good_adapter(tmp_path / f"a{rank}", BASE, rank=rank, seed=rank)
        expected = read_adapter("mine", folder, ReadRules(base=BASE, max_bytes=LIMIT, dtype="auto"))
        here.send(Again(expected.version, True))
        assert isinstance(reader_messages.receive(here, 60), Packed)
        descriptor = recv_handle(here)
        num_full = 0
        while num_full < expected.version.num_pages:
            pages = reader_messages.receive(here, 60)
            assert isinstance(pages, Pages) and pages.num_full >= num_full
            num_full = pages.num_full
            page_bytes = expected.image[0].nbytes
            content = os.pread(descriptor, num_full * page_bytes, 0)
            assert content == expected.image[:num_full].tobytes(), "full pages have all of their content"
        os.close(descriptor)
    here.close()
    thread.join()


def test_slow_registries_leave_a_reader_to_adapters_on_disk() -> None:
    """Both halves: the queue of the executor's reads, and the readers, which the API's reads share."""
    release, log = threading.Event(), []

    class Reader(InlineReader):
        def check(self, adapters: Sequence[tuple[str, str]]) -> list[AdapterVersion | AdapterError]:
            name, path = adapters[0]
            if path.startswith("https://"):
                log.append(f"{name} begins")
                assert release.wait(60)
            log.append(name)
            return []

    readers = HostReader(SETTINGS, HostTier(is_pinned=False), [Reader() for _ in range(NUM_READERS)])
    queue = ReadQueue(NUM_READERS, RemotePlaces(NUM_REMOTE, NUM_PER_HOST))

    def submit(name: str, path: str, *, is_urgent: bool = False) -> Future[object]:
        work = partial(readers.check, [(name, path)])
        return queue.submit(work, is_urgent=is_urgent, host=host_of(path))

    with ThreadPoolExecutor(1) as api:
        slow = [
            submit(f"slow {number}", f"https://host-{number // NUM_PER_HOST}/b") for number in range(NUM_REMOTE + 1)
        ]
        asked = api.submit(readers.check, [("asked of the API", "https://a/b")])
        submit("on disk", "/a/b").result(60)
        assert f"slow {NUM_REMOTE} begins" not in log and not any(one.done() for one in (*slow, asked))
        # All threads are taken: the urgent read is the first of those that wait.
        gate = threading.Event()
        waiting = [queue.submit(partial(gate.wait, 60), is_urgent=False, host=None)]
        waiting += [submit("usual", "/a/b"), submit("urgent", "/a/b", is_urgent=True)]
        gate.set()
        for one in waiting:
            one.result(60)
        assert log.index("urgent") < log.index("usual")
        release.set()
        for one in (*slow, asked):
            one.result(60)
    queue.shutdown(wait=True)
    readers.close()


@pytest.fixture
def reader() -> Iterator[HostReader]:
    reader = HostReader(SETTINGS, HostTier(is_pinned=False))
    yield reader
    reader.close()
    assert all(process._process is None for process in reader._readers)


def test_a_process_that_died_in_between_is_replaced(
    reader: HostReader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_good_adapter(tmp_path / "a", BASE)
    version = reader.read("mine", str(folder))
    for is_killed in (False, True, False):
        if is_killed:
            process = reader._readers[0]._process
            assert process is not None
            process.kill()
            process.wait()
        image = reader.read_again(version).image
        assert image.shape[0] == version.num_pages
        assert ("reader_process_restarted" in caplog.text) == is_killed
        caplog.clear()
    assert reader._readers[1]._process is None, "one adapter at a time takes one process"


def test_a_process_that_dies_over_an_adapter_refuses_it_alone(reader: HostReader, tmp_path: Path) -> None:
    folder = write_good_adapter(tmp_path / "a", BASE)
    version = reader.read("mine", str(folder))
    process = reader._readers[0]._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as thread:
        registration = thread.submit(reader.read, "yours", str(folder))
        while len(reader._free) == len(reader._readers):
            time.sleep(0.001)
        process.kill()
        with pytest.raises(AdapterError, match="died while it read this one") as caught:
            registration.result()
    assert caught.value.adapter == "yours"
    assert reader.read("yours", str(folder)) == version


def test_two_adapters_are_read_at_once_and_no_file_stays_open(reader: HostReader, tmp_path: Path) -> None:
    folders = [write_good_adapter(tmp_path / f"a{seed}", BASE, seed=seed) for seed in range(12)]
    with ThreadPoolExecutor(NUM_READERS + 1) as threads:
        versions = list(threads.map(lambda folder: reader.read("mine", str(folder)), folders))
        open_files = len(os.listdir("/dev/fd"))
        more = [write_good_adapter(tmp_path / f"b{seed}", BASE, seed=100 + seed) for seed in range(12)]
        versions += threads.map(lambda folder: reader.read("mine", str(folder)), more)
    assert len({version.key for version in versions}) == 24
    assert all(process._process is not None for process in reader._readers)
    assert len(os.listdir("/dev/fd")) <= open_files


def test_a_pickled_weight_file_is_read_there_too(reader: HostReader, tmp_path: Path) -> None:
    folder = write_good_adapter(tmp_path / "a", BASE)
    version = reader.read("mine", str(folder))
    tensors = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    torch.save({key: torch.from_numpy(value) for key, value in tensors.items()}, folder / "adapter_model.bin")
    assert reader.read("mine", str(folder)).key == version.key


def test_the_process_starts_without_torch() -> None:
    code = "import sys, manylora.execution.storage.reader_service as p; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


def test_other_weights_in_its_place_are_not_taken(tmp_path: Path) -> None:
    folder = write_good_adapter(tmp_path / "a", BASE, seed=0)
    reader = HostReader(SETTINGS, HostTier(is_pinned=False))
    try:
        version = reader.read("mine", str(folder))
        write_good_adapter(folder, BASE, seed=1)
        with pytest.raises(AdapterError, match="changed since it was registered"):
            reader.read_again(version)
    finally:
        reader.close()


def test_headers_of_many_are_checked_in_one_message(reader: HostReader, tmp_path: Path) -> None:
    folders = [write_good_adapter(tmp_path / f"a{seed}", BASE, rank=4 + seed % 2, seed=seed) for seed in range(6)]
    (folders[2] / "adapter_model.safetensors").write_bytes(b"nonsense")
    found = reader.check([(folder.name, str(folder)) for folder in [*folders, tmp_path / "nowhere"]])
    assert isinstance(found[2], AdapterError) and found[2].adapter == "a2"
    assert isinstance(found[6], AdapterNotFound)
    for folder, version in zip(folders, found, strict=False):
        if not isinstance(version, AdapterError):
            assert version.source == str(folder) and version.rank == 4 + folders.index(folder) % 2
            kept = reader.read_again(version)
            assert kept is reader.host.get(version.key), "under the key that it was registered with"
            expected = read_adapter("x", folder, ReadRules(base=BASE, max_bytes=LIMIT, dtype=version.dtype))
            np.testing.assert_array_equal(kept.image.numpy(), expected.image)


def test_files_that_change_before_their_first_read_are_not_taken(reader: HostReader, tmp_path: Path) -> None:
    folder = write_good_adapter(tmp_path / "a", BASE)
    (version,) = reader.check([("a", str(folder))])
    assert not isinstance(version, AdapterError)
    write_good_adapter(folder, BASE, seed=1)
    with pytest.raises(AdapterError, match="changed since it was registered"):
        reader.read_again(version)
    (version,) = reader.check([("a", str(folder))])
    assert not isinstance(version, AdapterError)
    assert version.is_whole
    version = replace(version, layer_digests=reader.read_again(version).first_digests, is_whole=False)
    os.utime(folder / "adapter_model.safetensors")
    reader.host.drop(version.key)
    reader.read_again(version)  # its content is known now, and is the same
    write_good_adapter(folder, BASE, seed=2)
    reader.host.drop(version.key)
    with pytest.raises(AdapterError, match="changed since it was registered"):
        reader.read_again(version)


def test_the_next_engine_knows_the_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [write_good_adapter(tmp_path / name, BASE, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    asked = [(folder.name, str(folder)) for folder in folders]
    # The reading half of a reader process, in this one, with a clock by which the files are old.
    monkeypatch.setattr(reader_service.time, "time", lambda: 2.0**33)
    here, there = Pipe()
    with ThreadPoolExecutor(1) as thread, here:
        serving = thread.submit(reader_service.serve, there, SETTINGS, HashCache(tmp_path / "hashes"))
        contents = []
        for name, path in asked:
            here.send((name, path))
            answer = reader_messages.receive(here, 60)
            assert isinstance(answer, Packed)
            contents.append(answer.version.key)
            os.close(recv_handle(here))
        here.close()
        serving.result()
    assert contents[0] == contents[1] != contents[2]
    for hashes, is_known in ((None, False), (tmp_path / "hashes", True)):
        reader = HostReader(replace(SETTINGS, hashes=hashes and str(hashes)), HostTier(is_pinned=False))
        try:
            keys = [version.key for version in reader.check(asked) if not isinstance(version, AdapterError)]
        finally:
            reader.close()
        assert (keys == contents) == is_known and len(set(keys)) == (2 if is_known else 3)
