"""A device's stream on a thread: the exchange is tested with it, and a model on a CPU takes the whole path of a GPU."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import numpy as np
import torch

from manylora.execution.assist.words import Words, await_word, write_word


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
