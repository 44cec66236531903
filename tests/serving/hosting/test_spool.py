"""The folder of published adapters: bounded, cleaned up, and private."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from manylora.core.errors import AdapterError, AdapterForbidden, AdapterNotFound, CapacityError
from manylora.serving.hosting.spool import PREFIX, SHARED_MEMORY, AdapterSpool, open_shared

KILLED = """
import os, sys
from manylora.serving.hosting.spool import AdapterSpool
spool = AdapterSpool(100, sys.argv[1])
with spool.arriving("x") as one:
    one.write(b"123")
    print(spool.path, flush=True)
    os.kill(os.getpid(), 9)
"""


def test_a_folder_is_kept_or_gone_and_its_bytes_are_counted(tmp_path: Path) -> None:
    spool = AdapterSpool(10, str(tmp_path))
    assert os.stat(spool.path).st_mode & 0o777 == 0o700
    with spool.arriving("x") as one:
        one.write(b"1234")
        path = one.complete(b"{}")
        spool.keep(one)
    assert sorted(os.listdir(path)) == ["adapter_config.json", "adapter_model.safetensors"]
    assert spool.num_bytes == 6
    with pytest.raises(CapacityError, match="--publish-memory"), spool.arriving("y") as two:
        two.write(b"1234")
        two.write(b"1")
    assert (spool.num_bytes, os.listdir(spool.path)) == (6, [os.path.basename(path)])
    spool.remove(str(tmp_path))  # another's folder
    spool.remove(path)
    assert (spool.num_bytes, os.listdir(spool.path)) == (0, [])
    spool.close()
    assert os.listdir(tmp_path) == []


def test_a_file_that_is_cut_while_it_is_copied_is_refused(tmp_path: Path) -> None:
    spool = AdapterSpool(1000, str(tmp_path))
    source = tmp_path / "source"
    source.write_bytes(b"12345")
    with open(source, "rb") as opened, pytest.raises(AdapterError, match="ends at byte 5"), spool.arriving("x") as one:
        one.copy(opened.fileno(), 6)
    assert spool.num_bytes == 0
    spool.close()


def test_the_folder_of_a_server_that_was_killed_is_removed_and_no_other(tmp_path: Path) -> None:
    alive = AdapterSpool(100, str(tmp_path))
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    left = done.stdout.strip()
    assert os.path.isdir(left)
    other = AdapterSpool(100, str(tmp_path))
    assert not os.path.exists(left)
    assert os.path.isdir(alive.path) and os.path.basename(alive.path).startswith(PREFIX)
    for spool in (alive, other):
        spool.close()


@pytest.mark.skipif(not os.access(SHARED_MEMORY, os.W_OK), reason="there is no shared memory")
def test_only_regular_files_with_the_prefix_are_opened() -> None:
    prefix = f"manylora-test-{os.getpid()}-"
    file = Path(SHARED_MEMORY) / f"{prefix}a"
    try:
        with pytest.raises(AdapterNotFound):
            open_shared("x", file.name, prefix, 10)
        file.write_bytes(b"123")
        descriptor, size = open_shared("x", file.name, prefix, 10)
        os.close(descriptor)
        assert size == 3
        with pytest.raises(AdapterError, match="at most 2"):
            open_shared("x", file.name, prefix, 2)
    finally:
        file.unlink(missing_ok=True)
    for name in ("other", f"{prefix}/../a", f"{prefix}a/b", "", f"{prefix}\0", f"{prefix}{'a' * 300}"):
        with pytest.raises(AdapterForbidden):
            open_shared("x", name, prefix, 10)
