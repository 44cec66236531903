"""The API process's side of a zygote: starts it, asks it for functions, and learns of their ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field

import msgspec

from manylora.core.errors import ConfigError, EngineDead
from manylora.functions.processes.frames import in_memory
from manylora.functions.processes.messages import (
    MAX_PACKET_BYTES,
    Backbone,
    Exited,
    Fork,
    Forked,
    FromZygote,
    FunctionPlace,
    Kill,
    ToZygote,
    Warm,
    ZygoteSetup,
)
from manylora.serving.hosting.protocol import EngineSpec

__all__ = ["ForkedFunction", "Zygote", "harmless"]

HARMLESS = (
    *("HOME", "PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "TMPDIR", "TZ", "LANG", "CC", "CXX"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "XDG_CACHE_HOME"),
)
HARMLESS_GROUPS = ("LC_", "OMP_", "GOMP_", "KMP_", "MKL_", "DNNL_", "ONEDNN_", "NUMBA_", "MALLOC_", "GLIBC_")
"""Variables of a zygote: those that libraries are set up with."""

WARM_TIMEOUT_S = 300.0
FORK_TIMEOUT_S = 30.0  # longest waits for a zygote; one that exceeds them is killed, with its functions
FULL_S = 0.02  # time between two looks for room in its socket

logger = logging.getLogger(__name__)

_decoder: msgspec.msgpack.Decoder[FromZygote] = msgspec.msgpack.Decoder(FromZygote)


@dataclass(eq=False, slots=True)
class ForkedFunction:
    """A function's process."""

    number: int  # its number at the zygote
    # Done once the process has ended, with its exit code or minus the number of a signal; with ``None`` if the zygote
    # ended first, and the function with it.
    exited: asyncio.Future[int | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    pid: int | None = None  # its process; ``None`` before the fork
    process: int | None = None  # descriptor of the process while it lives; ``None`` before the fork

    def end(self, code: int | None) -> None:
        """Record that the function process ended."""
        if self.process is not None:
            os.close(self.process)
            self.process = None
        if not self.exited.done():
            self.exited.set_result(code)

    def end_without_zygote(self) -> None:
        """Kill the process and record its end, after the zygote that would have reported the end is lost."""
        if self.process is None:
            self.end(None)
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.process, signal.SIGKILL)
        loop, process = asyncio.get_running_loop(), self.process

        def ended() -> None:
            loop.remove_reader(process)
            self.end(None)

        loop.add_reader(process, ended)


