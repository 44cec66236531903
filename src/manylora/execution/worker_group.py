"""The processes of the workers that share a model with worker 0, from their start to their end.

A worker that ends, or gives no sign of life for ``PATIENCE_S`` after its first, ends the engine: the others are killed,
so that no collective waits for them, and the step in flight raises. The fleet then starts another engine, where streams
go on.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import TimeoutExpired

from manylora.core.clock import Clock
from manylora.core.config import EngineConfig
from manylora.core.errors import ConfigError, EngineDead
from manylora.core.isolation.confine import start_on_pipe
from manylora.core.machine import count_cores
from manylora.core.ports import EngineParts
from manylora.execution.collectives import PATIENCE_S, Collectives, Store, file_store
from manylora.execution.executor import TorchExecutor
from manylora.execution.peers import Answer, Failed, Here, Loaded, Message, SharedExecutor

__all__ = ["WorkerGroup", "WorkerSetup"]

logger = logging.getLogger(__name__)

WORKER = "manylora.execution.worker_process"
CLOSE_S = 5.0  # time for a worker to end by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """What a worker gets to start."""

    config: EngineConfig
    rank: int
    store: str  # the file where the workers meet
    log_level: int


class WorkerGroup:
    """The processes of workers 1 to N-1; for the process of worker 0, with ``tensor_parallel_size`` above 1.

    ``OSError`` if a process could not be started.
    """

    def __init__(self, config: EngineConfig, clock: Clock) -> None:
        size = config.model.tensor_parallel_size
        self._clock = clock
        self._folder = tempfile.TemporaryDirectory(prefix="manylora-workers-")
        self._store = str(Path(self._folder.name) / "store")
        self._executor: SharedExecutor | None = None
        self._lost: Failed | None = None
        self._changed = threading.Condition()
        self._num_loaded = 0
        self._is_closing = False
        self.workers = Collectives(self._meet, 0, size)
        self._processes: list[_WorkerProcess] = []
        level = logging.getLogger().getEffectiveLevel()
        for rank in range(1, size):
            setup = WorkerSetup(config=config, rank=rank, store=self._store, log_level=level)
            self._processes.append(_WorkerProcess(setup, self._answered))

    def join(self, parts: EngineParts) -> EngineParts:
        """Return the parts of all workers, from those of worker 0."""
        executor = parts.executor
        assert isinstance(executor, TorchExecutor)
        shared = SharedExecutor(executor, self._processes, self._clock)
        with self._changed:
            self._executor = shared
            lost = self._lost
        if lost is not None:
            shared.lose(lost.reason)

        def close() -> None:
            parts.close()  # its last step needs the others
            self.close()

        return shared.join(parts, close)

    def close(self) -> None:
        """End the processes."""
        self._is_closing = True
        for process in self._processes:
            process.close()
        self._folder.cleanup()

    def _meet(self) -> Store:
        """Wait until every worker has its weights; return the store where their groups meet.

        ``ConfigError`` if a worker refused the configuration; ``EngineDead`` if a worker ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None or self._num_loaded == len(self._processes))
        if self._lost is not None:
            raise (ConfigError if self._lost.is_refusal else EngineDead)(self._lost.reason)
        return file_store(self._store, self.workers.size)

    def _answered(self, process: _WorkerProcess, answer: Answer) -> None:
        """Take an answer; on the thread of its process."""
        match answer:
            case Loaded():
                assert self._executor is not None
                self._executor.answered(answer)
            case Here(is_loaded=True):
                with self._changed:
                    self._num_loaded += 1
                    self._changed.notify_all()
            case Failed(reason, is_refusal) if not self._is_closing:
                logger.error("worker_lost rank=%d pid=%d reason=%s", process.rank, process.pid, reason)
                lost = Failed(f"Worker {process.rank} of the model: {reason}", is_refusal)
                with self._changed:
                    self._lost = self._lost or lost
                    self._changed.notify_all()
                for one in self._processes:  # no collective waits for the dead, nor for those who wait for them
                    one.kill()
                if self._executor is not None:
                    self._executor.lose(lost.reason)


class _WorkerProcess:
    """One worker's process, and the thread that takes its answers and its end."""

    def __init__(self, setup: WorkerSetup, answered: Callable[[_WorkerProcess, Answer], None]) -> None:
        threads = str(max(1, count_cores() // setup.config.model.tensor_parallel_size))
        self.rank = setup.rank
        self._process, self._pipe = start_on_pipe(WORKER, {"OMP_NUM_THREADS": threads})
        self._answered = answered
        self._sending = threading.Lock()
        self._pipe.send(setup)
        threading.Thread(target=self._receive, name=f"worker-{setup.rank}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Message) -> None:
        """Send a message, in order; nothing to one that has ended."""
        with self._sending, suppress(OSError):
            self._pipe.send(message)

    def kill(self) -> None:
        """Kill it, stopped or not."""
        self._process.kill()

    def close(self) -> None:
        """End it: its pipe closes, and what is left of it is killed."""
        with self._sending:
            self._pipe.close()
        with suppress(TimeoutExpired):
            self._process.wait(CLOSE_S)
        self._process.kill()
        self._process.wait()

    def _receive(self) -> None:
        try:
            self._pipe.poll(None)  # the libraries' files may come slowly, and a start has its own limit
            while self._pipe.poll(PATIENCE_S):
                self._answered(self, self._pipe.recv())
            self._answered(self, Failed(f"it gave no sign of life for {PATIENCE_S:g} s"))
        except (EOFError, OSError):
            self._answered(self, Failed("it ended"))
