"""A worker's words, and the compiled loops that read, write and await them without the interpreter lock.

Only imported where numba is installed (``kernels.cpu.support.find_compiled``).
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit, types
from numpy.typing import NDArray

from manylora.execution.assist import protocol
from manylora.execution.assist.protocol import MODULUS, POLL, REST, SERVE, STEP
from manylora.execution.kernels.cpu.atomics import (
    call,
    compare_exchange,
    load_word,
    pointer_to,
    relax,
    store_word,
    yield_core,
)

__all__ = [
    "DONE",
    "LAST",
    "NUM_WORDS",
    "POSTED",
    "RESULT",
    "RESULT_BYTES",
    "TASK_FIELDS",
    "Words",
    "is_reached",
    "pause",
    "read_word",
    "serve",
    "swap_word",
    "write_word",
]

Words = NDArray[np.uint32]  # words on the host that the stream, a worker and other threads read and write
POSTED, DONE, LAST, NUM_WORDS = 0, 16, 32, 48  # places of a worker's words: each in a cache line of its own

RESULT, RESULT_BYTES, FIRST_KERNEL, FIRST_POINTERS, SECOND_KERNEL, SECOND_POINTERS, TASK_FIELDS = range(7)
"""Fields of a task: the result, which is zeroed first, and up to two kernels with their arguments; 0 for none."""

SPINS = 1000  # looks at a word until the core is offered to other threads: about 30 us

_WORDS, _WORD = types.uint32[::1], types.int64
# With their types, so that they are compiled (or read from numba's cache) at the import, and not within a step.
is_reached = njit(types.boolean(_WORD, _WORD), cache=True)(protocol.is_reached)
decide = njit(_WORD(_WORD, _WORD, _WORD, _WORD), cache=True)(protocol.decide)


@njit(_WORD(_WORDS, _WORD), nogil=True, cache=True)  # type: ignore[untyped-decorator]
def read_word(words: Words, index: int) -> int:
    """Return a word."""
    return np.int64(load_word(words, index))  # type: ignore[return-value]


@njit(types.void(_WORDS, _WORD, _WORD), nogil=True, cache=True)  # type: ignore[untyped-decorator]
def write_word(words: Words, index: int, value: int) -> None:
    """Write a word."""
    store_word(words, index, np.uint32(value))


@njit(types.boolean(_WORDS, _WORD, _WORD, _WORD), nogil=True, cache=True)  # type: ignore[untyped-decorator]
def swap_word(words: Words, index: int, expected: int, value: int) -> bool:
    """Write a word if it is ``expected``, in one step; return whether it was."""
    return compare_exchange(words, index, np.uint32(expected), np.uint32(value))  # type: ignore[no-any-return]


@njit(_WORD(_WORD), nogil=True, cache=True)  # type: ignore[untyped-decorator]
def pause(spins: int) -> int:
    """Wait for a moment between two looks at a word; return the number of pauses."""
    relax()
    if spins > SPINS:
        yield_core()
    return spins + 1


@njit(_WORD(_WORDS, types.int64[:, ::1], _WORD), nogil=True, cache=True)  # type: ignore[untyped-decorator]
def serve(words: Words, tasks: NDArray[np.int64], number: int) -> int:
    """Serve exchanges after ``number``; return the last one at the end of the step, or -1 once the worker is held.

    Args:
        words: The worker's.
        tasks: Ring ``[n, TASK_FIELDS]``; n is a power of two.
        number: The last completed exchange.
    """
    spins = 0
    while True:
        posted = np.int64(load_word(words, POSTED))
        last = np.int64(load_word(words, LAST))
        action = decide(posted, np.int64(load_word(words, DONE)), last, number)
        if action == SERVE:
            task = tasks[number // STEP % len(tasks)]
            carray(pointer_to(task[RESULT]), task[RESULT_BYTES], np.uint8)[:] = 0
            if task[FIRST_KERNEL] != 0:
                call(task[FIRST_KERNEL], task[FIRST_POINTERS])
            if task[SECOND_KERNEL] != 0:
                call(task[SECOND_KERNEL], task[SECOND_POINTERS])
            coming = (number + STEP) % MODULUS
            if not compare_exchange(words, DONE, np.uint32(number), np.uint32(coming)):
                return -1
            number, spins = coming, 0
        elif action == POLL:
            spins = pause(spins)
        else:
            return number if action == REST else -1
