"""The server's side: starts the process that checks forms with the first form, and again if it is lost."""

from __future__ import annotations

import logging
import threading
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import msgspec

from manylora.core.errors import CapacityError
from manylora.core.isolation.confine import ONE_THREAD, receive_answer, start_on_pipe
from manylora.core.types import Constraint

if TYPE_CHECKING:
    import subprocess

__all__ = ["MAX_ANSWER_BYTES", "FormProcess", "FormSettings", "encode"]

logger = logging.getLogger(__name__)

SERVICE = "manylora.serving.text.forms.service"
START_S = 120.0  # time for the libraries and the tokenizer
ANSWER_S = 60.0  # time for an answer. The limit of a form is processor time, of which a busy machine gives little
MAX_ANSWER_BYTES = 16 * 1024

encode = msgspec.msgpack.encode


class FormSettings(msgspec.Struct, frozen=True):
    """The settings of a process that checks forms."""

    tokenizer: str  # folder or name of the tokenizer
    revision: str | None = None  # the tokenizer's revision on the hub
    limit_s: int = 3  # processor time of a form in whole seconds; the largest that are of use take half a second
    limit_bytes: int = 64 << 20  # memory of a form. Each answer of that form takes about as much in the engine


class FormProcess:
    """Checks one form at a time in a process of its own; blocks, safe from any thread."""

    def __init__(self, settings: FormSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._pipe: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._refused: str | None = None  # the reason why no form can be checked with this tokenizer
        self._is_closed = False

    def check(self, constraint: Constraint) -> str | None:
        """Return the message of a form's refusal, ``None`` if it can be followed.

        ``CapacityError`` (503) if the process could not be started, was lost twice, or had no answer in time.
        """
        with self._lock:
            for is_last in (False, True):
                try:
                    pipe = self._running()
                    if self._refused is not None:
                        return self._refused
                    pipe.send_bytes(encode(constraint))
                    return _receive(pipe, ANSWER_S)
                except OSError as error:
                    logger.warning("form_process_lost error=%r", error)
                    self._stop()
                    if is_last or self._is_closed or isinstance(error, TimeoutError):
                        reason = "The form of the answer could not be checked: the process for it was lost."
                        raise CapacityError(reason, status=503) from error
        raise AssertionError("the last attempt returns or raises")

    def close(self) -> None:
        """End the process for good, and with it a check in progress."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._stop()

    def _running(self) -> Connection:
        """Return the pipe to a process that has its tokenizer."""
        if self._pipe is None:
            # It forks for each form, which takes a process with one thread.
            environment = {**ONE_THREAD, "TOKENIZERS_PARALLELISM": "false"}
            self._process, self._pipe = start_on_pipe(SERVICE, environment)
            if self._is_closed:
                raise ConnectionAbortedError("the server stops")
            self._pipe.send_bytes(encode(self._settings))
            self._refused = _receive(self._pipe, START_S)
        return self._pipe

    def _stop(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


_decode = msgspec.msgpack.Decoder(str | None).decode


def _receive(pipe: Connection, limit_s: float) -> str | None:
    """Return the next answer: the message of a refusal, ``None`` for a form that can be followed.

    The first answer of a process is about its tokenizer, in the same way. ``TimeoutError`` if there is none within
    ``limit_s`` seconds, ``OSError`` if the process died or its answer cannot be read.
    """
    answer: str | None = receive_answer(pipe, limit_s, _decode, max_bytes=MAX_ANSWER_BYTES)
    return answer
