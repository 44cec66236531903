"""Landlock: from now on this process reaches no file but those it names, whatever its user may.

It restricts the calling thread and the threads it starts later. So it must be called while there is only one.

Source: the kernel's ``Documentation/userspace-api/landlock.rst``.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

from manylora.core.isolation.system import system_call

__all__ = ["FileRules", "landlock_version"]

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every machine
_VERSION, _PATH_BENEATH = 1, 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_ALL_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""Rights by the version that introduced the last of them."""
_BIND_AND_CONNECT_TCP = 0b11  # version 4
_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11  # version 6


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def landlock_version() -> int:
    """Return the version that the kernel has; 0 without Landlock."""
    try:
        return system_call(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))
    except OSError:
        return 0


class FileRules:
    """Rules that allow reading below some folders and no other use of files; no new TCP, no signals to others.

    Made while this process may still open the folders, and put in force later. Descriptors that are open stay usable.
    Folders and files that cannot be opened now are skipped: they could not be read later either.

    Raises:
        OSError: The kernel has no Landlock, or takes no rule for a folder.
    """

    def __init__(self, readable: Iterable[str | os.PathLike[str]]) -> None:
        self._version = landlock_version()
        if not self._version:
            raise OSError("the kernel has no Landlock")
        wanted = _Ruleset(
            files=_ALL_FILE_RIGHTS[max(one for one in _ALL_FILE_RIGHTS if one <= self._version)],
            net=_BIND_AND_CONNECT_TCP if self._version >= 4 else 0,
            scoped=_ABSTRACT_SOCKETS_AND_SIGNALS if self._version >= 6 else 0,
        )
        size = 24 if self._version >= 6 else 16 if self._version >= 4 else 8
        self._fd = system_call(_CREATE_RULESET, ctypes.byref(wanted), ctypes.c_size_t(size), ctypes.c_uint32(0))
        try:
            for path in readable:
                _allow_reading(self._fd, path)
        except OSError:
            os.close(self._fd)
            raise

    def enforce(self) -> str:
        """Put the rules in force, for good; needs ``no_new_privs``.

        Returns:
            What the kernel's version leaves open, in words; empty if nothing.

        Raises:
            OSError: The kernel refused.
        """
        try:
            system_call(_RESTRICT_SELF, ctypes.c_int(self._fd), ctypes.c_uint32(0))
        finally:
            os.close(self._fd)
        version = self._version
        return ", ".join(["truncating"] * (version < 3) + ["TCP"] * (version < 4) + ["signals"] * (version < 6))


def _allow_reading(ruleset: int, path: str | os.PathLike[str]) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        rights = _READ_FILE | _READ_DIR if os.path.isdir(path) else _READ_FILE
        rule = _PathBeneath(allowed=rights, parent=parent)
        system_call(
            _ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), ctypes.byref(rule), ctypes.c_uint32(0)
        )
    finally:
        os.close(parent)
