"""An engine in a process of its own: the process, the messages that it sends, and the link to one on this machine.

A link is connected by ZeroMQ over Unix sockets in a private directory. Each side binds the socket that it receives on
and connects the one that it sends on: a connected socket can queue at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from manylora.core.errors import ConfigError, EngineDead
from manylora.serving.hosting.engine.startup import spawn_engine, take_prestarted
from manylora.serving.hosting.links.base_share import BaseShare
from manylora.serving.hosting.protocol import (
    Command,
    Ending,
    EngineSpec,
    Message,
    ProcessSetup,
    Ready,
    Reply,
    decode_message,
    encode,
)
from manylora.serving.hosting.sockets import UnixSockets

__all__ = ["AT_ONCE_BYTES", "LAST_MESSAGES_S", "EngineChild", "Inbox", "ProcessLink", "ending_of"]

LONGEST_SOCKET_PATH = 100  # the kernel allows 107 bytes
LAST_MESSAGES_S = 0.2  # time for the last messages of an engine that has ended

SENT_BY_OTHERS = (signal.SIGKILL, signal.SIGTERM)
"""Signals that a process does not raise by a fault of its own; a crash is SIGSEGV, SIGABRT or SIGBUS."""

AT_ONCE_BYTES = 1024 * 1024
"""Bytes of messages that are delivered at once, in some five milliseconds: sixty steps of two hundred streams.

