"""Keep the garbage collector from stopping every stream to look at the start-up heap.

With a tokenizer's libraries imported there are 200,000 objects, with torch several times as many, and a full collection
visits them all: some 150 ms on a quiet machine, in which no token leaves. They stay until the process ends, so they are
left out of every collection after the start.
"""

from __future__ import annotations

import gc

__all__ = ["freeze_start_up_heap"]


def freeze_start_up_heap() -> None:
    """Take everything that is there now out of garbage collection; for the moment a process begins to serve."""
    gc.collect()
    gc.freeze()
