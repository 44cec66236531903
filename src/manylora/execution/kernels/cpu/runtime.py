"""The OpenMP runtime that torch brings along: GNU's, whose threads wait for the next parallel region by spinning.

A process has a pool of threads for every thread that has run a parallel region. Once all pools together have more
threads than there are processors, libgomp hardly spins any more, and each region of a step waits for its threads to be
woken.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

__all__ = ["release_threads", "runtime_library"]

_SOFT = 1  # omp_pause_soft: what threads keep for themselves may stay


def runtime_library() -> Path | None:
    """Return torch's own GNU OpenMP, ``None`` if it brings none or several."""
    root = Path(torch.__file__).parent
    libraries = [*root.glob("lib/libgomp*"), *root.parent.glob("torch.libs/libgomp*")]
    return libraries[0] if len(libraries) == 1 else None


def release_threads() -> None:
    """End the OpenMP threads of the calling thread, outside a parallel region; its next region starts new ones.

    The thread that loads and checks a model is not the one that runs steps. Without the pools of both, offline tokens
    per second are 1.07 to 1.09 times as many on two processors (``bench/results/openmp_threads.md``).
    """
    library = runtime_library()
    if library is None:
        return
    pause = getattr(ctypes.CDLL(str(library)), "omp_pause_resource_all", None)  # since GCC 9
    if pause is not None:
        pause(_SOFT)
