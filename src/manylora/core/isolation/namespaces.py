"""Namespaces: a process sees no processes, mounts and networks but its own.

Root may enter them; any other user through a user namespace of its own, where the kernel and the container allow that.

Source: ``namespaces(7)``, ``user_namespaces(7)``, ``pivot_root(2)``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

from manylora.core.isolation.system import mount, pivot_root, restrict_mounts, unmount, unshare

__all__ = ["NEW_IPC", "NEW_NETWORK", "NEW_PROCESSES", "enter_namespaces", "enter_own_root"]

NEW_NETWORK, NEW_IPC, NEW_PROCESSES = 0x40000000, 0x08000000, 0x20000000
_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000

_BIND, _RECURSIVE, _PRIVATE = 1 << 12, 1 << 14, 1 << 18

_MADE_AT = "/tmp"  # folder that the new root is made over; each process that makes one has mounts of its own by then


def enter_namespaces(kinds: int) -> str:
    """Enter new namespaces of some kinds; return a note on the way.

    ``OSError`` if this user, the kernel or the container has no right to.
    """
    try:
        unshare(kinds)
        return ""
    except PermissionError:
        uid, gid = os.geteuid(), os.getegid()
        unshare(_NEW_USER | kinds)  # a user namespace of its own gives the right to
    own = Path("/proc/self")
    with contextlib.suppress(OSError):  # without a name in it, this user can make no files there
        (own / "setgroups").write_text("deny")
        (own / "uid_map").write_text(f"{uid} {uid} 1")
        (own / "gid_map").write_text(f"{gid} {gid} 1")
    return "through a user namespace"


def enter_own_root(readable: Collection[str]) -> None:
    """Enter a file system that has some folders and files, for reading, and nothing else: all other paths do not exist.

    They are where they were, and where links on the way to them lead. Those that do not exist are left out. ``OSError``
    if the kernel refused; the file system is as before.
    """
    places = {os.path.abspath(one) for one in readable} | {os.path.realpath(one) for one in readable}
    places = {one for one in places if os.path.exists(one) and not any(_is_in(one, other) for other in places)}
    enter_namespaces(_NEW_MOUNTS)
    mount(None, "/", None, _RECURSIVE | _PRIVATE)
    files = {one: os.open(one, os.O_PATH | os.O_CLOEXEC) for one in sorted(places)}  # some may be below it
    umask = os.umask(0o022)
    try:
        mount("none", _MADE_AT, "tmpfs", 0, "size=1m,mode=755")
        try:
            for place, file in files.items():
                source, path = f"/proc/self/fd/{file}", _MADE_AT + place
                is_folder = os.path.isdir(source)
                os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)
                if not is_folder:
                    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
                mount(source, path, None, _BIND | _RECURSIVE)
            restrict_mounts(_MADE_AT)
            os.chdir(_MADE_AT)
            pivot_root(".", ".")  # puts the old root over the new one, from where it is taken away
        except OSError:
            unmount(_MADE_AT)
            raise
        unmount(".")
        os.chdir("/")
    finally:
        os.umask(umask)
        for file in files.values():
            os.close(file)


def _is_in(place: str, folder: str) -> bool:
    return place != folder and place.startswith(folder.rstrip("/") + "/") and os.path.isdir(folder)
