"""A worker's loop in Python, with faults at chosen exchanges."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from manylora.execution.assist import protocol
from manylora.execution.assist.protocol import MODULUS, STEP
from manylora.execution.assist.words import DONE, LAST, POSTED, Words, read_word, swap_word

DIE, STICK = "die", "stick"


class FaultySource:
    """Serves like ``words.serve``; the exchange of a number in ``faults``, counted over all workers, goes wrong.

    ``during`` is called within each exchange, with its number.
    A worker that sticks computes its exchange once ``may_go`` is set; then it finds that it is held.
    """

    def __init__(self, faults: dict[int, str], during: Callable[[int], None] = lambda number: None) -> None:
        self.faults = faults
        self._during = during
        self.may_go = threading.Event()
        self.has_left = threading.Event()
        self.num_served = 0
        self._lock = threading.Lock()

    def __call__(self, words: Words, tasks: NDArray[Any], number: int) -> int:
        while True:
            posted, last = read_word(words, POSTED), read_word(words, LAST)
            action = protocol.decide(posted, read_word(words, DONE), last, number)
            if action == protocol.SERVE:
                with self._lock:
                    served = self.num_served
                    self.num_served += 1
                fault = self.faults.get(served)
                self._during(served)
                if fault == DIE:
                    raise RuntimeError("a fault of the test")
                if fault == STICK:
                    self.may_go.wait()
                run_task(tasks[number // STEP % len(tasks)])
                coming = (number + STEP) % MODULUS
                if not swap_word(words, DONE, number, coming):
                    self.has_left.set()
                    return -1
                number = coming
            elif action == protocol.POLL:
                time.sleep(1e-4)
            else:
                return number if action == protocol.REST else -1


def run_task(task: NDArray[Any]) -> None:
    result, num_bytes, *kernels = (int(field) for field in task)
    ctypes.memset(result, 0, num_bytes)
    for kernel, pointers in zip(kernels[::2], kernels[1::2], strict=True):
        if kernel:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel)(pointers)
