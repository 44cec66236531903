"""Files that are read again while a server runs, when they change: tenants, certificates, options of a router."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["REREAD_S", "keep_reading", "stamp_of"]

REREAD_S = 1.0  # time between two looks at a file, in seconds


def stamp_of(path: str | Path) -> tuple[int, int, int] | None:
    """Return what changes with a file; ``None`` if there is none, as between its removal and the next.

    The number of the file is part of it: a mounted ConfigMap is another file behind the same name.
    """
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


async def keep_reading(reread: Callable[[], None]) -> None:
    """Call ``reread``, which reads files that have changed, on a thread every ``REREAD_S``."""
    while True:
        await asyncio.sleep(REREAD_S)
        await asyncio.to_thread(reread)
