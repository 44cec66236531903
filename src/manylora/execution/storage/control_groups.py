"""The control groups that this process is in, a container's for example: where the limits on its resources are."""

from __future__ import annotations

import math
from pathlib import Path

__all__ = ["groups_around", "read_numbers"]


def groups_around(root: Path, controller: str) -> list[Path]:
    """Return the folders of a controller's groups that the process is in, from its own up; of versions 1 and 2.

    Args:
        root: Root of the file system.
        controller: Its name, as ``memory``.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controllers
            own = top / place.strip("/")
            groups += [folder for folder in (own, *own.parents) if folder.is_relative_to(top)]
    return groups


def read_numbers(file: Path) -> list[float]:
    """Return the numbers in a file, infinite for ``max``; none if there is no such file, or it holds anything else."""
    try:
        return [math.inf if word == "max" else int(word) for word in file.read_text().split()]
    except (OSError, ValueError):
        return []
