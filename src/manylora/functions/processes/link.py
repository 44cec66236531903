"""An engine in an isolated function process, forked from a zygote: the socket that it inherits, and its log.

The process is not trusted. Its messages are bounded, concern only its own requests, and their descriptors are dropped.
Its standard output and error are a pipe of its own, so it reaches the log of the service neither to cut it nor to flood
it. A process that writes more than its share loses the rest: its end does not block, and this end is not read for a
while.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import cast

import msgspec

from manylora.core.errors import ManyloraError
from manylora.core.logs import escape
from manylora.functions.processes.checks import MessageCheck, TimeBudget
from manylora.functions.processes.frames import FrameBuffer, frame
from manylora.functions.processes.messages import FunctionPlace
from manylora.functions.processes.zygote import ForkedFunction, Zygote
from manylora.functions.wire import MAX_LOG_LINES
from manylora.serving.hosting.links.process import ending_of
from manylora.serving.hosting.protocol import (
    AddRequests,
    Cancel,
    Command,
    Ending,
    EngineSpec,
    LoadAdapter,
    LoadAdapters,
    Message,
    Ready,
    StartReport,
    decode_message,
    encode,
)

__all__ = ["FunctionLink", "FunctionLog"]

MAX_BACKLOG_BYTES = 64 << 20  # most bytes of commands that a function may leave unread

EXIT_S = 5.0

MAX_LINE_CHARS = 1000

LOG_BURST_BYTES = 64 << 10
LOG_BYTES_PER_S = 1 << 10
"""The share of a function in the log: a few tracebacks at once, and 86 MB a day in the long run."""

LOG_LINE_BYTES = 64  # bytes of the log that each line costs beside its own

LOG_CHUNK_BYTES = 4096

logger = logging.getLogger(__name__)


class FunctionLog:
    """Reads the pipes of one function, logs each line with its name, and keeps the last lines."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lines: deque[str] = deque(maxlen=MAX_LOG_LINES)
        self._owed_bytes = 0.0  # above ``LOG_BURST_BYTES``, reading pauses
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
        chunk = os.read(pipe, LOG_CHUNK_BYTES)
        *lines, rest = (rest + chunk).split(b"\n")
        if rest and (not chunk or len(rest) >= LOG_CHUNK_BYTES):
            lines.append(rest)
            rest = b""
        for line in lines:
            self._say(line)
        if not chunk:  # the process has ended
            os.close(pipe)
            return
        now = loop.time()
        paid = (now - self._owed_at) * LOG_BYTES_PER_S
        self._owed_bytes = max(0.0, self._owed_bytes - paid) + len(chunk) + LOG_LINE_BYTES * len(lines)
        self._owed_at = now
        pause_s = max(0.0, self._owed_bytes - LOG_BURST_BYTES) / LOG_BYTES_PER_S
        if pause_s:
            loop.call_later(pause_s, self._follow, pipe, rest)
        else:
            self._follow(pipe, rest)

    def _say(self, line: bytes) -> None:
        text = escape(line.decode(errors="backslashreplace")[:MAX_LINE_CHARS])[:MAX_LINE_CHARS]
        if text:
            self._lines.append(text)
            logger.warning("function_says name=%s line=%s", self._name, text)


@dataclass(eq=False)
class FunctionLink(asyncio.Protocol):
    """An ``EngineLink`` to a new function."""

    node = None  # a function runs on this machine
    engine: EngineSpec  # its engine, with the model of the zygote's backbone
    zygote: Zygote
    place: FunctionPlace
    _: KW_ONLY
    log: FunctionLog | None = None  # takes the lines that it writes; by default one of its own
    on_gone: Callable[[], None] = lambda: None  # called once its process has ended, or could not be forked
    report: StartReport | None = None  # its start and the measures in force; ``None`` before it is ready
    _function: ForkedFunction | None = None
    _transport: asyncio.Transport | None = None
    _time: TimeBudget = field(default_factory=TimeBudget)
    _deliver: Callable[[Sequence[Message]], None] = lambda messages: None

    def __post_init__(self) -> None:
        self._log = self.log or FunctionLog(self.engine.served_name)
        self._check = MessageCheck({"", self.engine.served_name})
        self._buffer = FrameBuffer(self._check.max_bytes)
        self._lost: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int | None:
        """Return the function's process id; ``None`` before the fork."""
        return None if self._function is None else self._function.pid

    async def start(self, deliver: Callable[[Sequence[Message]], None]) -> None:
        """Fork the function, once the zygote is warm, and begin to receive."""
        self._deliver = deliver
        here, there = socket.socketpair()
        with there, open(self._log.open(), "wb", 0) as log:
            try:
                self._function = await self.zygote.fork(self.engine, there, log.fileno(), self.place)
            except BaseException:
                here.close()
                self.on_gone()
                raise
        self._function.exited.add_done_callback(lambda _: self.on_gone())
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=here)

    def send(self, command: Command) -> None:
        """Send a command; a function that does not read them is ended."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if transport.get_write_buffer_size() > MAX_BACKLOG_BYTES:
            self._break("it does not read its commands")
            return
        if isinstance(command, AddRequests):
            self._check.expect(command.call, command.requests)
            self._buffer.max_bytes = self._check.max_bytes
        elif isinstance(command, Cancel):
            self._check.forget(command.request_ids)
        elif isinstance(command, LoadAdapter):
            self._check.names.add(command.name)
        elif isinstance(command, LoadAdapters):
            self._check.names.update(one[0] for one in command.adapters)
        transport.write(frame(encode(command)))

    async def closed(self) -> Ending:
        """Wait until the function ends, or sends a message that cannot be decoded."""
        assert self._function is not None
        broken = await asyncio.shield(self._lost)
        if broken is not None:
            return Ending(f"lost the connection to function process {self.pid}: {broken}")
        with contextlib.suppress(TimeoutError):
            code = await asyncio.wait_for(asyncio.shield(self._function.exited), EXIT_S)
            if code is None:
                return Ending(f"function process {self.pid} ended with its zygote", is_external=True)
            return ending_of(code, f"function process {self.pid}")
        return Ending(f"function process {self.pid} closed its socket")

    async def stop(self) -> None:
        """Kill the function and wait for its end."""
        if self._function is not None:
            self.zygote.kill(self._function)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._function.exited), EXIT_S)
        if self._transport is not None:
            self._transport.abort()
        self._break("it was stopped")

    # -- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none of asyncio's classes

    def data_received(self, data: bytes) -> None:
        """Deliver all messages that have arrived; a function that sends too many is not read for a while."""
        is_busy, began = self._check.expects_answers, time.thread_time()
        self._take(data)
        loop = asyncio.get_running_loop()
        pause_s = self._time.spend(loop.time(), time.thread_time() - began, is_busy=is_busy)
        if pause_s and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
            loop.call_later(pause_s, self._read_on)

    def _read_on(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _take(self, data: bytes) -> None:
        try:
            messages = [self._check.checked(decode_message(body)) for body in self._buffer.feed(data)]
            for message in messages:
                if isinstance(message, Ready):
                    self.report = message.start
            if messages:
                self._deliver(messages)
        except (ManyloraError, msgspec.MsgspecError) as error:
            self._break(str(error))
        except Exception as error:  # a message that decodes and makes no sense
            logger.exception("function_message_broke pid=%s", self.pid)
            self._break(repr(error))

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end."""
        if not self._lost.done():
            self._lost.set_result(None)

    def _break(self, reason: str) -> None:
        if not self._lost.done():
            self._lost.set_result(reason)
        if self._transport is not None:
            self._transport.abort()
