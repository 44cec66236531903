"""The parts that `fleet_chaos.py` disturbs: commands of manylora, a link with faults, a small disk, a wall clock."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

START_S = 600.0
ENGINE = "manylora.serving.hosting.engine.process"
DISK_BYTES = 16 << 20
SLOW_S = 0.3
"""Pause of a slow link before each piece."""

NOISE = b"\xff\x00 no HTTP \xfe\r\n" * 8
CLOCK = """
import pathlib, time
_real, _offset = time.time, pathlib.Path(__file__).with_name("offset")
time.time = lambda: _real() + float(_offset.read_text())
"""


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_adapters(folder: Path, contents: Sequence[str]) -> None:
    """Write adapters without weights, a folder each: a simulated engine reads their settings, and knows them by it."""
    for content in contents:
        (folder / content).mkdir(parents=True)
        set_content(folder / content, content)


def set_content(path: Path, content: str) -> None:
    """Make a folder the adapter of a content, at once."""
    settings = {"peft_type": "LORA", "r": 16, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    half = path / "half"
    half.write_text(json.dumps({**settings, "base_model_name_or_path": content}))
    half.replace(path / "adapter_config.json")


class Command:
    """A command of manylora on a port of its own, which ends and comes back.

    Args:
        name: Of the log, and in the results.
        arguments: Of manylora, without the port.
        folder: Where its log is kept.
        environment: Variables beside those of this process.
    """

    def __init__(self, name: str, arguments: Sequence[str], folder: Path, environment: dict[str, str]) -> None:
        self.name = name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"{name.replace(' ', '-')}.log"
        self.seen: set[int] = set()
        """Every process that it had."""
        self.gaps: list[tuple[float, float]] = []
        """Times, monotonic, at which connections to it may break."""
        self._arguments = [*arguments, "--port", str(self.port)]
        self._environment = {**os.environ, **environment}
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it, and wait until it serves.

        Raises:
            RuntimeError: It did not start.
        """
        self._process = await self._started()

    async def _started(self) -> asyncio.subprocess.Process:
        command = (sys.executable, "-m", "manylora", *self._arguments)
        with self.log.open("a") as log:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=self._environment
            )
        self.seen.add(process.pid)
        assert process.stdout is not None
        with contextlib.suppress(TimeoutError):
            if await asyncio.wait_for(process.stdout.readline(), START_S):
                return process
        raise RuntimeError(f"{self.name} did not start: {self.log.read_text()[-2000:]}")

    @property
    def is_running(self) -> bool:
        """Whether its process is there."""
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process is not None
        return self._process.pid

    def engines(self) -> list[psutil.Process]:
        """Return its engines."""
        found = []
        with contextlib.suppress(psutil.Error):
            for one in psutil.Process(self.pid).children(recursive=True):
                self.seen.add(one.pid)
                with contextlib.suppress(psutil.Error):  # it has just ended
                    if ENGINE in one.cmdline():
                        found.append(one)
        return found

    async def kill(self) -> None:
        """Kill it."""
        self.engines()
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def stop(self) -> int:
        """Ask it to end, and return its exit code."""
        self.engines()
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        return await self._process.wait()

    async def replace(self) -> int:
        """Start another on the same port, and end the one before it; return the exit code of that."""
        follower = await self._started()
        code = await self.stop()
        self._process = follower
        return code

    @contextlib.asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        """Note the time within as one at which connections may break."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.gaps.append((began, time.monotonic()))

    def was_away(self, since: float, until: float) -> bool:
        """Return whether connections could break at some moment of a time."""
        return any(begin <= until and since <= end for begin, end in self.gaps)


@dataclass
class Link:
    """A way to a server that passes bytes, until it has a fault.

    Args:
        port: Of the server.
        fault: ``slow`` (a pause before each piece), ``silent`` (none until it heals), ``noise`` (bytes that are no
            HTTP, then the end), ``half`` (half a piece, then the end), ``refuse`` (no connection); empty for none.
        hits: Pieces or connections that a fault has met.
    """

    port: int
    fault: str = ""
    hits: Counter[str] = field(default_factory=Counter)
    at: int = field(default_factory=free_port)
    """Its own port."""

    FAULTS = ("slow", "silent", "noise", "half", "refuse")

    async def start(self) -> asyncio.Server:
        """Listen."""
        return await asyncio.start_server(self._serve, "127.0.0.1", self.at)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far: asyncio.StreamWriter | None = None
        try:
            if self.fault == "refuse":
                self.hits["refuse"] += 1
                return
            answers, far = await asyncio.open_connection("127.0.0.1", self.port)
            ways = [asyncio.create_task(self._up(reader, far)), asyncio.create_task(self._down(answers, writer))]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
        except OSError:
            pass  # the server is away
        finally:
            for end in (writer, far):
                if end is not None:
                    end.transport.abort()

    async def _up(self, reader: asyncio.StreamReader, far: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            far.write(data)
            await far.drain()

    async def _down(self, answers: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_between = True  # not inside a chunk: bytes there are content, whatever they are
        while data := await answers.read(1 << 16):
            fault = self.fault if is_between or self.fault != "noise" else ""
            self.hits[fault] += bool(fault)
            if fault == "slow":
                await asyncio.sleep(SLOW_S)
            while self.fault == "silent":
                await asyncio.sleep(0.05)
            cut = {"noise": NOISE, "half": data[: len(data) // 2]}.get(fault)
            writer.write(data if cut is None else cut)
            await writer.drain()
            if cut is not None:
                return
            is_between = data.endswith(b"\r\n")


class Disk:
    """The disk of the servers' logs: a small one that can be filled, or without the right to mount one that is full.

    Args:
        place: Where it is mounted.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        place.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(place)]
        self.can_change = (
            shutil.which("mount") is not None and not subprocess.run(mount, capture_output=True).returncode
        )

    def log(self, name: str) -> str:
        """Return the path of a log."""
        return str(self._place / name) if self.can_change else "/dev/full"

    def fill(self) -> None:
        """Write until there is no room."""
        with contextlib.suppress(OSError), (self._place / "filler").open("wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass

    def free(self) -> None:
        """Make room, also that of logs; a log is opened again by the next server alone."""
        with contextlib.suppress(OSError):
            (self._place / "filler").unlink()
        for log in self._place.glob("*.jsonl"):
            os.truncate(log, 0)

    @property
    def is_full(self) -> bool:
        """Whether a write fails."""
        try:
            with (self._place / "probe").open("wb", buffering=0) as file:
                file.write(b"x" * 8192)
        except OSError as error:
            return error.errno == errno.ENOSPC
        return False

    def close(self) -> None:
        """Unmount it."""
        if self.can_change:
            subprocess.run(["umount", "-l", str(self._place)], check=False)


class Clock:
    """The wall clock of the servers and the router; jumps by an offset that they add to the real one.

    Args:
        folder: Of the module that every Python process of theirs imports first.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._offset = folder / "offset"
        self.jump(0.0)
        (folder / "sitecustomize.py").write_text(CLOCK)
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = {"PYTHONPATH": os.pathsep.join(paths)}

    def jump(self, offset_s: float) -> None:
        """Set the offset."""
        half = self._offset.with_name("half")
        half.write_text(str(offset_s))
        half.replace(self._offset)


@contextlib.contextmanager
def disk_at(place: Path) -> Iterator[Disk]:
    """Give a disk, and take it away at the end."""
    disk = Disk(place)
    try:
        yield disk
    finally:
        disk.close()
