"""A process of a worker that shares a model with worker 0; started by ``worker_group``, which it ends with."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import NoReturn

from manylora.core.clock import WallClock
from manylora.core.errors import ManyloraError
from manylora.core.isolation.system import end_with_parent
from manylora.core.logs import configure_logging
from manylora.execution.imports import import_model_classes

__all__ = ["main"]

SIGN_OF_LIFE_S = 1.0

logger = logging.getLogger(__name__)


def main(descriptor: int) -> NoReturn:
    """Build this worker's part of the model, and run the steps that worker 0 announces until the pipe ends."""
    if sys.platform == "linux":
        end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = _Worker(Connection(descriptor))
    try:
        worker.run()
        code = 0
    except (EOFError, OSError):  # the engine has ended
        code = 0
    except ManyloraError as error:
        worker.fail(str(error), is_refusal=True)
        code = 1
    except Exception as error:
        logger.exception("worker_broke")
        worker.fail(repr(error), is_refusal=False)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that hang in a library must not keep this process alive


class _Worker:
    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._sending = threading.Lock()

    def run(self) -> None:
        from manylora.execution.worker_group import WorkerSetup

        setup = self._pipe.recv()
        assert isinstance(setup, WorkerSetup)
        configure_logging(setup.log_level, f"worker-{setup.rank}")
        threading.Thread(target=self._live, name="sign-of-life", daemon=True).start()
        import_model_classes()
        from manylora.execution.build import build_parts
        from manylora.execution.collectives import Collectives, Store, file_store
        from manylora.execution.executor import TorchExecutor
        from manylora.execution.peers import Follower, Here

        size = setup.config.model.tensor_parallel_size

        def meet() -> Store:
            self._answer(Here(is_loaded=True))
            return file_store(setup.store, size)

        parts = build_parts(setup.config, WallClock(), workers=Collectives(meet, setup.rank, size))
        assert isinstance(parts.executor, TorchExecutor)
        follower = Follower(parts.executor, self._answer)
        while True:
            follower.handle(self._pipe.recv())

    def fail(self, reason: str, *, is_refusal: bool) -> None:
        from manylora.execution.peers import Failed

        self._answer(Failed(reason, is_refusal))

    def _answer(self, answer: object) -> None:
        try:
            with self._sending:
                self._pipe.send(answer)
        except OSError:
            os._exit(0)  # the engine has ended

    def _live(self) -> None:
        from manylora.execution.peers import Here

        while True:
            self._answer(Here())
            time.sleep(SIGN_OF_LIFE_S)
