"""A server under attack: its processes, a neighbour's stream, a poller of ``/health``, and a sampler of memory.

The server is a process of its own, so that the attacker's work is not counted as the server's. Its engine is simulated
and sends a token every few milliseconds, so that a gap in the neighbour's stream is the server's doing.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from ports import free_ports
from timed_serve import Longest, Note

LATE_S = float(os.environ.get("ATTACK_LATE_S", "3.0"))
"""Longest wait for ``/health`` and for a neighbour's token; the default allows for a machine that is shared."""

MIB = 1 << 20
MAX_GROWTH_BYTES = 150 * MIB
"""Most memory that one case may add to a process."""

NUM_TIMES = int(os.environ.get("ATTACK_TIMES", "1"))
"""Times that a hostile request is sent."""

PATIENCE_S, START_S = 60.0, 300.0
POLL_S = 0.01
MODEL = "demo"
SIMULATED = (MODEL, "--simulate", "a40:llama-7b")


@dataclass(frozen=True)
class Answer:
    """An HTTP answer."""

    status: int
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]  # type: ignore[no-any-return]


@dataclass
class Target:
    """A running server."""

    process: subprocess.Popen[str]
    host: str
    port: int
    log: Path
    note: Note | None = None

    def longest(self) -> Longest:
        """Return the longest callback of the server's event loop since the last call; the server is a timed one."""
        assert self.note is not None
        self.ask("GET", "/version")  # the callback that sent the last answer has ended by now
        return self.note.take()

    def ask(self, method: str, path: str, body: bytes | None = None, timeout_s: float = PATIENCE_S) -> Answer:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            connection.request(method, path, body, {"content-type": "application/json"} if body is not None else {})
            answer = connection.getresponse()
            return Answer(answer.status, answer.read())
        finally:
            connection.close()

    def post(self, path: str, body: object) -> Answer:
        return self.ask("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode())

    def begin(self, path: str, body: object, **headers: str) -> http.client.HTTPConnection:
        """Send a request, and leave its answer for later."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE_S)
        connection.request("POST", path, json.dumps(body).encode(), {"content-type": "application/json", **headers})
        return connection

    def connect(self) -> socket.socket:
        opened = socket.create_connection((self.host, self.port), timeout=PATIENCE_S)
        return opened

    def engines(self) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for one in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has just ended
                # A process that an engine has just started has its memory and command line until it executes its own.
                is_new = one.ppid() in {engine.pid for engine in found}
                if not is_new and "manylora.serving.hosting.engine.process" in one.cmdline():
                    found.append(one)
        return found

    def memory(self) -> dict[str, int]:
        """Return the resident bytes of the API process and of all engines."""
        engines = 0
        with contextlib.suppress(psutil.Error):
            engines = sum(one.memory_info().rss for one in self.engines())
        return {"api": psutil.Process(self.process.pid).memory_info().rss, "engine": engines}

    def wait_until(self, status: int, patience_s: float = PATIENCE_S) -> None:
        """Wait until ``/health`` has a status."""
        deadline = time.monotonic() + patience_s
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.ask("GET", "/health").status == status:
                    return
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.05)

    def wait_for_log(self, text: str) -> None:
        """Wait until a line of the log has ``text``."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.log.read_text():
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.05)


