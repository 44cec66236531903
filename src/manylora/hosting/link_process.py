"""An engine in its own process, connected by ZeroMQ over Unix sockets in a private directory.

The process has its own process group, so that Ctrl-C reaches the API process alone. Its standard input is a pipe from
the API process, and it ends with the pipe. Each side binds the socket that it receives on and connects the one that it
sends on: a connected socket can queue at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from manylora.errors import ConfigError, EngineDead
from manylora.hosting.base_share import BaseShare
from manylora.hosting.early_start import engine_command, spawn, take_early
from manylora.hosting.engine_process import pack_setup
from manylora.hosting.protocol import Command, Ending, EngineSpec, Message, ProcessSetup, Ready, decode_message, encode

__all__ = ["ProcessLink"]

LONGEST_SOCKET_PATH = 100  # the kernel allows 107 bytes
LAST_MESSAGES_S = 0.2

SENT_BY_OTHERS = (signal.SIGKILL, signal.SIGTERM)
"""Signals that a process does not raise by a fault of its own; a crash is SIGSEGV, SIGABRT or SIGBUS."""

logger = logging.getLogger(__name__)


class ProcessLink:
    """An ``EngineLink`` to a new engine process.

    Args:
        engine: The engine.
        share: The base's weights of this machine.
    """

    def __init__(self, engine: EngineSpec, share: BaseShare) -> None:
        assert isinstance(engine.builder, str), "a function cannot be sent to another process"
        self._engine = engine
        self._share = share
        self._is_loader = False
        self._is_stopped = False
        self._process: subprocess.Popen[bytes] | None = None
        self._exit_code: asyncio.Future[int] | None = None
        self._directory: str | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._commands: zmq.Socket[bytes] | None = None
        self._messages: zmq.Socket[bytes] | None = None
        self._broken: asyncio.Future[str] | None = None

    @property
    def pid(self) -> int | None:
        """Return the engine process's id; ``None`` before it has started."""
        return None if self._process is None else self._process.pid

    async def start(self, deliver: Callable[[Sequence[Message]], None]) -> None:
        """Start the process and begin to receive; wait before it if another process loads the base."""
        base = await self._share.take()
        if self._is_stopped:
            self._share.give_up()
            raise EngineDead("The engine was stopped before it started.")
        self._is_loader = base is None
        self._directory = tempfile.mkdtemp(prefix="manylora-")
        if len(self._directory) > LONGEST_SOCKET_PATH - 5:
            raise ConfigError(f"Got the temporary directory {self._directory!r}, expected a shorter path (TMPDIR)")
        setup = ProcessSetup(
            engine=self._engine,
            commands_address=f"ipc://{self._directory}/down",
            messages_address=f"ipc://{self._directory}/up",
            log_level=logging.getLogger().getEffectiveLevel(),
            base=base,
        )
        loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._messages = self._context.socket(zmq.PULL)
        self._messages.set_hwm(0)
        self._messages.bind(setup.messages_address)
        self._commands = self._context.socket(zmq.PUSH)
        self._commands.set_hwm(0)
        self._commands.connect(setup.commands_address)
        self._broken = loop.create_future()
        loop.add_reader(self._messages.fileno(), self._receive, self._messages, self._broken, deliver)

        process = take_early(self._engine) if base is None else None
        if process is None:
            process = spawn(engine_command(), () if base is None else (base.file,))
        self._process = process
        exit_code = self._exit_code = loop.create_future()

        def note_exit(code: int) -> None:
            if not exit_code.done():
                exit_code.set_result(code)

        def wait_for_exit() -> None:
            code = process.wait()
            with contextlib.suppress(RuntimeError):  # the event loop may be gone before the engine
                loop.call_soon_threadsafe(note_exit, code)

        threading.Thread(target=wait_for_exit, name="engine-exit", daemon=True).start()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has died: `closed` returns why
            process.stdin.write(pack_setup(setup))
            process.stdin.flush()

    def send(self, command: Command) -> None:
        """Send a command."""
        if self._commands is not None and not self._commands.closed:
            self._commands.send(encode(command), zmq.NOBLOCK)

    async def closed(self) -> Ending:
        """Wait until the process ends, or sends a message that cannot be decoded."""
        assert self._exit_code is not None
        assert self._broken is not None
        waiting: list[asyncio.Future[Any]] = [self._exit_code, self._broken]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        self._stop_loading()
        if not self._exit_code.done():
            return Ending(f"lost the connection to engine process {self.pid}: {self._broken.result()}")
        code = self._exit_code.result()
        await asyncio.sleep(LAST_MESSAGES_S)  # its last messages are still arriving
        if code < 0:
            with contextlib.suppress(ValueError):
                by = signal.Signals(-code)
                return Ending(f"engine process {self.pid} was killed by {by.name}", is_external=by in SENT_BY_OTHERS)
        return Ending(f"engine process {self.pid} ended with exit code {code}")

    async def stop(self) -> None:
        """Kill the process group and remove the sockets."""
        self._is_stopped = True
        self._stop_loading()
        process = self._process
        if process is not None:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await asyncio.get_running_loop().run_in_executor(None, process.wait)
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        if self._messages is not None:
            self._close_messages(self._messages)
        if self._broken is not None and not self._broken.done():
            self._broken.set_result("it was stopped")
        if self._commands is not None:
            self._commands.close(linger=0)
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _receive(
        self,
        socket: zmq.Socket[bytes],
        broken: asyncio.Future[str],
        deliver: Callable[[Sequence[Message]], None],
    ) -> None:
        """Deliver all messages that have arrived; the event loop calls this when the socket becomes readable.

        The socket must be read until it is empty, because ZeroMQ signals only the change from empty. Messages that
        arrived together are delivered together, so that several tokens share one write.
        """
        messages: list[Message] = []
        try:
            with contextlib.suppress(zmq.Again):
                while True:
                    messages.append(decode_message(socket.recv(zmq.NOBLOCK)))
            if messages:
                if self._is_loader:
                    self._note_base(messages)
                deliver(messages)
        except Exception as error:
            self._close_messages(socket)
            if not broken.done():
                broken.set_result(repr(error))

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
            self._share.give_up()

    def _close_messages(self, socket: zmq.Socket[bytes]) -> None:
        if not socket.closed:
            asyncio.get_running_loop().remove_reader(socket.fileno())
            socket.close(linger=0)
