"""Memory that a function was forked with is the zygote's, whoever reads it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from manylora.functions.node.readings import memory_of


@pytest.mark.skipif(sys.platform != "linux", reason="the readings are Linux's")
def test_a_reader_that_is_not_root_leaves_out_what_the_zygote_has(monkeypatch: pytest.MonkeyPatch) -> None:
    read_text = Path.read_text

    def guarded(path: Path) -> str:
        if path.name == "smaps_rollup":
            raise PermissionError(13, "it hides its memory")
        if path.name == "statm":
            return "9000 5000 1000 0 0 0 0"
        return read_text(path)

    monkeypatch.setattr(Path, "read_text", guarded)
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"RssFile:\t2000 kB\nRssShmem:\t2000 kB\n")
    page = os.sysconf("SC_PAGE_SIZE")
    alone = memory_of(1, base_bytes=2000 << 10)
    assert alone is not None and alone.own == alone.anonymous == 4000 * page
    forked = memory_of(1, 5, 3000 * page, 2000 << 10)
    assert forked is not None
    assert (forked.own, forked.pss, forked.anonymous) == (1000 * page, 1000 * page, 4000 * page)
    grown = memory_of(1, 5, 9000 * page, 2000 << 10)  # the zygote's were read later
    assert grown is not None and grown.own == 1


SHARER = """
import mmap, os, sys
base = os.memfd_create("base")
os.ftruncate(base, 32 << 20)
mapped = mmap.mmap(base, 32 << 20, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
own = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
os.pwrite(base, bytes(32 << 20), 0)
sum(mapped[at] for at in range(0, 32 << 20, 4096))
own.write(bytes(64 << 20) if sys.argv[1] == "more" else b"")
open("/proc/self/comm", "wb").write(b"\\xff\\x85\\rRssShmem:0")
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the readings are Linux's")
@pytest.mark.parametrize("hides_memory", [False, True])
def test_shared_memory_is_a_functions_own_but_for_the_base(hides_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    read_text = Path.read_text

    def guarded(path: Path) -> str:
        if path.name == "smaps_rollup" and hides_memory:
            raise PermissionError(13, "it hides its memory")
        return read_text(path)

    monkeypatch.setattr(Path, "read_text", guarded)
    own: dict[str, int] = {}
    for case in ("less", "more"):
        with subprocess.Popen(
            [sys.executable, "-c", SHARER, case], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            reading = memory_of(process.pid, base_bytes=32 << 20)
            assert reading is not None
            own[case] = reading.own
            process.communicate()
    assert own["less"] < 32 << 20  # the base is not its own
    assert own["more"] - own["less"] > 56 << 20
