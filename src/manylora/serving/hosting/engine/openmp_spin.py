"""How long OpenMP threads of an engine spin for their next work before they sleep.

libgomp's threads spin for milliseconds after every parallel region. Where more threads want to run than there are
processors, each takes its whole time slice for that, and the one that it waits for cannot run. Isolated functions share
their processors with many others, and a server's engine with its API process and often with clients.
``bench/functions_cold.py`` with ``GOMP_SPINCOUNT=300000``, libgomp's own choice, shows it.
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
