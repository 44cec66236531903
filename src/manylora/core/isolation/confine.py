"""Confine this process: everything that it may still do after this is compute, read its folders and answer.

The order matters. Rights that are needed to give up others are given up last::

    descriptors, environment -> (open folders) -> network, root -> user -> capabilities -> parent -> no_new_privs
                                                                 -> limits -> files (Landlock) -> calls (seccomp)
"""

from __future__ import annotations

import contextlib
import os
import resource
import struct
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, TypeVar

import msgspec

from manylora.core.clock import WallClock
from manylora.core.errors import ConfigError
from manylora.core.isolation.landlock import FileRules
from manylora.core.isolation.namespaces import NEW_IPC, NEW_NETWORK, enter_namespaces, enter_own_root
from manylora.core.isolation.seccomp import restrict_calls
from manylora.core.isolation.system import MACHINE, end_with_parent, keep_capabilities, prctl

if TYPE_CHECKING:
    import subprocess

__all__ = [
    "MEASURES",
    "ONE_THREAD",
    "READABLE_OF_SYSTEM",
    "Confinement",
    "Measure",
    "confine",
    "receive_answer",
    "start_on_pipe",
]

T = TypeVar("T")

MEASURES = frozenset(
    {
        *("descriptors", "environment", "network", "user", "capabilities", "parent", "memory", "no_new_privs"),
        *("limits", "files", "calls", "root", "processes", "cgroup", "memory_limit", "share"),
    }
)
"""Names of all measures; the last five are for functions."""

ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Environment of a process that is to have one thread: numpy's library for products starts some."""

READABLE_OF_SYSTEM = ("/proc/cpuinfo", "/proc/meminfo", "/dev/null", "/dev/urandom")
"""Files of the system that libraries read when they are first used."""

_SET_DUMPABLE, _SET_NO_NEW_PRIVS, _CAPBSET_DROP = 4, 38, 24
_LAST_CAPABILITY = 40
_READ_ANY_FILE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """The place of a process after ``confine``."""

    readable: Collection[str] = ()  # folders and files that it may read; no other, and none may be written
    uid: int | None = None  # user and group to become, if this process is root; ``None`` to stay
    keep_fds: Collection[int] = (0, 1, 2)  # open descriptors that stay; all others are closed
    # Variables that stay, by name; all others are removed.
    environment: Collection[str] = ("LANG", "LC_ALL", "TZ", "OMP_NUM_THREADS")
    memory_bytes: int | None = None  # most address space that it may add from here on; ``None`` for no limit of its own
    cpu_s: int | None = None  # whole seconds of processor time after which the kernel ends it; ``None`` for no limit
    num_files: int = 64  # most descriptors
    # Most threads, with a ``uid`` that no other process has: the kernel counts them by user. ``None`` for no limit.
    num_tasks: int | None = None
    has_own_root: bool = False  # whether all other paths are hidden from it, not only closed
    ends_with_parent: bool = False  # whether it ends with the thread that started it
    file_bytes: int = 0  # largest file, also of memory, that it may make or let grow

    def __post_init__(self) -> None:
        if self.uid is not None and self.uid <= 0:
            raise ConfigError(f"Got uid = {self.uid}, expected one that is not root")


@dataclass(frozen=True, slots=True)
class Measure:
    """One measure, and why it is not in force if it is not."""

    name: str  # one of ``MEASURES``
    is_on: bool  # whether it is in force
    note: str = ""  # the reason if it is not; otherwise what it leaves open, if anything


def confine(to: Confinement) -> tuple[Measure, ...]:
    """Confine this process for good; return what is in force.

    Call it before the first byte of a tenant is read, and while there is one thread: the kernel restricts files by
    thread. ``RuntimeError`` if there are other threads.
    """
    if _num_threads() != 1:
        raise RuntimeError(f"cannot be confined with {_num_threads()} threads: the others would stay free")
    measures = [
        _try("descriptors", lambda: _keep_descriptors(to.keep_fds)),
        _try("environment", lambda: _forget_environment(to.environment)),
    ]
    rules: list[FileRules] = []
    prepared = _try("files", lambda: rules.append(FileRules(to.readable)))  # while it may open them
    address_bytes = _address_bytes()
    measures += [
        _try("network", lambda: enter_namespaces(NEW_NETWORK | NEW_IPC)),
        *([_try("root", lambda: enter_own_root(to.readable))] if to.has_own_root else []),
        _try("user", lambda: _become(to.uid)),
        _try("capabilities", _keep_reading),
        *([_try("parent", end_with_parent)] if to.ends_with_parent else []),  # a change of user clears it
        _try("memory", _hide_memory),
        _try("no_new_privs", _no_new_privs),
        _try("limits", lambda: _limit(to, address_bytes)),
        _try("files", rules[0].enforce) if rules else prepared,
        _try("calls", lambda: restrict_calls(makes_files=to.file_bytes > 0)),
    ]
    return tuple(measures)


