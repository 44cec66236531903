"""An in-order stream of a device, as the exchange with CPU workers needs it: copies, and waits for words in memory.

``CudaStream`` (``cuda.py``) is a GPU's. ``ThreadStream`` executes the same operations on a thread. The protocol is
tested with it, and with it a model on a CPU takes the whole path of a GPU.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from manylora.execution.assist.words import Words, await_word, write_word

__all__ = ["DeviceStream", "ThreadStream"]


class DeviceStream(Protocol):
    """The device's stream: one thread enqueues operations, which are executed in order and never block that thread.

    Words and host memory of operations come from ``host_memory``, and live until the operations have been executed.
    """

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Return zeros ``[num_bytes]``, uint8, page-locked and mapped where the device needs that."""
        ...

    def write_value(self, words: Words, index: int, value: int) -> None:
        """Write a word. A thread that sees it sees the copies before it."""
        ...

    def wait_value(self, words: Words, index: int, value: int) -> None:
        """Let the stream go on once the word is at ``value`` or behind it (``protocol.is_reached``)."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between the device and host memory; both are contiguous and of one type."""
        ...

    def join(self) -> None:
        """Let the device's further work come after the operations so far."""
        ...

    def wait(self) -> None:
        """Return once the operations so far have been executed; an error of the device is raised."""
        ...

    def close(self) -> None:
        """Execute the operations and end."""
        ...


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