def harmless(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that hold no secret.

    The kernel puts a program's variables on its stack, and forks inherit them: a variable that is removed later stays
    readable there. So a zygote never gets the others.
    """
    return {name: value for name, value in environment.items() if name in HARMLESS or name.startswith(HARMLESS_GROUPS)}


@dataclass(eq=False)
class Zygote:
    """One zygote, replaced by another when it ends. Only for the event loop's thread."""

    backbone: Backbone  # the base of its functions
    _: KW_ONLY
    builder: str | None = None  # builds the parts of their engines, as ``module:function``; ``None`` for live ones
    _process: subprocess.Popen[bytes] | None = None
    _socket: socket.socket | None = None
    _warm: asyncio.Future[None] | None = None
    _functions: dict[int, ForkedFunction] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def pid(self) -> int | None:
        """The process; ``None`` before it has started."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process unless it runs, and wait until it is warm.

        ``EngineDead`` if the process ended before it was warm, or took too long.
        """
        if self._warm is None:
            self._launch()
        assert self._warm is not None
        process = self._process
        try:
            # Not ``wait_for``, which forgets that it was cancelled if the zygote is warm by then, before Python 3.12.
            async with asyncio.timeout(WARM_TIMEOUT_S):
                await asyncio.shield(self._warm)
        except TimeoutError:
            reason = f"The zygote was not warm within {WARM_TIMEOUT_S:g} s."
            self._kill_hung(process, reason)
            raise EngineDead(reason) from None

    async def fork(
        self, engine: EngineSpec, connection: socket.socket, log: int, place: FunctionPlace
    ) -> ForkedFunction:
        """Fork a function that serves ``connection`` and writes to the pipe ``log``.

        ``ConfigError`` if the request is too long for a packet; ``EngineDead`` if no zygote takes requests.
        """
        asked_at = time.monotonic()
        await self.start()
        function = ForkedFunction(next(self._numbers))
        fork = Fork(number=function.number, engine=engine, place=place, asked_at=asked_at)
        self._functions[function.number] = function
        try:
            while not self._try_send(fork, connection.fileno(), log):  # a hundred forks fill the socket
                await asyncio.sleep(FULL_S)
                if function.exited.done():
                    raise EngineDead("The zygote has ended.")
        except BaseException:
            self._functions.pop(function.number, None)
            raise
        asyncio.get_running_loop().call_later(FORK_TIMEOUT_S, self._check_forked, function, self._process)
        return function

    def kill(self, function: ForkedFunction) -> None:
        """End a function at once, also while the zygote hangs; ``exited`` follows from the zygote."""
        if function.process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(function.process, signal.SIGKILL)
        elif not function.exited.done():
            with contextlib.suppress(EngineDead):  # it ended with the zygote
                self._try_send(Kill(function.number))  # else it ends with its socket

    async def stop(self) -> None:
        """End the zygote, and with it its functions."""
        process = self._lose("the zygote was stopped")
        if process is not None:
            await asyncio.get_running_loop().run_in_executor(None, process.wait)

    def _check_forked(self, function: ForkedFunction, process: subprocess.Popen[bytes] | None) -> None:
        if function.pid is None and not function.exited.done():
            self._kill_hung(process, f"The zygote did not fork within {FORK_TIMEOUT_S:g} s.")

    def _kill_hung(self, process: subprocess.Popen[bytes] | None, reason: str) -> None:
        """Kill a zygote that hangs, unless another one has replaced it."""
        if process is not None and process is self._process:
            logger.error("zygote_hangs pid=%s reason=%s", process.pid, reason)
            self._lose(reason)
            process.wait()

    def _launch(self) -> None:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        setup = ZygoteSetup(
            socket=there.fileno(),
            backbone=self.backbone,
            builder=self.builder,
            log_level=logging.getLogger().getEffectiveLevel(),
        )
        # -P: do not import files from the working directory.
        command = [sys.executable, "-P", "-m", "manylora.functions.processes.zygote_process"]
        with there, in_memory(msgspec.msgpack.encode(setup)) as stdin:
            self._process = subprocess.Popen(
                command,
                stdin=stdin,
                start_new_session=True,
                env=harmless(os.environ),
                pass_fds=[there.fileno(), self.backbone.base.file],
            )
        here.setblocking(False)
        self._socket = here
        loop = asyncio.get_running_loop()
        self._warm = loop.create_future()
        loop.add_reader(here.fileno(), self._receive)

    def _try_send(self, message: ToZygote, *descriptors: int) -> bool:
        """Send a message if there is room for it; return whether there was."""
        packet = msgspec.msgpack.encode(message)
        if len(packet) > MAX_PACKET_BYTES:
            raise ConfigError(f"Got a function whose description has {len(packet)} bytes, at most {MAX_PACKET_BYTES}")
        if self._socket is None:
            raise EngineDead("The zygote has ended.")
        try:
            socket.send_fds(self._socket, [packet], descriptors)
        except BlockingIOError:
            return False
        except OSError as error:
            raise EngineDead(f"The zygote takes no requests: {error}.") from error
        return True

    def _receive(self) -> None:
        assert self._socket is not None
        while self._socket is not None:
            try:
                packet, descriptors, _, _ = socket.recv_fds(self._socket, MAX_PACKET_BYTES, 1)
            except BlockingIOError:
                return
            except OSError:
                packet, descriptors = b"", []
            if not packet:
                logger.error("zygote_ended pid=%s", self.pid)
                process = self._lose("The zygote ended.")
                if process is not None:
                    process.wait()
                return
            match _decoder.decode(packet):
                case Warm():
                    if self._warm is not None and not self._warm.done():
                        self._warm.set_result(None)
                case Forked(number, pid):
                    function = self._functions[number]
                    function.pid, function.process = pid, next(iter(descriptors), None)
                case Exited(number, code):
                    self._functions.pop(number).end(code)

    def _lose(self, reason: str) -> subprocess.Popen[bytes] | None:
        """Kill the process and note the ends of its functions; return it, for the caller to wait for."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
        process, self._process = self._process, None
        if process is not None:
            process.kill()
        warm, self._warm = self._warm, None
        if warm is not None and not warm.done():
            warm.set_exception(EngineDead(reason))
            warm.exception()  # retrieved, also if no function waits
        functions, self._functions = self._functions, {}
        for function in functions.values():
            function.end_without_zygote()
        return process
