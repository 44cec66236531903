"""Bounds on a reader process: its rights, memory and time, and the files that a hostile folder makes it open."""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import pytest
from bad_adapters import adapter_config, tiny_base, write_good_adapter

from manylora.core.adapters.folder import real_roots
from manylora.core.adapters.read import ReadRules, read_adapter
from manylora.core.adapters.shape import BaseShape
from manylora.core.errors import AdapterError, AdapterForbidden, CapacityError
from manylora.execution.storage import reader_process
from manylora.execution.storage.reader_messages import (
    MAX_ANSWER_BYTES,
    AdapterRefused,
    Packed,
    ReaderSettings,
    receive,
    send,
)
from manylora.execution.storage.reader_process import ReaderProcess

BASE = tiny_base()
MIB = 1024 * 1024
SETTINGS = ReaderSettings(base=BASE, max_bytes=1 << 34, max_pages=64, memory_bytes=256 * MIB)
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's measures are Linux's")


@pytest.fixture
def helper(tmp_path: Path) -> Iterator[ReaderProcess]:
    """A reader that may read below ``tmp_path/root``."""
    root = tmp_path / "root"
    root.mkdir()
    helper = ReaderProcess()
    helper.configure(replace(SETTINGS, roots=(os.path.realpath(root),), limit_s=30.0))
    yield helper
    helper.close()


def of_process(helper: ReaderProcess, file: str) -> dict[str, str]:
    assert helper._process is not None
    lines = Path(f"/proc/{helper._process.pid}/{file}").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@LINUX
def test_a_reader_has_given_up_its_rights(helper: ReaderProcess, tmp_path: Path) -> None:
    helper.read("mine", str(write_good_adapter(tmp_path / "root" / "a", BASE)))
    status = of_process(helper, "status")
    assert status["NoNewPrivs"] == "1" and status["Seccomp"] == "2"
    assert int(status["CapEff"], 16) & ~(1 << 2) == 0 and int(status["CapPrm"], 16) & ~(1 << 2) == 0
    limits = "".join(of_process(helper, "limits"))
    assert "Max address space         unlimited" not in limits and "Max file size             unlimited" not in limits
    assert helper._process is not None
    if os.geteuid() == 0:  # another user may not look
        assert os.readlink(f"/proc/{helper._process.pid}/ns/net") != os.readlink("/proc/self/ns/net")


def write_bin(folder: Path, program: bytes, num_entries: int = 0) -> Path:
    """Write an adapter whose ``.bin`` has a pickle of one's own."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config()))
    with zipfile.ZipFile(folder / "adapter_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", program)
        for number in range(num_entries):
            archive.writestr(f"archive/{number:0200}", b"")
    return folder


class Made:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def amplified() -> bytes:
    """A thousand calls on one long list: each would copy it."""
    pairs = b"]q\x00(" + b"".join(b"M%sK\x02\x86" % struct.pack("<H", key) for key in range(20_000)) + b"e\x85q\x01"
    call = b"ccollections\nOrderedDict\nq\x02h\x01R"
    return b"\x80\x02" + pairs + call * 1000 + b"}."


PICKLES = {
    "bytearray": (pickle.dumps({"a": Made(bytearray, 1 << 32)}, 2), "more than tensors"),
    "amplified": (amplified(), "more than tensors"),
    "opcodes": (b"\x80\x02(" + b"]" * 1_000_000 + b"l.", "damaged|more than tensors"),
    "long": (b"\x80\x02" + b"}0" * (5 * MIB) + b"}.", "damaged"),
}


@LINUX
@pytest.mark.parametrize("kind", PICKLES)
def test_a_hostile_pickle_costs_nothing(kind: str, helper: ReaderProcess, tmp_path: Path) -> None:
    program, words = PICKLES[kind]
    with pytest.raises(AdapterError, match=words):
        helper.read("mine", str(write_bin(tmp_path / "root" / "a", program)))
    assert int(of_process(helper, "status")["VmHWM"].split()[0]) < 200 * 1024, "and the process lives"


def test_a_long_directory_of_an_archive_is_not_read(helper: ReaderProcess, tmp_path: Path) -> None:
    folder = write_bin(tmp_path / "root" / "a", b"\x80\x02}.", num_entries=10_000)
    with pytest.raises(AdapterError, match="directory has more than"):
        helper.read("mine", str(folder))


def write_sparse(folder: Path, base: BaseShape, rank: int) -> Path:
    """Write an adapter of zeros that takes no disk, with the right shapes."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config(rank, ["q_proj"])))
    header: dict[str, Any] = {}
    offset = 0
    for module in (one for one in base.modules if one.name.endswith("q_proj")):
        for side, shape in (("A", [rank, module.in_features]), ("B", [module.out_features, rank])):
            size = 4 * shape[0] * shape[1]
            key = f"base_model.model.{module.name}.lora_{side}.weight"
            header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
            offset += size
    text = json.dumps(header).encode()
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    return folder


