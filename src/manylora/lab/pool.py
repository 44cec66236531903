"""Processes for runs of the laboratory: each is one simulation after the other, on a processor of its own."""

from __future__ import annotations

import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from manylora.core.isolation.system import end_with_parent

__all__ = ["start_processes"]


def start_processes(number: int) -> ProcessPoolExecutor:
    """Return a pool of processes, which end with this one, and at once and without a word when a user interrupts."""
    # Started afresh rather than forked: a forked process may inherit a lock that no thread of it will release.
    return ProcessPoolExecutor(number, mp_context=get_context("spawn"), initializer=_begin)


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        end_with_parent()
