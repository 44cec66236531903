"""Readings of processes: processor time and memory, as the kernel counts them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

__all__ = ["MemoryReading", "cpu_ns", "memory_of"]

_CPU_CLOCK = 2  # CPUCLOCK_SCHED: the process's, with threads that have ended


class MemoryReading(NamedTuple):
    """Memory of a process, in bytes."""

    pss: int  # proportional set size: pages that are shared count by the number of sharers
    # Memory that is not a file and that no other process shares, neither the base nor the zygote's, and memory that it
    # has mapped to be shared beside the base: no process but it can have that.
    own: int
    anonymous: int  # memory that is not a file, shared or not


def cpu_ns(pid: int) -> int | None:
    """Return the processor time that a process has used, in nanoseconds; ``None`` if it has ended."""
    try:
        return time.clock_gettime_ns((~pid << 3) | _CPU_CLOCK)
    except OSError:
        return None


def memory_of(pid: int, num_sharers: int = 2, inherited_bytes: int = 0, base_bytes: int = 0) -> MemoryReading | None:
    """Return the memory of a process that shares a zygote's pages with others; ``None`` if it has ended.

    The kernel tells the sum of own and shared pages, and their sum with shared ones divided by their sharers. A process
    that hides its memory shows its map to root alone; for others, resident pages that are not of files count, less
    those that it was forked with (``inherited_bytes``), whichever of them it has written since. The base, which it has
    mapped, is no memory of its own.
    """
    shared_own = max(0, _shared_bytes(pid) - base_bytes)
    try:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
        part, whole = _bytes(fields["Pss_Anon"]), _bytes(fields["Anonymous"])
        own = (part * num_sharers - whole) // max(1, num_sharers - 1)
        return MemoryReading(_bytes(fields["Pss"]), min(part, max(1, own)) + shared_own, whole)
    except (PermissionError, KeyError):
        pass
    except (OSError, ValueError):
        return None
    try:
        _, resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[:3]
    except (OSError, ValueError):
        return None
    anonymous = (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
    own = max(1, anonymous - inherited_bytes) + shared_own
    return MemoryReading(own, own, anonymous)


def _shared_bytes(pid: int) -> int:
    """Return the memory that a process has mapped to be shared: the base, and what it shares itself; 0 once it ended.

    The kernel tells it to every user. Pages in use count, so a base that is not all in use hides as much of the rest.
    The first line has a name that the process chose, of any bytes but a newline.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_bytes().split(b"\n")
    except OSError:
        return 0
    return next((_bytes(line.decode().partition(":")[2]) for line in lines if line.startswith(b"RssShmem:")), 0)


def _bytes(text: str) -> int:
    return int(text.split()[0]) * 1024
