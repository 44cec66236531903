"""How many workers an engine may keep spinning: its part of the cores that its processes may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

from manylora.execution.storage.control_groups import groups_around, read_numbers

__all__ = ["count_cores", "count_workers"]

MAX_WORKERS = 16


def count_cores(root: Path = Path("/")) -> int:
    """Return the cores that this process may use: by its affinity, and by the quota of each control group around it.

    Args:
        root: Root of the file system.
    """
    num_cores: float = len(os.sched_getaffinity(0))
    for group in groups_around(root, "cpu"):
        limit = read_numbers(group / "cpu.max")  # quota and period of version 2; of version 1 in a file each
        limit = limit or [*read_numbers(group / "cpu.cfs_quota_us"), *read_numbers(group / "cpu.cfs_period_us")]
        if len(limit) == 2 and limit[0] > 0 and limit[1] > 0:
            num_cores = min(num_cores, limit[0] / limit[1])
    return max(1, math.floor(num_cores))


def count_workers(num_engines: int = 1) -> int:
    """Return the number of workers: an engine's part of the cores, without those of its step and its other threads.

    Args:
        num_engines: Engines that share the machine.
    """
    return max(1, min(MAX_WORKERS, count_cores() // num_engines - 2))
