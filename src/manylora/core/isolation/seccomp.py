"""A filter of system calls: those that an engine needs once it runs are allowed, every other one is refused.

Allowed are calls on descriptors that are open, on memory and threads of this process, on its clocks, and opening files
to read. Landlock bounds the files that can be opened; it has no say in ``chmod``, ``utimensat``, ``setxattr`` or
``inotify_add_watch``, so none of them is here. Some calls are allowed for some arguments only: ``CHECKED``.

A refused call gets ``EPERM``, so a library that tries one goes on without. Calls whose arguments a filter cannot see,
and those newer than the tables, get ``ENOSYS``: C libraries then use the older ones. Refusals are not written to the
kernel's log: a process can cause millions a second, and that log is the machine's.

Source: the kernel's ``Documentation/userspace-api/seccomp_filter.rst``.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from manylora.core.isolation.system import MACHINE, system_call

__all__ = ["CHECKED", "ArgumentCheck", "filter_lines", "restrict_calls"]

_FIRST_UNKNOWN = 451  # the kernel had no call of this number or a higher one when the tables were made

_NUMBERS: Mapping[str, Mapping[str, int]] = {
    "x86_64": {
        "access": 21, "brk": 12, "clock_getres": 229, "clock_gettime": 228, "clock_nanosleep": 230, "clone": 56,
        "clone3": 435, "close": 3, "close_range": 436, "dup": 32, "dup2": 33, "dup3": 292, "epoll_create1": 291,
        "epoll_ctl": 233, "epoll_pwait": 281, "epoll_wait": 232, "eventfd2": 290, "exit": 60, "exit_group": 231,
        "faccessat": 269, "faccessat2": 439, "fadvise64": 221, "fcntl": 72, "fstat": 5, "ftruncate": 77, "futex": 202,
        "futex_waitv": 449, "getcpu": 309, "getcwd": 79, "getdents64": 217, "getegid": 108, "geteuid": 107,
        "getgid": 104, "getpid": 39, "getppid": 110, "getpriority": 140, "getrandom": 318, "getrusage": 98,
        "getsockname": 51, "getsockopt": 55, "gettid": 186, "gettimeofday": 96, "getuid": 102, "ioctl": 16, "lseek": 8,
        "lstat": 6, "madvise": 28, "memfd_create": 319, "mmap": 9, "mprotect": 10, "mremap": 25, "munmap": 11,
        "nanosleep": 35, "newfstatat": 262, "open": 2, "openat": 257, "openat2": 437, "poll": 7, "ppoll": 271,
        "prctl": 157, "pread64": 17, "preadv": 295, "prlimit64": 302, "pselect6": 270, "pwrite64": 18, "pwritev": 296,
        "read": 0, "readlink": 89, "readlinkat": 267, "readv": 19, "recvfrom": 45, "recvmsg": 47,
        "restart_syscall": 219, "rseq": 334, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15,
        "sched_getaffinity": 204, "sched_setaffinity": 203, "sched_yield": 24, "select": 23, "sendmsg": 46,
        "sendto": 44, "set_robust_list": 273, "setpriority": 141, "shutdown": 48, "sigaltstack": 131, "stat": 4,
        "statx": 332, "sysinfo": 99, "tgkill": 234, "time": 201, "times": 100, "uname": 63, "write": 1, "writev": 20,
    },
    "aarch64": {  # it has no calls that newer ones replace, as ``open`` and ``stat``
        "brk": 214, "clock_getres": 114, "clock_gettime": 113, "clock_nanosleep": 115, "clone": 220, "clone3": 435,
        "close": 57, "close_range": 436, "dup": 23, "dup3": 24, "epoll_create1": 20, "epoll_ctl": 21,
        "epoll_pwait": 22, "eventfd2": 19, "exit": 93, "exit_group": 94, "faccessat": 48, "faccessat2": 439,
        "fadvise64": 223, "fcntl": 25, "fstat": 80, "ftruncate": 46, "futex": 98, "futex_waitv": 449, "getcpu": 168,
        "getcwd": 17, "getdents64": 61, "getegid": 177, "geteuid": 175, "getgid": 176, "getpid": 172, "getppid": 173,
        "getpriority": 141, "getrandom": 278, "getrusage": 165, "getsockname": 204, "getsockopt": 209, "gettid": 178,
        "gettimeofday": 169, "getuid": 174, "ioctl": 29, "lseek": 62, "madvise": 233, "memfd_create": 279, "mmap": 222,
        "mprotect": 226, "mremap": 216, "munmap": 215, "nanosleep": 101, "newfstatat": 79, "openat": 56,
        "openat2": 437, "ppoll": 73, "prctl": 167, "pread64": 67, "preadv": 69, "prlimit64": 261, "pselect6": 72,
        "pwrite64": 68, "pwritev": 70, "read": 63, "readlinkat": 78, "readv": 65, "recvfrom": 207, "recvmsg": 212,
        "restart_syscall": 128, "rseq": 293, "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigreturn": 139,
        "sched_getaffinity": 123, "sched_setaffinity": 122, "sched_yield": 124, "sendmsg": 211, "sendto": 206,
        "set_robust_list": 99, "setpriority": 140, "shutdown": 210, "sigaltstack": 132, "statx": 291, "sysinfo": 179,
        "tgkill": 131, "times": 153, "uname": 160, "write": 64, "writev": 66,
    },
}  # fmt: skip
"""Numbers of the system calls that a confined process may make, by machine; from the kernel's tables."""

_NUMBER_OF_SECCOMP = {"x86_64": 317, "aarch64": 277}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SET_MODE_FILTER, _ALL_THREADS = 1, 1
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARGUMENTS = 0, 4, 16
_X32_CALLS = 0x40000000

