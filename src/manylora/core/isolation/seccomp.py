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

from manylora.core.isolation.call_numbers import FIRST_UNKNOWN, NUMBERS
from manylora.core.isolation.system import MACHINE, system_call

__all__ = ["CHECKED", "ArgumentCheck", "filter_lines", "restrict_calls"]

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

_UNSEEN = ("clone3", "openat2")
"""Calls whose flags are in memory, which a filter cannot read."""

_OF_WRITERS = ("ftruncate", "memfd_create", "recvmsg", "sendmsg")
"""Calls of processes that make files of memory and hand them on."""


@dataclass(frozen=True, slots=True)
class ArgumentCheck:
    """A condition on the lower 32 bits of one argument, which are all that the kernel uses of those checked here.

    Args:
        place: Of the argument, from 0.
        values: It is one of these; empty for no condition.
        has: It has all of these bits...
        lacks: ...and none of these.
    """

    place: int
    values: Sequence[int] = ()
    has: int = 0
    lacks: int = 0

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
    if MACHINE not in NUMBERS:
        raise OSError(f"there is no table of system calls for {MACHINE or 'this system'}")
    lines = filter_lines(MACHINE, os.getpid(), makes_files=makes_files)
    code = b"".join(struct.pack("=HBBI", *line) for line in lines)
    program = _Program(len(lines), code)
    number = _NUMBER_OF_SECCOMP[MACHINE]
    system_call(number, ctypes.c_uint(_SET_MODE_FILTER), ctypes.c_uint(_ALL_THREADS), ctypes.byref(program))


def filter_lines(machine: str, pid: int, *, makes_files: bool) -> list[tuple[int, int, int, int]]:
    """Return the filter for a process, as instructions of the kernel's classic BPF."""
    numbers = NUMBERS[machine]
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
    lines += [(_JUMP_AT_LEAST, 0, 1, FIRST_UNKNOWN), (_RETURN, 0, 0, unknown)]
    for name, number in numbers.items():
        if name in _OF_WRITERS and not makes_files:
            continue
        body = [line for check in checks.get(name, ()) for line in check.lines(refuse)]
        body.append((_RETURN, 0, 0, unknown if name in _UNSEEN else _ALLOW))
        lines += [(_JUMP_EQUAL, 0, len(body), number), *body]
    return [*lines, (_RETURN, 0, 0, refuse)]