@LINUX
def test_a_sparse_file_is_refused_by_its_header(helper: ReaderProcess, tmp_path: Path) -> None:
    folder = write_sparse(tmp_path / "root" / "a", BASE, rank=65_536)
    with pytest.raises(AdapterError, match="one adapter may take 64"):
        helper.read("mine", str(folder))
    (refused,) = helper.check([("mine", str(folder))])
    assert isinstance(refused, AdapterError) and "one adapter may take 64" in refused.reason
    with (folder / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(1 << 31)
    with pytest.raises(AdapterError, match="damaged"):
        helper.read("mine", str(folder))
    assert int(of_process(helper, "status")["VmHWM"].split()[0]) < 200 * 1024


@LINUX
def test_an_adapter_that_needs_too_much_memory_is_refused_alone(tmp_path: Path) -> None:
    base = tiny_base(num_layers=16)
    helper = ReaderProcess()
    helper.configure(replace(SETTINGS, base=base, max_pages=None))
    try:
        with pytest.raises(AdapterError, match="needs more memory than a reader") as caught:
            helper.read("large", str(write_sparse(tmp_path / "large", base, rank=65_536)))
        assert caught.value.adapter == "large"
        helper.read("good", str(write_good_adapter(tmp_path / "good", base)))
    finally:
        helper.close()


@pytest.mark.parametrize("length", [4, 1 << 20])
def test_a_reader_that_takes_too_long_is_ended(tmp_path: Path, length: int) -> None:
    """A long question, as that for the headers of many adapters, is more than a pipe holds."""
    good = str(write_good_adapter(tmp_path / "good", BASE))
    helper = ReaderProcess()
    helper.configure(SETTINGS)
    try:
        helper.read("good", good)
        process = helper._process
        helper._settings = replace(SETTINGS, limit_s=0.5)
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(AdapterError, match=r"took longer than 0\.5 s"):
            helper.read("s" * length, good)
        assert process.returncode == -signal.SIGKILL
    finally:
        helper.close()


def test_lack_of_processes_is_not_the_adapters_fault(
    helper: ReaderProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = str(write_good_adapter(tmp_path / "root" / "a", BASE))
    monkeypatch.setattr(reader_process, "RETRIES_S", (0.0, 0.0))
    start, failures = subprocess.Popen, 2

    def fail(*arguments: Any, **options: Any) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise OSError(24, "Too many open files")
        return start(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", fail)
    open_files = len(os.listdir("/dev/fd"))
    helper.read("mine", folder)
    assert caplog.text.count("reader_process_not_started") == 2
    helper.close()
    failures = 3
    with pytest.raises(CapacityError, match="Too many open files"):
        helper.check([("mine", folder)])
    assert len(os.listdir("/dev/fd")) == open_files


def test_links_out_of_the_roots_are_not_followed(helper: ReaderProcess, tmp_path: Path) -> None:
    root = tmp_path / "root"
    outside = write_good_adapter(tmp_path / "outside", BASE)
    good = write_good_adapter(root / "good", BASE)
    version = helper.read("good", str(good)).version
    (root / "folder").symlink_to(outside)
    (root / "file").mkdir()
    (root / "file" / "adapter_config.json").symlink_to(good / "adapter_config.json")
    (root / "file" / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    (root / "inside").symlink_to(good)
    for name in ("folder", "file"):
        with pytest.raises(AdapterForbidden, match="leads outside"):
            helper.read(name, str(root / name))
    found = helper.check([(name, str(root / name)) for name in ("folder", "file", "inside")])
    assert [isinstance(one, AdapterForbidden) for one in found] == [True, True, False]

    good.rename(root / "moved")  # after it was loaded, by a tenant
    good.symlink_to(outside)
    with pytest.raises(AdapterForbidden, match="leads outside"):
        helper.read_layers(version, lambda packed: None, lambda num: None)


def test_a_folder_of_adapters_may_be_made_anew(helper: ReaderProcess, tmp_path: Path) -> None:
    root = tmp_path / "root"
    version = helper.read("mine", str(write_good_adapter(root / "a", BASE))).version
    root.rename(tmp_path / "before")
    assert isinstance(helper.check([("mine", str(root / "a"))])[0], AdapterError)
    write_good_adapter(root / "a", BASE)
    assert helper.read("mine", str(root / "a")).version == version


@LINUX
def test_lack_of_descriptors_costs_one_load(helper: ReaderProcess, tmp_path: Path) -> None:
    folder = str(write_good_adapter(tmp_path / "root" / "a", BASE))
    version = helper.read("mine", folder).version
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for spare in (0, 1):
        held: list[int] = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
        try:
            with suppress(OSError):
                while True:
                    held.append(os.open("/dev/null", os.O_RDONLY))
            for _ in range(spare):
                os.close(held.pop())
            with pytest.raises(AdapterError, match="could not be taken over"):
                helper.read("mine", folder)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in held:
                os.close(fd)
        assert helper.read("mine", folder).version == version


def test_an_adapter_that_the_operator_names_may_consist_of_links(tmp_path: Path) -> None:
    blobs = write_good_adapter(tmp_path / "cache" / "blobs", BASE)
    snapshot = tmp_path / "cache" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (snapshot / file).symlink_to(blobs / file)
    helper = ReaderProcess()
    helper.configure(replace(SETTINGS, roots=real_roots([], [str(snapshot)])))
    try:
        assert helper.read("mine", str(snapshot)).version.source == str(snapshot)
    finally:
        helper.close()


class Harmful:
    def __reduce__(self) -> Any:
        return pytest.fail, ("it was executed",)


def test_answers_are_not_executed() -> None:
    here, there = Pipe()
    for answer in (pickle.dumps(Harmful()), b"\xc1", b"\x91\xa6Nobody"):
        there.send_bytes(answer)
        with pytest.raises(OSError, match="malformed"):
            receive(here, 5)
    assert type(AdapterRefused("ConfigError", "a", "b").to_error()) is AdapterError
    assert type(AdapterRefused("__builtins__", "a", "b").to_error()) is AdapterError
    assert isinstance(here, Connection)


@pytest.mark.parametrize("sent", [b"\0\0", b"\0\0\0\x08\x91"])
def test_an_answer_has_to_be_whole_in_time(sent: bytes) -> None:
    here, there = Pipe()
    os.write(there.fileno(), sent)
    with pytest.raises(TimeoutError):
        receive(here, 0.05)
    os.write(there.fileno(), sent)
    there.close()
    with pytest.raises(ConnectionResetError):
        receive(here, 5)


def test_an_answer_may_not_be_longer_than_was_agreed() -> None:
    here, there = Pipe()
    for size in (MAX_ANSWER_BYTES + 1, -1):
        os.write(there.fileno(), struct.pack("!i", size))
        with pytest.raises(OSError, match=f"more than {MAX_ANSWER_BYTES} bytes"):
            receive(here, 5)


@pytest.mark.parametrize(("dies", "reason"), [(False, "longer than 0.05 s"), (True, "died while it read this one")])
def test_a_reader_that_answers_without_an_image_is_given_up(
    dies: bool, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been taken over by a file, or end between the two."""
    folder = write_good_adapter(tmp_path / "a", BASE)
    packed = read_adapter("mine", folder, ReadRules(base=BASE, max_bytes=1 << 26))
    here, there = Pipe()
    send(there, Packed.of(packed.version, packed.layout))
    helper = ReaderProcess()
    helper.configure(replace(SETTINGS, limit_s=0.05))
    monkeypatch.setattr(helper, "_running", lambda: here)
    if dies:
        monkeypatch.setattr(reader_process, "ask", lambda pipe, question, limit_s: there.close())
    with pytest.raises(AdapterError, match=reason):
        helper.read("mine", str(folder))


@LINUX
def test_the_memory_of_an_image_cannot_be_taken_away() -> None:
    file = os.memfd_create("image", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 8192)
    with pytest.raises(OSError, match="8192 bytes, expected 4096"):
        reader_process._map(os.dup(file), 4096)
    reader_process._map(os.dup(file), 8192)
    with pytest.raises(PermissionError):
        os.ftruncate(file, 0)
    os.close(file)