_CLONE_THREAD, _CLONE_ANY_NAMESPACE = 0x00010000, 0x7E020080
_SET_NAME, _GET_NAME, _NAME_MEMORY = 15, 16, 0x53564D41  # of ``prctl``
_FILE_COMMANDS = (0, 1, 2, 3, 4, 1030, 1033, 1034)  # duplicate; flags; seals. No locks, owners, leases, sizes of pipes
_DEVICE_COMMANDS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # is it a terminal, how wide; bytes waiting; flags
_UNSEEN = ("clone3", "openat2")  # calls whose flags are in memory, which a filter cannot read

_OF_WRITERS = ("ftruncate", "memfd_create", "recvmsg", "sendmsg")
"""Calls of processes that make files of memory and hand them on."""


@dataclass(frozen=True, slots=True)
class ArgumentCheck:
    """A condition on the lower 32 bits of an argument, which are all that the kernel uses of the arguments here."""

    place: int  # position of the argument, from 0
    values: Sequence[int] = ()  # values that the argument may have; empty for any
    has: int = 0  # bits that must all be set
    lacks: int = 0  # bits that must not be set

    def lines(self, refuse: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield instructions that return ``refuse`` unless the condition holds, and go on if it does."""
        yield _LOAD, 0, 0, _OFFSET_ARGUMENTS + 8 * self.place
        for later, value in zip(reversed(range(len(self.values))), self.values, strict=True):
            yield _JUMP_EQUAL, later + 1, 0, value & 0xFFFFFFFF
        if self.values:
            yield _RETURN, 0, 0, refuse
        for bit in (1 << one for one in range(32) if self.has >> one & 1):
            yield from ((_JUMP_ANY_BIT, 1, 0, bit), (_RETURN, 0, 0, refuse))
        if self.lacks:
            yield from ((_JUMP_ANY_BIT, 0, 1, self.lacks), (_RETURN, 0, 0, refuse))


_READ_ONLY = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_OWN = ArgumentCheck(0, values=(0,))
_OWN_PRIORITY = (ArgumentCheck(0, values=(os.PRIO_PROCESS,)), ArgumentCheck(1, values=(0,)))
_KNOWN_CLOCK = ArgumentCheck(0, values=range(8))  # those of CPUs of other processes have negative numbers

CHECKED: Mapping[str, Sequence[ArgumentCheck]] = {
    "clock_getres": (_KNOWN_CLOCK,),
    "clock_gettime": (_KNOWN_CLOCK,),
    "clock_nanosleep": (_KNOWN_CLOCK,),
    "clone": (ArgumentCheck(0, has=_CLONE_THREAD, lacks=_CLONE_ANY_NAMESPACE),),
    "fcntl": (ArgumentCheck(1, values=_FILE_COMMANDS),),
    "getpriority": _OWN_PRIORITY,
    "ioctl": (ArgumentCheck(1, values=_DEVICE_COMMANDS),),
    "mmap": (ArgumentCheck(3, lacks=mmap.MAP_SHARED),),  # shared memory is in no process's account
    "open": (ArgumentCheck(1, lacks=_READ_ONLY),),
    "openat": (ArgumentCheck(2, lacks=_READ_ONLY),),
    "prctl": (ArgumentCheck(0, values=(_SET_NAME, _GET_NAME, _NAME_MEMORY)),),
    "prlimit64": (_OWN,),
    "sched_getaffinity": (_OWN,),
    "sched_setaffinity": (_OWN,),
    "setpriority": _OWN_PRIORITY,
}
"""Calls that are allowed for some arguments; all others of the tables are for any."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def restrict_calls(*, makes_files: bool = False) -> None:
    """Refuse all other calls from now on, in every thread of this process. Needs ``no_new_privs``.

    Args:
        makes_files: Whether it makes files of memory, maps them for others and hands them on.

    Raises:
        OSError: The kernel has no such filters, or there is no table of calls for this machine.
    """
    if MACHINE not in _NUMBERS:
        raise OSError(f"there is no table of system calls for {MACHINE or 'this system'}")
    lines = filter_lines(MACHINE, os.getpid(), makes_files=makes_files)
    code = b"".join(struct.pack("=HBBI", *line) for line in lines)
    program = _Program(len(lines), code)
    number = _NUMBER_OF_SECCOMP[MACHINE]
    system_call(number, ctypes.c_uint(_SET_MODE_FILTER), ctypes.c_uint(_ALL_THREADS), ctypes.byref(program))


def filter_lines(machine: str, pid: int, *, makes_files: bool) -> list[tuple[int, int, int, int]]:
    """Return the filter for a process, as instructions of the kernel's classic BPF."""
    numbers = _NUMBERS[machine]
    refuse, unknown = _ERROR | errno.EPERM, _ERROR | errno.ENOSYS
    checks = {**CHECKED, "tgkill": (ArgumentCheck(0, values=(pid,)),)}  # to abort
    if makes_files:
        del checks["mmap"]
    lines = [
        (_LOAD, 0, 0, _OFFSET_ARCH),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _OFFSET_NUMBER),
    ]
    if machine == "x86_64":
        lines += [(_JUMP_AT_LEAST, 0, 1, _X32_CALLS), (_RETURN, 0, 0, refuse)]
    lines += [(_JUMP_AT_LEAST, 0, 1, _FIRST_UNKNOWN), (_RETURN, 0, 0, unknown)]
    for name, number in numbers.items():
        if name in _OF_WRITERS and not makes_files:
            continue
        body = [line for check in checks.get(name, ()) for line in check.lines(refuse)]
        body.append((_RETURN, 0, 0, unknown if name in _UNSEEN else _ALLOW))
        lines += [(_JUMP_EQUAL, 0, len(body), number), *body]
    return [*lines, (_RETURN, 0, 0, refuse)]
