"""Work of rows on threads, within a budget of processor time: a row that goes over it is left behind.

::

    step's thread   begin | model ................ | finish: waits, and looks at the rows' clocks
    workers               |- row -|- row -|- row ----- over its budget: ended, its thread left behind
                                                  |- row -|    on the thread that takes its place

A call of a compiled library cannot be stopped. So a row over its budget counts as ended, its thread goes on at the
lowest priority until the call returns, and another thread takes its place. Budgets are processor time of the row's own
thread: a machine that is busy with other work ends no row.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["MAX_ROW_S", "MAX_STEP_S", "TOKEN_S", "RowWork", "TimeAccount"]

TOKEN_S = 2e-3
"""Processor time in seconds that a row may take for each token. Schemas take 20 to 100 us over 100,000 tokens, and the
dearest of their steps 3 ms."""

MAX_ROW_S = 10e-3  # processor time in seconds that a row may be over ``TOKEN_S``, saved up over its tokens
MAX_STEP_S = 20e-3  # processor time in seconds that all rows of a step together may be over ``TOKEN_S``

MAX_WORKERS = 8
POLL_S = 1e-3
IDLE_S = 10.0  # seconds without rows after which a thread ends: an engine that was closed leaves none behind

Clock = Callable[[], float]


@dataclass(slots=True, eq=False)
class TimeAccount:
    """The processor time that a row has left over: ``MAX_ROW_S`` at first, and at most."""

    left_s: float = MAX_ROW_S
    is_over: bool = False

    def take(self, over_s: float) -> None:
        """Take the time by which the row was over ``TOKEN_S``, negative if it was below."""
        self.left_s = min(MAX_ROW_S, self.left_s - over_s)
        self.is_over = self.is_over or self.left_s < 0


@dataclass(slots=True, eq=False)
class _Row:
    run: Callable[[], None]
    account: TimeAccount
    free_s: float
    clock: Clock | None = None  # the clock of its thread, while it runs
    began_s: float = 0.0

    def over_s(self) -> float:
        return -self.free_s if self.clock is None else self.clock() - self.began_s - self.free_s


class RowWork:
    """Runs the rows of one step at a time; ``begin`` and ``finish`` are for one thread.

    Args:
        make_clock: Returns the clock of the calling thread's processor time, which other threads may read.
    """

    def __init__(self, make_clock: Callable[[], Clock] | None = None) -> None:
        self._make_clock = make_clock or _thread_clock
        self._changed = threading.Condition()  # guards all below
        self._waiting: deque[_Row] = deque()
        self._running: dict[threading.Thread, _Row] = {}
        self._workers: set[threading.Thread] = set()  # without those left behind
        self._over_s = 0.0

    def begin(self, rows: Sequence[tuple[Callable[[], None], TimeAccount, int]]) -> None:
        """Begin the rows of a step: their work, which never raises, their account and the number of their tokens."""
        with self._changed:
            self._over_s = 0.0
            self._waiting.extend(_Row(run, account, num_tokens * TOKEN_S) for run, account, num_tokens in rows)
            self._hire()
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait for the rows; those that go over their budget are ended (``TimeAccount.is_over``)."""
        with self._changed:
            while self._waiting or self._running:
                if not self._changed.wait(POLL_S):
                    self._leave_behind()

    def _hire(self) -> None:
        wanted = min(MAX_WORKERS, os.cpu_count() or 1, len(self._waiting) + len(self._running))
        while len(self._workers) < wanted:
            worker = threading.Thread(target=self._work, name="manylora-masks", daemon=True)
            self._workers.add(worker)
            worker.start()

    def _leave_behind(self) -> None:
        """End the running rows that are over their budget, and those over ``TOKEN_S`` if the step is over its own."""
        over = {worker: row.over_s() for worker, row in self._running.items()}
        spent_s = self._over_s + sum(max(0.0, one) for one in over.values())
        for worker, over_s in over.items():
            account = self._running[worker].account
            if over_s > account.left_s or (over_s > 0 and spent_s > MAX_STEP_S):
                account.is_over = True
                self._over_s += over_s
                del self._running[worker]
                self._workers.discard(worker)
                _lower_priority(worker)
        self._hire()

    def _work(self) -> None:
        clock, me = self._make_clock(), threading.current_thread()
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._waiting, IDLE_S):
                    self._workers.remove(me)
                    return
                row = self._running[me] = self._waiting.popleft()
                row.began_s, row.clock = clock(), clock
            row.run()
            with self._changed:
                if self._running.pop(me, None) is None:
                    return  # left behind
                over_s = row.over_s()
                row.account.take(over_s)
                self._over_s += max(0.0, over_s)
                if not (self._waiting or self._running):
                    self._changed.notify_all()


def _thread_clock() -> Clock:
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic
    clock = time.pthread_getcpuclockid(threading.get_ident())
    return lambda: time.clock_gettime(clock)


def _lower_priority(worker: threading.Thread) -> None:
    if hasattr(os, "setpriority") and worker.native_id is not None:
        try:
            os.setpriority(os.PRIO_PROCESS, worker.native_id, 19)  # of a thread, on Linux
        except OSError:  # it has ended
            return
