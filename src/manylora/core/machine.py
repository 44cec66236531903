"""The memory and the cores that this process may take: the machine's, or the limits of the tightest control group.

A container's limits are those of its control groups, of version 1 or 2; other systems than Linux have none. Every
function takes ``root``, the root of the file system.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["available_bytes", "count_cores", "most_bytes"]

_MEMORY_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Files of a control group's limit and use, by its version 2 and 1."""


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process could take without swapping; ``None`` where the system does not tell.

    It is the least of the memory that the machine has available and of the room in each control group.
    """
    return _least_bytes(root, "MemAvailable:", lambda limit, used: max(0, limit - used))


def most_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process could take if it ran alone; ``None`` where the system does not tell.

    It is the least of the machine's memory and of the limits of the control groups.
    """
    return _least_bytes(root, "MemTotal:", lambda limit, used: limit)


def count_cores(root: Path = Path("/")) -> int:
    """Return the cores that this process may use: by its affinity, and by the quota of each control group."""
    num_cores: float = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _groups_around(root, "cpu"):
        limit = _numbers(group / "cpu.max")  # quota and period of version 2; version 1 has a file for each
        limit = limit or [*_numbers(group / "cpu.cfs_quota_us"), *_numbers(group / "cpu.cfs_period_us")]
        if len(limit) == 2 and limit[0] > 0 and limit[1] > 0:
            num_cores = min(num_cores, limit[0] / limit[1])
    return max(1, math.floor(num_cores))


def _least_bytes(root: Path, field: str, room_in: Callable[[float, float], float]) -> int | None:
    try:
        lines = map(str.split, (root / "proc/meminfo").read_text().splitlines())
        room: float = 1024 * {words[0]: int(words[1]) for words in lines if len(words) > 1}[field]
    except (OSError, ValueError, KeyError):
        return None
    for group in _groups_around(root, "memory"):
        for limit, used in _MEMORY_FILES:
            for numbers in zip(_numbers(group / limit), _numbers(group / used), strict=False):
                room = min(room, room_in(*numbers))
    return int(room)


def _groups_around(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of a controller's groups that the process is in, from its own up."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controllers
            own = top / place.strip("/")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(top))


def _numbers(file: Path) -> list[float]:
    """Return the numbers in a file, infinite for ``max``; none if there is no such file, or it holds anything else."""
    try:
        return [math.inf if word == "max" else int(word) for word in file.read_text().split()]
    except (OSError, ValueError):
        return []
