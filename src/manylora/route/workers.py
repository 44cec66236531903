"""Workers of a router: processes that accept on one port, started again when they end.

::

    parent   binds the port, forks, waits for signals      +-- worker 0   an event loop, a whole router
             passes SIGHUP on, and the end as a pipe's  ---+-- worker 1   ...
             starts a worker again that has ended          +-- ...

Each worker has a socket of its own on the port (SO_REUSEPORT), so that the kernel deals connections out evenly; the
parent holds all of them, so that connections outlive a worker that did not accept them yet. A worker is a fork: it is
there in milliseconds, and hashes text as the others do, which their account of prefixes needs. The parent has no thread
and no event loop. Worker 0 starts alone, so that a mistake in the options is told once; the others follow when it is
ready.

A pipe from the parent ends at the first SIGTERM or SIGINT, and with the parent: workers drain then. A signal would end
a worker that has yet to learn what it means, and come twice where a service manager sends its own to every process; the
second one means at once.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from manylora.serving.http.listening import EXIT_FORCED

__all__ = ["RouteWorker", "start_workers"]

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGALRM)
READY = signal.SIGUSR1  # what the first worker sends its parent once it is ready
LEAST_LIFE_S = 1.0
"""A worker that ended sooner waits with others for an alarm after that time, and is started again then."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RouteWorker:
    """One worker, in its own process."""

    number: int  # from 0 on
    num_workers: int  # in all
    folder: Path  # has a Unix socket of each, by its number
    bound: socket.socket  # its socket on the port
    is_again: bool  # whether others run already
    parent: int  # a pipe that ends when the worker is to drain, and with the parent

    @property
    def others(self) -> list[int]:
        """The numbers of the other workers."""
        return [number for number in range(self.num_workers) if number != self.number]

    def path(self, number: int) -> str:
        """Return the path of a worker's Unix socket."""
        return str(self.folder / str(number))

    def say_ready(self) -> None:
        """Let the parent start the others."""
        if self.number == 0 and not self.is_again:
            os.kill(os.getppid(), READY)


def start_workers(num_workers: int, bind: Callable[[], list[socket.socket]]) -> RouteWorker | int:
    """Start workers, and return twice: in each worker as soon as it runs, in this process once all have ended.

    Call it from the main thread of a process without other threads.

    Args:
        num_workers: Their number.
        bind: Returns a socket on the port for each.

    Returns:
        The worker, or the exit code: 0 after a graceful stop.
    """
    return _Parent(num_workers, bind(), Path(tempfile.mkdtemp(prefix="manylora-route-"))).run()


@dataclass(slots=True, eq=False)
class _Parent:
    """Starts workers and passes signals on to them."""

    num_workers: int
    sockets: list[socket.socket]
    folder: Path
    _held: int = -1  # the parent's end of the pipe
    _running: dict[int, tuple[int, float]] = field(default_factory=dict)  # number and start by process
    _waiting: list[int] = field(default_factory=list)  # those that ended too soon, until the next alarm
    _is_ready: bool = False  # the first worker was ready once
    _is_stopping: bool = False
    _code: int = 0

    def run(self) -> RouteWorker | int:
        """Return in each worker, and here when all have ended."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        life, self._held = os.pipe()
        missing = [0]
        while True:
            for number in missing:
                if (pid := os.fork()) == 0:
                    os.close(self._held)
                    return self._worker(number, life)
                self._running[pid] = number, time.monotonic()
            missing = []
            if not (self._running or self._waiting):
                break
            received = signal.sigwait(SIGNALS)
            if received == signal.SIGCHLD:
                missing = self._ended()
            elif received == signal.SIGALRM:
                missing, self._waiting = self._waiting, []
            elif received == READY:
                missing = [] if self._is_ready or self._is_stopping else list(range(1, self.num_workers))
                self._is_ready = True
            elif received == signal.SIGHUP:
                self._send(received)
            elif self._is_stopping:
                self._code = EXIT_FORCED
                self._send(signal.SIGKILL)
            else:
                self._stop()
        shutil.rmtree(self.folder, ignore_errors=True)
        return self._code

    def _worker(self, number: int, life: int) -> RouteWorker:
        os.setpgid(0, 0)  # else a terminal's interrupt comes twice, which means at once
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is a file to read again
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        for other, one in enumerate(self.sockets):
            if other != number:
                one.close()
        return RouteWorker(number, self.num_workers, self.folder, self.sockets[number], self._is_ready, life)

    def _stop(self) -> None:
        self._is_stopping = True
        self._waiting.clear()
        for one in self.sockets:  # held here, connections would wait for workers that accept no more
            one.close()
        os.close(self._held)

    def _send(self, number: int) -> None:
        for pid in self._running:
            os.kill(pid, number)

    def _ended(self) -> list[int]:
        """Take note of workers that ended; return those to start again now."""
        again = []
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            number, started_at = self._running.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            if self._is_stopping or not self._is_ready:
                self._code = self._code or abs(code)
                continue
            logger.error("worker_ended worker=%d code=%d", number, code)
            if time.monotonic() - started_at >= LEAST_LIFE_S:
                again.append(number)
                continue
            if not self._waiting:
                signal.setitimer(signal.ITIMER_REAL, LEAST_LIFE_S)
            self._waiting.append(number)
        return again
