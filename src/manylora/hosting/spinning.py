"""How long OpenMP threads of an engine spin for their next work before they sleep.

libgomp's threads spin for milliseconds after every parallel region. Where more threads want to run than there are
processors, each takes its whole time slice for that, and the one that it waits for cannot run: sixteen isolated
functions with two threads each, on two processors, answered a request after 14 s instead of 0.2 s. A server's clients
and its API process want to run, too. Spinning for some tenths of a millisecond made its tokens per second on two
processors 1.03 times as many, and 0.4 times as many beside one other busy process.
"""

from __future__ import annotations

import os

__all__ = ["SPIN_COUNT", "bound_spinning"]

SPIN_COUNT = 100
"""Rounds of a spinning thread: some microseconds."""


def bound_spinning() -> None:
    """Bound it for this process, unless its environment says how; before torch is imported, which reads that once."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
