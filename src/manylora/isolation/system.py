"""Calls to the kernel that Python has no function for."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
from collections.abc import Iterable
from typing import Any

__all__ = [
    "MACHINE",
    "SYSTEM_CALLS",
    "end_with_parent",
    "keep_capabilities",
    "prctl",
    "system_call",
    "take_file",
    "unshare",
]

MACHINE = platform.machine() if platform.system() == "Linux" else ""

SYSTEM_CALLS: dict[str, dict[str, int]] = {
    # From the kernel's tables; of `None` in these tables, the machine has no such call.
    "x86_64": {
        "accept": 43, "accept4": 288, "add_key": 248, "bind": 49, "bpf": 321, "clone": 56, "clone3": 435,
        "connect": 42, "delete_module": 176, "execve": 59, "execveat": 322, "fanotify_init": 300,
        "finit_module": 313, "fork": 57, "fsopen": 430, "init_module": 175, "io_uring_enter": 426,
        "io_uring_register": 427, "io_uring_setup": 425, "ioperm": 173, "iopl": 172, "kcmp": 312,
        "kexec_file_load": 320, "kexec_load": 246, "keyctl": 250, "listen": 50, "mount": 165, "move_mount": 429,
        "name_to_handle_at": 303, "open_by_handle_at": 304, "open_tree": 428, "perf_event_open": 298,
        "personality": 135, "pidfd_getfd": 438, "pidfd_open": 434, "pidfd_send_signal": 424, "pivot_root": 155,
        "process_madvise": 440, "process_vm_readv": 310, "process_vm_writev": 311, "ptrace": 101, "quotactl": 179,
        "reboot": 169, "request_key": 249, "setns": 308, "shmat": 30, "shmget": 29, "msgget": 68, "semget": 64,
        "mq_open": 240, "socket": 41, "swapoff": 168, "swapon": 167, "syslog": 103, "umount2": 166, "unshare": 272,
        "userfaultfd": 323, "vfork": 58, "chroot": 161, "acct": 163, "settimeofday": 164, "clock_settime": 227,
        "adjtimex": 159, "sethostname": 170, "setdomainname": 171, "memfd_secret": 447, "setpriority": 141,
        "sched_setscheduler": 144, "sched_setparam": 142, "sched_setattr": 314, "ioprio_set": 251, "prctl": 157,
        "prlimit64": 302, "sched_setaffinity": 203,
    },
    "aarch64": {
        "accept": 202, "accept4": 242, "add_key": 217, "bind": 200, "bpf": 280, "clone": 220, "clone3": 435,
        "connect": 203, "delete_module": 106, "execve": 221, "execveat": 281, "fanotify_init": 262,
        "finit_module": 273, "fsopen": 430, "init_module": 105, "io_uring_enter": 426, "io_uring_register": 427,
        "io_uring_setup": 425, "kcmp": 272, "kexec_file_load": 294, "kexec_load": 104, "keyctl": 219,
        "listen": 201, "mount": 40, "move_mount": 429, "name_to_handle_at": 264, "open_by_handle_at": 265,
        "open_tree": 428, "perf_event_open": 241, "personality": 92, "pidfd_getfd": 438, "pidfd_open": 434,
        "pidfd_send_signal": 424, "pivot_root": 41, "process_madvise": 440, "process_vm_readv": 270,
        "process_vm_writev": 271, "ptrace": 117, "quotactl": 60, "reboot": 142, "request_key": 218, "setns": 268,
        "shmat": 196, "shmget": 194, "msgget": 186, "semget": 190, "mq_open": 180, "socket": 198, "swapoff": 225,
        "swapon": 224, "syslog": 116, "umount2": 39, "unshare": 97, "userfaultfd": 282, "chroot": 51, "acct": 89,
        "settimeofday": 170, "clock_settime": 112, "adjtimex": 171, "sethostname": 161, "setdomainname": 162,
        "memfd_secret": 447, "setpriority": 140, "sched_setscheduler": 119, "sched_setparam": 118,
        "sched_setattr": 274, "ioprio_set": 30, "prctl": 167, "prlimit64": 261, "sched_setaffinity": 122,
    },
}  # fmt: skip
"""Numbers of system calls, by machine."""

_SET_PARENT_DEATH_SIGNAL = 1

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def system_call(number: int, *arguments: Any) -> int:
    """Make a system call.

    Raises:
        OSError: The kernel refused it.
    """
    return _checked(_libc.syscall(ctypes.c_long(number), *arguments))


def prctl(option: int, *arguments: int) -> int:
    """Change a property of this process.

    Raises:
        OSError: The kernel refused it.
    """
    values = [ctypes.c_ulong(one) for one in (*arguments, 0, 0, 0, 0)[:4]]
    return _checked(_libc.prctl(option, *values))


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapabilitySets(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def keep_capabilities(kept: Iterable[int]) -> None:
    """Drop every capability of this thread but those of some numbers that it has.

    Raises:
        OSError: The kernel refused it.
    """
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
    """Leave namespaces that are shared with the parent.

    Raises:
        OSError: The kernel refused it.
    """
    _checked(_libc.unshare(flags))


def take_file(pid: int, fd: int) -> int:
    """Return a descriptor of the file that process ``pid`` has open as ``fd``; a descendant, or of the same rights.

    Raises:
        OSError: There is no such file, or the kernel refused it.
    """
    if not hasattr(os, "pidfd_open"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    process = os.pidfd_open(pid)
    try:
        return system_call(SYSTEM_CALLS[MACHINE]["pidfd_getfd"], process, fd, 0)
    finally:
        os.close(process)


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends, even while this process is stopped."""
    prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
