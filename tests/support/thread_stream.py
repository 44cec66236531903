"""A device's stream on a thread: the exchange is tested with it, and a model on a CPU takes the whole path of a GPU."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import numpy as np
import torch
from numba import njit, types

from manylora.execution.assist.words import Words, is_reached, pause, write_word
from manylora.execution.kernels.cpu.atomics import load_word


@njit(types.void(types.uint32[::1], types.int64, types.int64), nogil=True, cache=True)  # type: ignore[untyped-decorator]
def await_word(words: Words, index: int, number: int) -> None:
    """Return once a word is at ``number`` or behind it."""
    spins = 0
    while not is_reached(np.int64(load_word(words, index)), number):
        spins = pause(spins)


class ThreadStream:
    """A stream whose device is a thread.

    A CPU's own work does not go through a stream, so ``join`` returns when the operations have been executed.
    """

    def __init__(self) -> None:
        self._operations: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._execute, name="manylora-stream", daemon=True)
        self._thread.start()

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Return zeros, in memory of any kind."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def write_value(self, words: Words, index: int, value: int) -> None:
        """Enqueue the write of a word."""
        self._operations.put(lambda: write_word(words, index, value))

    def wait_value(self, words: Words, index: int, value: int) -> None:
        """Enqueue a wait for a word."""
        self._operations.put(lambda: await_word(words, index, value))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy."""
        self._operations.put(lambda: np.copyto(target.numpy(), source.numpy()))

    def join(self) -> None:
        """Wait until the operations so far have been executed."""
        self.wait()

    def wait(self) -> None:
        """Wait until the operations so far have been executed."""
        is_done = threading.Event()
        self._operations.put(is_done.set)
        is_done.wait()

    def close(self) -> None:
        """Execute the operations and end the thread."""
        self._operations.put(None)
        self._thread.join()

    def _execute(self) -> None:
        while (operation := self._operations.get()) is not None:
            operation()
