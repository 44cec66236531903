"""Run a compiled loop on torch's own OpenMP threads.

A second thread pool beside torch's, such as numba's, is slow on a CPU: after every product torch's threads spin for the
next one, and a second pool would wait for their cores. So a kernel here is a C function compiled by numba, which
``GOMP_parallel`` of torch's own library runs: the spinning threads take it, in about three microseconds.

Only imported where numba is installed (``support.find_compiled``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding  # type: ignore[import-untyped]
import numpy as np
import torch
from numba import carray, cfunc, types

__all__ = [
    "FAST_MATH",
    "Arguments",
    "Team",
    "barrier",
    "compile_kernel",
    "num_threads",
    "open_team",
    "point_to",
    "run_here",
    "thread_num",
]

FAST_MATH = {"reassoc", "contract", "nsz"}  # sums may be taken in any order; NaN and infinity keep their meaning

# By name, not by address, so that numba can cache compiled kernels on disk between processes.
thread_num = types.ExternalFunction("omp_get_thread_num", types.int32())
num_threads = types.ExternalFunction("omp_get_num_threads", types.int32())
barrier = types.ExternalFunction("GOMP_barrier", types.void())

Arguments = tuple[np.ndarray | torch.Tensor | int, ...]
"""Arguments of a kernel: contiguous arrays, and addresses as numbers."""

_HERE = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)

_compiled: list[Any] = []  # kept alive with the process, since their addresses are in use


class Team:
    """Torch's OpenMP threads, in the runtime that torch loaded."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._parallel = library.GOMP_parallel
        self._parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self._parallel.restype = None

    def run(self, kernel: int, *arrays: np.ndarray | torch.Tensor | int) -> None:
        """Call ``kernel`` (from ``compile_kernel``) on every thread with pointers to contiguous ``arrays``.

        A number among them is an address. Returns when all threads are done; the interpreter lock is free meanwhile.
        """
        self._parallel(kernel, point_to(arrays), torch.get_num_threads(), 0)


def point_to(arguments: Arguments) -> ctypes.Array[ctypes.c_void_p]:
    """Return pointers to ``arguments``, which must live as long as the pointers are in use."""
    addresses = [
        a.data_ptr() if isinstance(a, torch.Tensor) else a if isinstance(a, int) else a.ctypes.data for a in arguments
    ]
    return (ctypes.c_void_p * len(addresses))(*addresses)


def run_here(kernel: int, *arrays: np.ndarray | int) -> None:
    """Call ``kernel`` as ``Team.run`` does, but on this thread alone, which keeps the interpreter lock: it is short."""
    _HERE(kernel)(point_to(arrays))


def open_team(library: Path) -> Team | None:
    """Return the threads of an OpenMP runtime, ``None`` if they are not torch's.

    Two runtimes in one process have functions of the same names. A kernel with functions of the wrong one would run all
    work on one thread, or on every thread.
    """
    llvmlite.binding.load_library_permanently(str(library))
    team = Team(ctypes.CDLL(str(library)))
    seen = np.zeros(torch.get_num_threads(), dtype=np.int64)
    team.run(compile_kernel(_note), np.array([seen.size]), seen)
    return team if bool((seen == seen.size).all()) else None


@cache
def compile_kernel(entry: Callable[[Any], None]) -> int:
    """Compile ``entry(pointers)``, where ``pointers[i]`` is array ``i``, once; return its address for ``Team.run``."""
    compiled = cfunc(types.void(types.CPointer(types.voidptr)), cache=True)(entry)
    _compiled.append(compiled)
    return int(compiled.address)


def _note(pointers: Any) -> None:
    seen = carray(pointers[1], carray(pointers[0], 1, np.int64)[0], np.int64)
    seen[thread_num()] += num_threads()
