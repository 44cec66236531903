"""Calls to the kernel that Python has no function for; each raises ``OSError`` if the kernel refuses it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import signal
from collections.abc import Iterable
from typing import Any

__all__ = [
    "MACHINE",
    "STEP_NICENESS",
    "adopt_orphans",
    "end_with_parent",
    "keep_capabilities",
    "mount",
    "pivot_root",
    "prctl",
    "restrict_mounts",
    "system_call",
    "take_file",
    "unmount",
    "unshare",
    "yield_to_others",
]

MACHINE = platform.machine() if platform.system() == "Linux" else ""

STEP_NICENESS = 5
"""What steps on a CPU yield to the server's other threads: a third of their weight, in the kernel's scheduler.

A published adapter, the message of a request or the text of an answer needs milliseconds, and steps always have more to
do. At one priority each such piece waits for as many time slices as steps run beside it.
"""

_TAKE_FILE, _SET_MOUNT = 438, 442  # pidfd_getfd, mount_setattr; the same on every machine
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def system_call(number: int, *arguments: Any) -> int:
    """Make a system call."""
    return _checked(_libc.syscall(ctypes.c_long(number), *arguments))


def prctl(option: int, *arguments: int) -> int:
    """Change a property of this process."""
    values = [ctypes.c_ulong(one) for one in (*arguments, 0, 0, 0, 0)[:4]]
    return _checked(_libc.prctl(option, *values))


def yield_to_others(niceness: int = STEP_NICENESS) -> None:
    """Let this thread, and the threads that it starts, run at the priority of steps on a CPU, if the kernel can.

    A higher ``niceness`` lets it run at a lower one.
    """
    if MACHINE:  # elsewhere a priority is the whole process's
        with contextlib.suppress(OSError):  # without it, steps only share
            os.nice(niceness)


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapabilitySets(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def keep_capabilities(kept: Iterable[int]) -> None:
    """Drop every capability of this thread whose number is not in ``kept``."""
    header = _CapabilityHeader(version=0x20080522, pid=0)
    sets = (_CapabilitySets * 2)()
    _checked(_libc.capget(ctypes.byref(header), sets))
    wanted = sum(1 << number for number in kept)
    for place, one in enumerate(sets):
        one.permitted &= wanted >> 32 * place & 0xFFFFFFFF
        one.effective = one.permitted
        one.inheritable = 0
    _checked(_libc.capset(ctypes.byref(header), sets))


def unshare(flags: int) -> None:
    """Leave namespaces that are shared with the parent."""
    _checked(_libc.unshare(flags))


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Mount a file system, or bind a folder or file to another place."""
    texts = [None if one is None else os.fsencode(one) for one in (source, target, kind, options)]
    _checked(_libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]))


def unmount(target: str) -> None:
    """Take the topmost mount at a place away, with all below it; files that are open stay usable."""
    detach = 2
    _checked(_libc.umount2(os.fsencode(target), detach))


def restrict_mounts(target: str) -> None:
    """Make a mount and all below it read-only, without rights by programs; refused by kernels older than 5.12."""
    here, recursive, read_only, no_set_user = -100, 0x8000, 1, 2
    attributes = (ctypes.c_uint64 * 4)(read_only | no_set_user)
    system_call(_SET_MOUNT, here, os.fsencode(target), recursive, attributes, ctypes.c_size_t(32))


def pivot_root(new: str, old: str) -> None:
    """Make a mount the root, and put the old root at a place in it."""
    if MACHINE not in _PIVOT_ROOT:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    system_call(_PIVOT_ROOT[MACHINE], os.fsencode(new), os.fsencode(old))


def take_file(pid: int, fd: int) -> int:
    """Return a descriptor of the file that process ``pid`` has open as ``fd``; a descendant, or of the same rights."""
    if not hasattr(os, "pidfd_open"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    process = os.pidfd_open(pid)
    try:
        return system_call(_TAKE_FILE, process, fd, 0)
    finally:
        os.close(process)


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends, even while this process is stopped."""
    prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends."""
    prctl(_SET_CHILD_SUBREAPER, 1)
