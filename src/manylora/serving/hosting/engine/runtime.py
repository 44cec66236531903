"""Settings of Python and OpenMP for a process that serves.

Gc visits no start-up heap: with a tokenizer's libraries imported there are 200,000 objects, with torch several times as
many, and a full collection of them takes some 150 ms on a quiet machine, in which no token is sent.

OpenMP threads do not spin for long: libgomp's threads spin for milliseconds after every parallel region. Where more
threads want to run than there are processors, each takes its whole time slice for that, and the thread that it waits
for cannot run. Isolated functions share their processors with many others, and a server's engine with its API process
and often with clients. ``bench/functions_cold.py`` with ``GOMP_SPINCOUNT=300000``, libgomp's own choice, shows it.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["SPIN_COUNT", "bound_spinning", "collector_paused", "freeze_imports", "freeze_start_up_heap"]

SPIN_COUNT = 100
"""Rounds of a spinning thread: some microseconds."""


def bound_spinning() -> None:
    """Bound the spinning of OpenMP threads in this process, unless its environment has a setting for it.

    Call it before torch is imported, which reads the environment once.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))


@contextmanager
def collector_paused() -> Iterator[None]:
    """Run imports without gc: they leave no unreachable objects, and collections take a fifth of their time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def freeze_imports() -> None:
    """Exclude the objects of imports from gc, without a search for unreachable ones; for a process of our own.

    The collection at the end of the start then visits a fraction of the heap.
    """
    gc.freeze()


def freeze_start_up_heap() -> None:
    """Exclude all present objects from gc; called when a process starts to serve."""
    gc.collect()
    gc.freeze()