Tokens of a stream that are delivered together share a write, so a busy server lives on large pieces.
"""


class EngineChild:
    """An engine process, new or started early by ``prestart_engine``.

    It has its own process group, so that Ctrl-C reaches this process alone. Its standard input is a pipe from this
    process, and it ends with the pipe. The kernel kills it when the thread ends that creates it: that thread must stay
    as long as engines are needed, as the event loop's does.

    It reads its set-up from the pipe: keys are in no argument, environment or file. It inherits the ``files``.
    """

    def __init__(self, setup: ProcessSetup, files: Sequence[int] = ()) -> None:
        early = None if files else take_prestarted(setup.engine)
        self._process = early or spawn_engine(files=files)
        assert self._process.stdin is not None
        body = encode(setup)
        with contextlib.suppress(BrokenPipeError):  # the process has died: its exit code says why
            self._process.stdin.write(b"%d\n" % len(body) + body)
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def wait(self) -> int:
        """Wait until the process ends; return the exit code, or minus the number of a signal."""
        return self._process.wait()

    def kill(self) -> None:
        """Kill the process group and wait for its end; may be called again."""
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


class Inbox:
    """Delivers the messages of one socket, until closed. For the event loop's thread alone.

    The socket is closed with it. ``deliver`` is called with all messages that have arrived together, so that several
    tokens share one write.
    """

    def __init__(self, socket: zmq.Socket[bytes], deliver: Callable[[Sequence[Message]], None]) -> None:
        loop = asyncio.get_running_loop()
        self.broken: asyncio.Future[str] = loop.create_future()
        """Done once no more messages are read: the reason, in words."""
        self._socket = socket
        self._deliver = deliver
        loop.add_reader(socket.fileno(), self._receive)
        self._receive()

    def close(self, reason: str = "it was stopped") -> None:
        """Close the socket; may be called again."""
        if not self._socket.closed:
            self._stop(reason)
            self._socket.close(linger=0)

    def _stop(self, reason: str) -> None:
        """Read no more. The owner closes the socket, after it has let go of all that watches it."""
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        if not self.broken.done():
            self.broken.set_result(reason)

    def _receive(self) -> None:
        """Deliver messages that have arrived; the event loop calls this when the socket becomes readable.

        The socket must be read until it is empty, because ZeroMQ signals only the change from empty. After some
        messages others have their turn, so that a loop that lags still answers.
        """
        if self._socket.closed:
            return
        messages: list[Message] = []
        room = AT_ONCE_BYTES
        try:
            with contextlib.suppress(zmq.Again):
                while room > 0:
                    message = self._socket.recv(zmq.NOBLOCK)
                    room -= len(message)
                    messages.append(decode_message(message))
            if room <= 0:
                asyncio.get_running_loop().call_soon(self._receive)
            if messages:
                self._deliver(messages)
        except Exception as error:
            self._stop(repr(error))


class ProcessLink:
    """An ``EngineLink`` to a new engine process."""

    def __init__(self, engine: EngineSpec, share: BaseShare) -> None:
        assert isinstance(engine.builder, str), "a function cannot be sent to another process"
        self.node = None
        self._engine = engine
        self._share = share
        self._is_loader = False
        self._is_stopped = False
        self._child: EngineChild | None = None
        self._exit_code: asyncio.Future[int] | None = None
        self._directory: str | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._commands: zmq.Socket[bytes] | None = None
        self._inbox: Inbox | None = None

    @property
    def pid(self) -> int | None:
        """Return the engine process's id; ``None`` before it has started."""
        return None if self._child is None else self._child.pid

    async def start(self, deliver: Callable[[Sequence[Message]], None]) -> None:
        """Start the process and begin to receive; wait before it if another process loads the base."""
        base = await self._share.take()
        if self._is_stopped:
            self._share.end_turn()
            raise EngineDead("The engine was stopped before it started.")
        self._is_loader = base is None
        self._directory = tempfile.mkdtemp(prefix="manylora-")
        if len(self._directory) > LONGEST_SOCKET_PATH - 5:
            raise ConfigError(f"Got the temporary directory {self._directory!r}, expected a shorter path (TMPDIR)")
        sockets = UnixSockets(self._directory)
        self._context = zmq.Context()
        messages = self._context.socket(zmq.PULL)
        messages.set_hwm(0)
        messages.bind(sockets.messages)
        self._commands = self._context.socket(zmq.PUSH)
        self._commands.set_hwm(0)
        self._commands.connect(sockets.commands)

        def deliver_and_share(messages: Sequence[Message]) -> None:
            if self._is_loader:
                self._note_base(messages)
            if self._directory is not None and any(isinstance(message, Reply) for message in messages):
                self._remove_directory()  # both sockets are connected; this process may be killed, and remove nothing
            deliver(messages)

        self._inbox = Inbox(messages, deliver_and_share)
        level = logging.getLogger().getEffectiveLevel()
        setup = ProcessSetup(engine=self._engine, sockets=sockets, log_level=level, base=base)
        child = self._child = EngineChild(setup, () if base is None else (base.file,))
        loop = asyncio.get_running_loop()
        exit_code = self._exit_code = loop.create_future()

        def note_exit(code: int) -> None:
            if not exit_code.done():
                exit_code.set_result(code)

        def wait_for_exit() -> None:
            code = child.wait()
            with contextlib.suppress(RuntimeError):  # the event loop may be gone before the engine
                loop.call_soon_threadsafe(note_exit, code)

        threading.Thread(target=wait_for_exit, name="engine-exit", daemon=True).start()

    def send(self, command: Command) -> None:
        """Send a command."""
        if self._commands is not None and not self._commands.closed:
            self._commands.send(encode(command), zmq.NOBLOCK)

    async def closed(self) -> Ending:
        """Wait until the process ends, or sends a message that cannot be decoded."""
        assert self._exit_code is not None
        assert self._inbox is not None
        broken = self._inbox.broken
        waiting: list[asyncio.Future[Any]] = [self._exit_code, broken]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        self._stop_loading()
        if not self._exit_code.done():
            return Ending(f"lost the connection to engine process {self.pid}: {broken.result()}")
        await asyncio.sleep(LAST_MESSAGES_S)  # its last messages are still arriving
        return ending_of(self._exit_code.result(), f"engine process {self.pid}")

    async def stop(self) -> None:
        """Kill the process group and remove the sockets."""
        self._is_stopped = True
        self._stop_loading()
        if self._child is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._child.kill)
        if self._inbox is not None:
            self._inbox.close()
        if self._commands is not None:
            self._commands.close(linger=0)
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
        self._remove_directory()

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _note_base(self, messages: Sequence[Message]) -> None:
        """Share the weights that this engine has loaded, once it is ready."""
        for message in messages:
            if isinstance(message, Ready):
                assert self.pid is not None
                self._is_loader = False
                self._share.give(message.base, self.pid)

    def _stop_loading(self) -> None:
        if self._is_loader:
            self._is_loader = False
            self._share.end_turn()
