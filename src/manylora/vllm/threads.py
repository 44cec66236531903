"""Threads that load adapters beside the engine's thread, with as little harm to its steps as they can."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any

import torch

from manylora.core.types import Tier
from manylora.vllm.messages import Order

__all__ = ["LoadThreads"]

NICE = 5
"""By how much less a thread that loads is worth than the engine's, where cores are short: a third of its share."""
EMPTY_STEP_S = 0.001
"""Duration of a step without requests while loads are under way. vLLM takes the next one at once, and its thread would
take the interpreter and a core from them."""


class LoadThreads:
    """A thread that reads adapters and one that copies them, each first in, first out.

    They give way to the engine's thread, and their operations on tensors run on one core. Else each would have a team
    of OpenMP's as large as the engine's. With more threads than cores, those of all teams sleep at the end of an
    operation and no longer wait for the next: from the first load on, every step is longer. vLLM binds the threads of a
    worker to cores, and those that the engine's thread starts to its own core; these may use all that the parent may.

    Attributes:
        num_under_way: Orders that the engine's thread has taken and not yet seen done.
    """

    def __init__(self) -> None:
        self._pools = {tier: ThreadPoolExecutor(1, initializer=self._begin) for tier in (Tier.HOST, Tier.DEVICE)}
        self._done: SimpleQueue[tuple[Order, str | None]] = SimpleQueue()
        self.num_under_way = 0
        num_threads = torch.get_num_threads()
        for pool in self._pools.values():
            pool.submit(int).result()
        torch._C.set_num_threads(num_threads)  # threads that are started later take the last number that was set

    @staticmethod
    def _begin() -> None:
        torch.get_num_threads()  # a thread's first question sets its number
        torch._C.set_num_threads(1)  # vLLM's workers on CPUs replace ``torch.set_num_threads``
        if sys.platform == "linux":  # there a thread has cores and a priority of its own
            os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
            os.setpriority(os.PRIO_PROCESS, 0, NICE + os.getpriority(os.PRIO_PROCESS, 0))

    def submit(self, order: Order, work: Callable[..., None], *args: Any) -> Future[None]:
        """Start work in the thread of the order's tier."""

        def run() -> None:
            error = None
            try:
                work(order, *args)
            except Exception as raised:  # of any kind: an adapter must not end the engine
                error = f"{type(raised).__name__}: {raised}"
            self._done.put((order, error))

        return self._pools[order.tier].submit(run)

    def done(self, *, waits: bool) -> Iterator[tuple[Order, str | None]]:
        """Yield the orders done and their errors; with ``waits`` there is nothing else to do until one is."""
        waits = waits and self.num_under_way > 0
        while waits or not self._done.empty():
            try:
                done = self._done.get(timeout=EMPTY_STEP_S)
            except Empty:
                return
            waits, self.num_under_way = False, self.num_under_way - 1
            yield done

    def shutdown(self) -> None:
        """End the threads, after the work that they are at."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