@contextlib.contextmanager
def running(
    tmp: Path,
    *options: str,
    model: Sequence[str] = SIMULATED,
    num_files: int | None = None,
    waits: bool = True,
    is_timed: bool = False,
) -> Iterator[Target]:
    """Run a server.

    Args:
        tmp: A folder for its log.
        options: Of ``manylora serve``.
        model: Its model; by default with a simulated engine.
        num_files: Limit of its open files.
        waits: Whether to wait until it serves.
        is_timed: Whether the callbacks of its event loop are timed.
    """

    def limit() -> None:
        if num_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))

    (port,) = free_ports(1)
    program: list[str] = ["-m", "manylora"]
    note = None
    if is_timed:
        note = Note(tmp / "note")
        program = [str(Path(__file__).with_name("timed_serve.py")), str(tmp / "note")]
    command = [sys.executable, *program, "serve", *model]
    log = tmp / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--port", str(port), *options], stdout=file, stderr=file, text=True, preexec_fn=limit
        )
    target = Target(process, "127.0.0.1", port, log, note)
    try:
        if waits:
            target.wait_until(200, START_S)
        yield target
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass
class Watch:
    """What the neighbours of an attack see, and the memory that it takes.

    ::

        with Watch(target) as seen:
            attack
        seen.check()
    """

    target: Target
    health_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    growth: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def __enter__(self) -> Watch:
        self._ends = threading.Event()
        self._begun = threading.Event()
        self._before = self.target.memory()
        self._threads = [threading.Thread(target=one) for one in (self._poll, self._stream, self._sample)]
        for thread in self._threads:
            thread.start()
        assert self._begun.wait(PATIENCE_S), self.errors
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def check(self, *, step_s: float = 0.0) -> None:
        """Assert that no neighbour was late and no process grew.

        ``step_s`` is the time of the longest step that the device computes for what is asked: neighbours share it.
        """
        assert not self.errors
        assert self.health_p99_s() <= LATE_S, f"/health took {self.health_p99_s():.3f} s"
        assert max(self.gaps_s) <= LATE_S + step_s, f"a neighbour waited {max(self.gaps_s):.3f} s for a token"
        for process, num_bytes in self.growth.items():
            assert num_bytes <= MAX_GROWTH_BYTES, f"{process} grew by {num_bytes / MIB:.0f} MiB"

    def health_p99_s(self) -> float:
        """Return the 99th percentile of the time that ``/health`` took."""
        return statistics.quantiles(self.health_s, n=100)[98] if len(self.health_s) > 1 else max(self.health_s)

    def summary(self) -> str:
        """Return the figures in a line."""
        p99 = self.health_p99_s()
        grown = " ".join(f"{name} {num / MIB:+.0f} MiB" for name, num in self.growth.items())
        return (
            f"health p99 {p99 * 1e3:.1f} max {max(self.health_s) * 1e3:.1f} ms, "
            f"neighbour's longest gap {max(self.gaps_s) * 1e3:.1f} ms, {grown}"
        )

    def _poll(self) -> None:
        while not self._ends.is_set():
            began_at = time.monotonic()
            try:
                status = self.target.ask("GET", "/health").status
            except OSError as error:
                self.errors.append(f"/health: {error!r}")
                return
            self.health_s.append(time.monotonic() - began_at)
            if status != 200:
                self.errors.append(f"/health: {status}")
            time.sleep(POLL_S)

    def _stream(self) -> None:
        """Read answers as a neighbour, one after another, until the attack is over."""
        body = {"model": MODEL, "prompt": "a neighbour", "max_tokens": 100, "ignore_eos": True, "stream": True}
        body["return_token_ids"] = True  # an event for each token, also for one that completes no character
        while not self._ends.is_set():
            connection = http.client.HTTPConnection(self.target.host, self.target.port, timeout=PATIENCE_S)
            try:
                connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
                answer = connection.getresponse()
                if answer.status != 200:
                    self.errors.append(f"a neighbour got {answer.status}")
                    return
                at = None  # the first token has waited for its own prompt
                while not self._ends.is_set() and (line := answer.readline()):
                    if not line.startswith(b"data: "):
                        continue
                    if b'"error"' in line:
                        self.errors.append(f"a neighbour got {line!r}")
                    now = time.monotonic()
                    if at is not None:
                        self.gaps_s.append(now - at)
                    at = now
                    self._begun.set()
            except OSError as error:
                self.errors.append(f"a neighbour: {error!r}")
                return
            finally:
                connection.close()

    def _sample(self) -> None:
        while True:
            for process, num_bytes in self.target.memory().items():
                grown = num_bytes - self._before[process]
                self.growth[process] = max(self.growth.get(process, 0), grown)
            if self._ends.wait(0.02):
                return


def half_sent(target: Target, count: int) -> Sequence[socket.socket]:
    """Open connections that begin a request and do not end it."""
    opened = []
    for _ in range(count):
        one = target.connect()
        one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: app")
        opened.append(one)
    return opened
