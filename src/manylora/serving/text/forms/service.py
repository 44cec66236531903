"""The checking side: a process that holds the tokenizer, and forks for each form a process that may die of it.

::

    server  ---- form ---->  holder    the libraries and the tokenizer, warm
            <--- answer ---    | ^
                          fork | | answer
                               v |
                             checker   confined, with little time and memory: compiles the form, follows it a few tokens

A compiler that does not end cannot be stopped on a thread. As a process it is ended by the kernel, the form is refused
by name, and the next one waits for a fork of a few milliseconds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import msgspec

from manylora.core.errors import RequestError
from manylora.core.isolation.confine import READABLE_OF_SYSTEM, Confinement, confine
from manylora.core.logs import configure_logging
from manylora.core.types import Constraint
from manylora.execution.sampling.grammar import refusal, try_constraint
from manylora.execution.sampling.grammar_text import GrammarTokenizer
from manylora.serving.text.forms.process import MAX_ANSWER_BYTES, FormSettings, encode
from manylora.serving.text.model_files import load_hugging_face

__all__ = ["main"]

logger = logging.getLogger(__name__)

WARM_UP = (Constraint("json", '{"type":"object"}'), Constraint("grammar", 'root ::= "a"'))
"""Forms that load whatever the libraries load late: a checker reads no files."""

_OUT_OF_MEMORY = 2


def main(descriptor: int) -> None:
    """Run the process at the other end of a pipe."""
    configure_logging(logging.WARNING, "forms")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the server decides when it ends
    pipe = Connection(descriptor)
    with contextlib.suppress(EOFError, ConnectionError):  # the server has ended
        settings = msgspec.msgpack.decode(pipe.recv_bytes(), type=FormSettings)
        try:
            tokenizer = GrammarTokenizer.of(load_hugging_face(settings.tokenizer, settings.revision))
            for form in WARM_UP:
                with contextlib.suppress(RequestError):  # a small vocabulary may lack its letters
                    try_constraint(form, tokenizer)
        except Exception as error:
            logger.exception("form_tokenizer_failed")
            reason = f"No form of an answer can be followed with this tokenizer ({type(error).__name__})"
            pipe.send_bytes(encode(reason))
            return
        pipe.send_bytes(encode(None))
        while True:
            form = msgspec.msgpack.decode(pipe.recv_bytes(), type=Constraint)
            pipe.send_bytes(_check(form, tokenizer, settings))


def _check(form: Constraint, tokenizer: GrammarTokenizer, settings: FormSettings) -> bytes:
    """Return the answer to a form, made by a process of its own."""
    readable, writable = os.pipe()
    checker = os.fork()
    if not checker:
        _run(form, tokenizer, settings, writable)
    os.close(writable)
    with open(readable, "rb") as file:
        answer = file.read(MAX_ANSWER_BYTES)
    _, status = os.waitpid(checker, 0)
    return answer if status == 0 else encode(str(refusal(form, _cause(status, settings))))


def _run(form: Constraint, tokenizer: GrammarTokenizer, settings: FormSettings, answer: int) -> NoReturn:
    """Check a form, write the answer and end this process."""
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a library's last words would be lines of the server's log
        _confine(settings, answer)
        refused = None
        try:
            try_constraint(form, tokenizer)
        except RequestError as error:
            refused = str(error)
        os.write(answer, encode(refused))
        status = 0
    except MemoryError:
        status = _OUT_OF_MEMORY
    finally:
        os._exit(status)


def _confine(settings: FormSettings, answer: int) -> None:
    if sys.platform != "linux":
        resource.setrlimit(resource.RLIMIT_CPU, (settings.limit_s, settings.limit_s + 1))
        return
    package = str(Path(__file__).resolve().parents[3])
    confine(
        Confinement(
            readable=[*READABLE_OF_SYSTEM, sys.prefix, sys.base_prefix, package, *(p for p in sys.path if p)],
            keep_fds=(0, 1, 2, answer),
            memory_bytes=settings.limit_bytes,
            cpu_s=settings.limit_s,
            ends_with_parent=True,
        )
    )


def _cause(status: int, settings: FormSettings) -> str:
    """Return the reason why a checker ended, from its status of ``waitpid``."""
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGXCPU:
        return f"it takes more than {settings.limit_s} s of a processor to compile"
    if code in (_OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGKILL):  # Python's, Rust's and the kernel's lack of memory
        return f"it takes more than {settings.limit_bytes >> 20} MiB of memory to compile"
    return f"its compiler failed (status {code})"
