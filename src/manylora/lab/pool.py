"""Processes for runs of the laboratory: each is one simulation after the other, on a processor of its own."""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

__all__ = ["start_processes"]


def start_processes(number: int) -> ProcessPoolExecutor:
    """Return a pool of processes; submit to it on this thread alone.

    They end without a word when a user interrupts, once they have begun. On Linux they end with this thread as well.
    """
    # Started afresh rather than forked: a forked process may inherit a lock that no thread of it will release.
    return ProcessPoolExecutor(number, mp_context=get_context("spawn"), initializer=_begin, initargs=(os.getpid(),))


def _begin(parent: int) -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as of a command in the background of a script
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        from manylora.core.isolation.system import end_with_parent

        end_with_parent()
        if os.getppid() != parent:  # it ended before
            os._exit(1)
