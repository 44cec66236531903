"""The memory that this process may take, for the default size of the host tier."""

from __future__ import annotations

import math
from pathlib import Path

__all__ = ["HOST_SHARE", "available_bytes"]

HOST_SHARE = 0.25
"""Share of the available memory that adapters take by default; the rest is for pages, processes and file caches."""

_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Files of a control group's limit and use, by its version 2 and 1."""


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process could take without swapping; ``None`` where the system does not tell.

    It is the least of the memory that the machine has available and of the room in each control group around the
    process, a container's for example.

    Args:
        root: Root of the file system.
    """
    machine = _fields(root / "proc/meminfo").get("MemAvailable:")
    if machine is None:
        return None
    room: float = machine * 1024
    for group in _groups(root):
        for limit, used in _LIMITS:
            most, taken = _number(group / limit), _number(group / used)
            if most is not None and taken is not None:
                room = min(room, max(0, most - taken))
    return int(room)


def _fields(file: Path) -> dict[str, int]:
    try:
        lines = file.read_text().splitlines()
        return {words[0]: int(words[1]) for words in map(str.split, lines) if len(words) > 1}
    except (OSError, ValueError):
        return {}


def _groups(root: Path) -> list[Path]:
    """Return the folders of the memory control groups that the process is in, from its own up."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers in ("", "memory"):
            top = root / "sys/fs/cgroup" / controllers
            own = top / place.strip("/")
            groups += [folder for folder in (own, *own.parents) if folder.is_relative_to(top)]
    return groups


def _number(file: Path) -> float | None:
    try:
        text = file.read_text().strip()
        return math.inf if text == "max" else int(text)
    except (OSError, ValueError):
        return None
