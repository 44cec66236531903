"""How long OpenMP threads of an engine spin for their next work before they sleep.

libgomp's threads spin for milliseconds after every parallel region. Where more threads want to run than there are
processors, each takes its whole time slice for that, and the one that it waits for cannot run: sixteen isolated
functions with two threads each, on two processors, answered a request after 14 s instead of 0.2 s.
"""

from __future__ import annotations

import os

__all__ = ["ALONE", "AMONG_MANY", "bound_spinning"]

ALONE = 10_000
"""Rounds in an engine with processors of its own: some tenths of a millisecond, as gaps between a step's regions."""

AMONG_MANY = 0
"""Rounds in one of many engines on the same processors. Alone there, its steps take about 1.3 times as long."""


def bound_spinning(num_rounds: int) -> None:
    """Bound it for this process, unless its environment says how; before torch is imported, which reads that once."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(num_rounds))
