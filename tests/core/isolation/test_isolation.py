"""A confined process can read its folder, compute and start threads, and nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from manylora.core.errors import ConfigError
from manylora.core.isolation.confine import Confinement, confine
from manylora.core.isolation.landlock import landlock_version

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's measures are Linux's")

SCRIPT = Path(__file__).parents[2] / "support" / "isolation_attacks.py"


def _attack(tmp_path: Path, *, as_root: bool) -> dict[str, dict[str, object]]:
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir(mode=0o755)
    other.mkdir(mode=0o755)
    (own / "adapter_config.json").write_text("mine")
    (other / "adapter_model.safetensors").write_text("theirs")
    (own / "link").symlink_to(other / "adapter_model.safetensors")
    for folder in (tmp_path, *tmp_path.parents):  # pytest's folders are closed to other users
        if as_root and folder.stat().st_uid == 0 and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    import fcntl

    sealed = os.memfd_create("backbone", os.MFD_ALLOW_SEALING)
    os.pwrite(sealed, b"weights", 0)
    os.ftruncate(sealed, 4096)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, seals)
    told = {
        "readable": [str(own)],
        "uid": 65534 if as_root else None,
        "parent": os.getpid(),
        "sealed": sealed,
        "secret": str(other / "adapter_model.safetensors"),
    }
    log = tmp_path / "log"
    try:
        with log.open("wb") as errors:
            done = subprocess.run(
                [sys.executable, str(SCRIPT), json.dumps(told)],
                pass_fds=[sealed],
                stdout=subprocess.PIPE,
                stderr=errors,
                timeout=120,
            )
        assert os.pread(sealed, 7, 0) == b"weights"
    finally:
        os.close(sealed)
    assert done.returncode == 0, log.read_text()
    report: dict[str, dict[str, object]] = json.loads(done.stdout)
    return report


@pytest.mark.slow
@pytest.mark.skipif(landlock_version() < 4, reason="needs a kernel with Landlock 4")
@pytest.mark.parametrize("as_root", [True, False])
def test_a_compromised_function_gets_nowhere(tmp_path: Path, as_root: bool) -> None:
    if as_root and os.geteuid() != 0:
        pytest.skip("needs root")
    report = _attack(tmp_path, as_root=as_root)
    reached = {name: result for name, result in report["attempts"].items() if not str(result).startswith("refused")}
    if not as_root:
        reached.pop("take threads without end", None)  # the limit is of a user, which others have
    off = {name for name, (is_on, _) in report["measures"].items() if not is_on}
    if "root" in off:  # without namespaces, other paths are closed and can be seen
        reached.pop("see another function's adapter", None)
        reached.pop("see the processes of the machine", None)
    is_root_still = os.geteuid() == 0 and not as_root
    if is_root_still:
        reached.pop("become root", None)  # it never was another user
    assert not reached
    link = report["attempts"]["follow a link in its folder to another function's adapter"]
    assert "No such file" in str(link) or "Permission denied" in str(link)
    assert report["can"] == ["mine", "thread"]
    assert off <= ({"user"} if not as_root else set()) | {"network", "root"}


def test_a_process_with_threads_is_not_confined_by_half() -> None:
    import threading

    hold = threading.Event()
    thread = threading.Thread(target=hold.wait)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match="threads"):
            confine(Confinement())
    finally:
        hold.set()
        thread.join()


def test_nothing_is_confined_to_root() -> None:
    with pytest.raises(ConfigError, match="uid"):
        Confinement(uid=0)


def test_a_terminal_can_be_written_and_not_read() -> None:
    """A terminal is open for reading on standard error as well, and its user types passwords there."""
    script = (
        "import os\n"
        "from manylora.core.isolation.confine import Confinement, confine\n"
        "confine(Confinement(environment=()))\n"
        "os.write(2, b'a log')\n"
        "try:\n"
        "    print(os.read(2, 100))\n"
        "except OSError as error:\n"
        "    print(error.strerror)\n"
    )
    ours, theirs = os.openpty()
    try:
        os.write(ours, b"a password\n")
        done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=theirs, timeout=120)
        assert done.stdout == b"Bad file descriptor\n"
        assert b"a log" in os.read(ours, 1000)
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.skipif(landlock_version() == 0, reason="needs a kernel with Landlock")
def test_a_path_that_cannot_be_opened_leaves_the_others_restricted(tmp_path: Path) -> None:
    """An entry of ``sys.path`` may lie inside an archive, or in a folder that its user may not enter."""
    (tmp_path / "archive.zip").write_bytes(b"")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "own").mkdir()
    readable = [str(tmp_path / name) for name in ("archive.zip/inner", "loop", "own")]
    script = (
        "import json, os, sys\n"
        "from manylora.core.isolation.confine import Confinement, confine\n"
        f"measures = confine(Confinement(readable={readable!r}))\n"
        "print([(one.is_on, one.note) for one in measures if one.name == 'files'], os.listdir(sys.argv[1]))\n"
        "print(os.listdir('/'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, readable[-1]], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.startswith("[(True, ") and done.stdout.endswith(" []\n"), done
    assert "PermissionError" in done.stderr
