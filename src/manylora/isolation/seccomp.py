"""A filter of system calls: those that an engine never needs once it runs are refused.

Refused are new processes and programs, new sockets, other processes' memory, namespaces, mounts, keys, shared memory of
System V, and kernel interfaces with a long record of faults. Limits, processors and the priority may be set for the
caller alone. A process may neither outlive its parent nor show its memory again. Threads are allowed. A refused call
gets ``EPERM``, so a library that tries one goes on without. ``clone3`` gets ``ENOSYS``, because a filter cannot see its
arguments, and C libraries then use ``clone``.

Source: the kernel's ``Documentation/userspace-api/seccomp_filter.rst``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from manylora.isolation.system import MACHINE, SYSTEM_CALLS, system_call

__all__ = ["REFUSED", "restrict_calls"]

_NUMBER_OF_SECCOMP = {"x86_64": 317, "aarch64": 277}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SET_MODE_FILTER, _ALL_THREADS = 1, 1
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_FIRST_ARGUMENT, _OFFSET_SECOND_ARGUMENT = 0, 4, 16, 24
_X32_CALLS = 0x40000000
_CLONE_THREAD = 0x00010000

_OF_OWN_PROCESS = ("prlimit64", "sched_setaffinity")
"""Calls whose first argument is a process, 0 for the caller's."""

_FINAL_PROPERTIES = (1, 4)
"""Options of ``prctl`` that stay as they are: the signal at the parent's end, and whether memory is hidden."""

_SPECIAL = ("clone", "clone3", "prctl", "setpriority", *_OF_OWN_PROCESS)
REFUSED = frozenset(name for calls in SYSTEM_CALLS.values() for name in calls if name not in _SPECIAL)
"""Names of the calls that are always refused."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def restrict_calls() -> None:
    """Refuse the calls from now on, in every thread of this process and in all it starts. Needs ``no_new_privs``.

    Raises:
        OSError: The kernel has no such filters, or there is no table of calls for this machine.
    """
    if MACHINE not in SYSTEM_CALLS:
        raise OSError(f"there is no table of system calls for {MACHINE or 'this system'}")
    code = _program(MACHINE)
    program = _Program(len(code) // 8, code)
    number = _NUMBER_OF_SECCOMP[MACHINE]
    system_call(number, ctypes.c_uint(_SET_MODE_FILTER), ctypes.c_uint(_ALL_THREADS), ctypes.byref(program))


def _program(machine: str) -> bytes:
    """Return the filter for a machine, as the kernel's classic BPF."""
    calls = SYSTEM_CALLS[machine]
    refuse, unknown = _ERROR | errno.EPERM, _ERROR | errno.ENOSYS
    lines = [
        (_LOAD, 0, 0, _OFFSET_ARCH),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _OFFSET_NUMBER),
    ]
    if machine == "x86_64":
        lines += [(_JUMP_AT_LEAST, 0, 1, _X32_CALLS), (_RETURN, 0, 0, refuse)]
    for name in sorted(REFUSED & calls.keys()):
        lines += [(_JUMP_EQUAL, 0, 1, calls[name]), (_RETURN, 0, 0, refuse)]
    lines += [(_JUMP_EQUAL, 0, 1, calls["clone3"]), (_RETURN, 0, 0, unknown)]
    for name in _OF_OWN_PROCESS:
        lines += [
            (_JUMP_EQUAL, 0, 4, calls[name]),
            (_LOAD, 0, 0, _OFFSET_FIRST_ARGUMENT),
            (_JUMP_EQUAL, 1, 0, 0),
            (_RETURN, 0, 0, refuse),
            (_RETURN, 0, 0, _ALLOW),
        ]
    lines += [
        (_JUMP_EQUAL, 0, 5, calls["prctl"]),
        (_LOAD, 0, 0, _OFFSET_FIRST_ARGUMENT),
        (_JUMP_EQUAL, 1, 0, _FINAL_PROPERTIES[0]),
        (_JUMP_EQUAL, 0, 1, _FINAL_PROPERTIES[1]),
        (_RETURN, 0, 0, refuse),
        (_RETURN, 0, 0, _ALLOW),
    ]
    lines += [
        (_JUMP_EQUAL, 0, 6, calls["setpriority"]),
        (_LOAD, 0, 0, _OFFSET_FIRST_ARGUMENT),
        (_JUMP_EQUAL, 0, 3, os.PRIO_PROCESS),
        (_LOAD, 0, 0, _OFFSET_SECOND_ARGUMENT),
        (_JUMP_EQUAL, 0, 1, 0),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, refuse),
    ]
    lines += [
        (_JUMP_EQUAL, 0, 3, calls["clone"]),
        (_LOAD, 0, 0, _OFFSET_FIRST_ARGUMENT),
        (_JUMP_ANY_BIT, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, refuse),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
