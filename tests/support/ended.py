"""Whether a process has ended."""

from __future__ import annotations

import psutil

__all__ = ["is_gone"]


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one without a parent, or that its parent has not asked for, is left as a zombie."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
