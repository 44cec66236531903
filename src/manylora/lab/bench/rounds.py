"""Sides of a comparison by time, which take turns; and the machine that they were timed on.

The sides take turns within a round, so that both meet the machine at the same speed, and the order rotates, so that
none always runs first.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

__all__ = ["in_turns", "machine", "time_in_turns"]


def in_turns(names: Sequence[str], num_rounds: int, *, num_warm_up: int = 1) -> Iterator[tuple[int, str]]:
    """Yield the number of the round and the name of the side whose turn it is.

    Rounds to warm up have negative numbers; every round begins with another side.
    """
    for number in range(-num_warm_up, num_rounds):
        first = max(0, number) % len(names)
        for name in (*names[first:], *names[:first]):
            yield number, name


def time_in_turns(
    systems: Mapping[str, Callable[[], object]],
    num_rounds: int,
    on_round: Callable[[str, int, float], None] = lambda name, number, seconds: None,
) -> dict[str, list[float]]:
    """Return the seconds of every system in every round, after one round that warms up and does not count.

    ``on_round`` is called after each with the system, the number of the round (-1 does not count) and its seconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for number, name in in_turns(list(systems), num_rounds):
        began = time.perf_counter()
        systems[name]()
        took = time.perf_counter() - began
        on_round(name, number, took)
        if number >= 0:
            seconds[name].append(took)
    return seconds


def machine() -> dict[str, str | int]:
    """Return the processor, its cores, and the versions that matter to speed."""
    versions: dict[str, str | int] = {"python": platform.python_version()}
    for package in ("torch", "numba", "uvicorn", "uvloop", "httptools"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {"cpu": _cpu_name(), "cores": os.cpu_count() or 1, **versions}


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
