"""The lines that the processes of a function write to standard output and error.

Each process has a pipe of its own, so it reaches the log of the service neither to cut it nor to flood it. A process
that writes more than its share loses the rest: its end does not block, and this end is not read for a while.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque

from manylora.core.logs import escape
from manylora.functions.wire import MAX_LOG_LINES

__all__ = ["FunctionLog"]

MAX_LINE_CHARS = 1000

BURST_BYTES = 64 << 10
BYTES_PER_S = 1 << 10
"""The share of a function in the log: a few tracebacks at once, and 86 MB a day in the long run."""

LINE_BYTES = 64
"""Bytes of the log that each line costs beside its own."""

CHUNK_BYTES = 4096

logger = logging.getLogger(__name__)


class FunctionLog:
    """Reads the pipes of one function, logs each line with its name, and keeps the last lines."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lines: deque[str] = deque(maxlen=MAX_LOG_LINES)
        self._owed_bytes = 0.0  # above ``BURST_BYTES``, reading pauses
        self._owed_at = 0.0

    def open(self) -> int:
        """Return the writing end of a pipe for a new process; the caller closes it once the process has it."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        self._follow(reading, b"")
        return writing

    def take(self) -> list[str]:
        """Return the last lines since the last call."""
        lines = list(self._lines)
        self._lines.clear()
        return lines

    def _follow(self, pipe: int, rest: bytes) -> None:
        asyncio.get_running_loop().add_reader(pipe, self._read, pipe, rest)

    def _read(self, pipe: int, rest: bytes) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(pipe)
        chunk = os.read(pipe, CHUNK_BYTES)
        *lines, rest = (rest + chunk).split(b"\n")
        if rest and (not chunk or len(rest) >= CHUNK_BYTES):
            lines.append(rest)
            rest = b""
        for line in lines:
            self._say(line)
        if not chunk:  # the process has ended
            os.close(pipe)
            return
        now = loop.time()
        paid = (now - self._owed_at) * BYTES_PER_S
        self._owed_bytes = max(0.0, self._owed_bytes - paid) + len(chunk) + LINE_BYTES * len(lines)
        self._owed_at = now
        pause_s = max(0.0, self._owed_bytes - BURST_BYTES) / BYTES_PER_S
        if pause_s:
            loop.call_later(pause_s, self._follow, pipe, rest)
        else:
            self._follow(pipe, rest)

    def _say(self, line: bytes) -> None:
        text = escape(line.decode(errors="backslashreplace")[:MAX_LINE_CHARS])[:MAX_LINE_CHARS]
        if text:
            self._lines.append(text)
            logger.warning("function_says name=%s line=%s", self._name, text)