def start_on_pipe(module: str, environment: Mapping[str, str] = {}) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a process that runs ``main(descriptor)`` of a module; return it, and the other end of its pipe.

    ``environment`` is added to this process's own. ``OSError`` if the process could not be started.
    """
    import subprocess  # here, since a process that may start none does without

    here, there = Pipe()
    # -P keeps the working directory off the import path. With `-m`, the classes of `__main__` would not be ours.
    command = [sys.executable, "-P", "-c", f"import {module} as here; here.main({there.fileno()})"]
    try:
        with there:
            process = subprocess.Popen(
                command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, env={**os.environ, **environment}
            )
    except OSError:
        here.close()
        raise
    return process, here


def receive_answer(pipe: Connection, limit_s: float, decode: Callable[[bytes], T], *, max_bytes: int) -> T:
    """Return the next answer of a process that handles hostile input, of at most ``max_bytes``; it may die of it.

    ``TimeoutError`` if it is not there, to its last byte, within ``limit_s`` seconds; ``OSError`` if the process died,
    or its answer cannot be read.
    """
    clock = WallClock()
    until = clock.now() + limit_s
    (size,) = struct.unpack("!i", _receive_bytes(pipe, 4, clock, until))  # as ``Connection.send_bytes`` begins
    if not 0 <= size <= max_bytes:
        raise OSError(f"its answer has more than {max_bytes} bytes")
    try:
        return decode(_receive_bytes(pipe, size, clock, until))
    except msgspec.MsgspecError as error:
        raise OSError(f"its answer is malformed: {error}") from error


def _receive_bytes(pipe: Connection, size: int, clock: WallClock, until: float) -> bytes:
    """Return so many bytes; ``Connection.recv_bytes`` would wait without an end for those behind the first."""
    taken = bytearray()
    while len(taken) < size:
        if not pipe.poll(max(0.0, until - clock.now())):
            raise TimeoutError
        part = os.read(pipe.fileno(), size - len(taken))
        if not part:
            raise ConnectionResetError
        taken += part
    return bytes(taken)


def _try(name: str, act: Callable[[], str | None]) -> Measure:
    try:
        return Measure(name, True, act() or "")
    except (OSError, ValueError) as error:
        return Measure(name, False, str(error))


def _num_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def _keep_descriptors(kept: Collection[int]) -> None:
    """Close all others; a terminal is kept only for writing, since its user types there."""
    highest = os.sysconf("SC_OPEN_MAX")
    with contextlib.suppress(OSError):
        highest = max(map(int, os.listdir("/proc/self/fd"))) + 1
    start = 0
    for fd in (*sorted(kept), highest):
        if fd > start:
            os.closerange(start, fd)
        start = fd + 1
    for fd in filter(os.isatty, kept):
        written = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NOCTTY)
        os.dup2(written, fd)
        os.close(written)


def _forget_environment(kept: Collection[str]) -> None:
    for name in list(os.environ):
        if name not in kept:
            del os.environ[name]


def _become(uid: int | None) -> None:
    """Drop root for ``uid``, with every capability, for good."""
    if os.geteuid() != 0:
        raise OSError("only root can become another user")
    if uid is None:
        raise OSError("no user was given, so it stays root")
    for capability in range(_LAST_CAPABILITY + 1):
        with contextlib.suppress(OSError):
            prctl(_CAPBSET_DROP, capability)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _keep_reading() -> None:
    """Drop every capability but the one to read any file, which a process that stays root needs for its folders."""
    if not MACHINE:
        raise OSError("only Linux has them")
    keep_capabilities([_READ_ANY_FILE] if os.geteuid() == 0 else [])


def _hide_memory() -> None:
    """Keep processes of the same user from reading this one's memory, and the kernel from dumping it."""
    prctl(_SET_DUMPABLE, 0)


def _no_new_privs() -> None:
    if not MACHINE:
        raise OSError("only Linux has it")
    prctl(_SET_NO_NEW_PRIVS, 1)


def _limit(to: Confinement, address_bytes: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (to.file_bytes, to.file_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (to.num_files, to.num_files))
    if to.uid is not None and to.num_tasks is not None:
        resource.setrlimit(resource.RLIMIT_NPROC, (to.num_tasks, to.num_tasks))
    if to.cpu_s is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (to.cpu_s, to.cpu_s + 1))
    if to.memory_bytes is not None:
        if address_bytes is None:
            raise OSError("/proc does not tell the address space, so it cannot be bounded")
        most = address_bytes + to.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _address_bytes() -> int | None:
    """Return the address space of this process; ``None`` where the kernel does not tell it."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return None
