"""The memory that this process may take, for the default size of the host tier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from manylora.execution.storage.control_groups import groups_around, read_numbers

__all__ = ["HOST_SHARE", "available_bytes", "most_bytes"]

HOST_SHARE = 0.25
"""Share of the available memory that adapters take by default, in all engines of the machine together; the rest is for
pages, processes and file caches."""

_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Files of a control group's limit and use, by its version 2 and 1."""


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process could take without swapping; ``None`` where the system does not tell.

    It is the least of the memory that the machine has available and of the room in each control group around the
    process, a container's for example.

    Args:
        root: Root of the file system.
    """
    return _least(root, "MemAvailable:", lambda most, taken: max(0, most - taken))


def most_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process could take if it were alone; ``None`` where the system does not tell.

    It is the least of the machine's memory and of the limits of the control groups around the process.

    Args:
        root: Root of the file system.
    """
    return _least(root, "MemTotal:", lambda most, taken: most)


def _least(root: Path, field: str, room_in: Callable[[float, float], float]) -> int | None:
    machine = _fields(root / "proc/meminfo").get(field)
    if machine is None:
        return None
    room: float = machine * 1024
    for group in groups_around(root, "memory"):
        for limit, used in _LIMITS:
            for most, taken in zip(read_numbers(group / limit), read_numbers(group / used), strict=False):
                room = min(room, room_in(most, taken))
    return int(room)


def _fields(file: Path) -> dict[str, int]:
    try:
        lines = file.read_text().splitlines()
        return {words[0]: int(words[1]) for words in map(str.split, lines) if len(words) > 1}
    except (OSError, ValueError):
        return {}
