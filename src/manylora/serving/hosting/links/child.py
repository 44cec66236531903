"""An engine process as the child of this one: of the API process, or of a Ray actor on another machine."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence

from manylora.serving.hosting.engine.prestart import spawn_engine, take_early
from manylora.serving.hosting.protocol import Ending, ProcessSetup, encode

__all__ = ["EngineChild", "ending_of"]

SENT_BY_OTHERS = (signal.SIGKILL, signal.SIGTERM)
"""Signals that a process does not raise by a fault of its own; a crash is SIGSEGV, SIGABRT or SIGBUS."""


class EngineChild:
    """An engine process: a new one, or the one that was started early for such an engine.

    It has its own process group, so that Ctrl-C reaches this process alone. Its standard input is a pipe from this
    process, and it ends with the pipe. The kernel kills it when the thread ends that creates it: that thread must stay
    as long as engines are needed, as the event loop's does.

    Args:
        setup: Its set-up, which it reads from the pipe: keys are in no argument, environment or file.
        files: Descriptors that it inherits.
    """

    def __init__(self, setup: ProcessSetup, files: Sequence[int] = ()) -> None:
        early = None if files else take_early(setup.engine)
        self._process = early or spawn_engine(files=files)
        assert self._process.stdin is not None
        body = encode(setup)
        with contextlib.suppress(BrokenPipeError):  # the process has died: its exit code says why
            self._process.stdin.write(b"%d\n" % len(body) + body)
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        """Return its id."""
        return self._process.pid

    def wait(self) -> int:
        """Wait for its end; return the exit code, or minus the number of a signal."""
        return self._process.wait()

    def kill(self) -> None:
        """Kill its process group and wait for its end; may be called again."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()


def ending_of(code: int, process: str) -> Ending:
    """Return the end of an engine process by its exit code; ``process`` names it."""
    if code < 0:
        with contextlib.suppress(ValueError):
            by = signal.Signals(-code)
            return Ending(f"{process} was killed by {by.name}", is_external=by in SENT_BY_OTHERS)
    return Ending(f"{process} ended with exit code {code}")
