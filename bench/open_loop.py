"""A client that sends streamed completions when they are due, whatever becomes of the others, in a process of its own.

``python bench/open_loop.py FILE < plan.json`` reads a ``Plan``, says that it begins, and writes a ``Report`` to a
file. It keeps connections open and parses no more than a status and the end of a body, so that one process offers some
thousand requests a second. Each request tells when it was due and when it was sent: the difference is the client's
lateness.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec

from manylora.serving.http.listening import new_event_loop

LAST_BYTES = b"0\r\n\r\n"
"""The end of a chunked body."""

LOOK_EVERY_S = 0.05
"""Time between two looks at whether all requests have ended."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The load.

    Args:
        host: Address of the server.
        port: Port of the server.
        models: Models, asked in turn.
        at_s: Time of each request, in seconds from the begin.
        num_tokens: Tokens of each answer.
        until_s: Time at which requests in flight are given up.
    """

    host: str
    port: int
    models: list[str]
    at_s: list[float]
    num_tokens: list[int]
    until_s: float


class Seen(msgspec.Struct, kw_only=True):
    """A request as the client saw it; times in seconds from the begin, ``status`` 0 without an answer."""

    due_at: float
    sent_at: float
    num_tokens: int
    status: int = 0
    head_at: float | None = None
    first_at: float | None = None
    ended_at: float | None = None
    retry_after: str | None = None
    error: str | None = None


class Report(msgspec.Struct, kw_only=True):
    """All requests."""

    seen: list[Seen]


class Connection(asyncio.Protocol):
    """One connection with one request at a time; it returns to ``idle`` when the answer is complete."""

    def __init__(self, idle: list[Connection], began_at: float) -> None:
        self._idle = idle
        self._began_at = began_at
        self._seen: Seen | None = None
        self._head = b""
        self._num_left: int | None = None  # bytes of a body with a length
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._idle:
            self._idle.remove(self)
        if self._seen is not None:
            self._seen.error = f"the connection ended: {exc!r}"

    def ask(self, seen: Seen, request: bytes) -> None:
        self._seen, self._head, self._tail, self._num_left = seen, b"", b"", None
        seen.sent_at = time.monotonic() - self._began_at
        self._transport.write(request)

    def close(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        seen = self._seen
        if seen is None:
            return
        now = time.monotonic() - self._began_at
        if not seen.status:
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            seen.status, seen.head_at = int(head[9:12]), now
            for line in head.lower().split(b"\r\n")[1:]:
                name, _, value = line.partition(b":")
                if name == b"content-length":
                    self._num_left = int(value)
                elif name == b"retry-after":
                    seen.retry_after = value.strip().decode()
        if seen.first_at is None and b"data: " in data:
            seen.first_at = now
        if b'"error"' in data and seen.status == 200:
            seen.error = "an error in the stream"
        if self._num_left is not None:
            self._num_left -= len(data)
            is_over = self._num_left <= 0
        elif len(data) >= len(LAST_BYTES):
            is_over = data.endswith(LAST_BYTES)
            self._tail = data[-len(LAST_BYTES) :]
        else:
            self._tail = (self._tail + data)[-len(LAST_BYTES) :]
            is_over = self._tail == LAST_BYTES
        if is_over:
            seen.ended_at = now
            self._seen = None
            self._idle.append(self)


async def run(plan: Plan) -> Report:
    """Send every request when it is due; return once all have ended, or at ``until_s``."""
    loop = asyncio.get_running_loop()
    requests = [
        request_of(plan, plan.models[number % len(plan.models)], num_tokens)
        for number, num_tokens in enumerate(plan.num_tokens)
    ]
    print("begins", flush=True)  # the bench counts processor time from here
    began_at = time.monotonic()
    idle: list[Connection] = []
    every: list[Connection] = []
    report = Report(seen=[])

    async def connect(seen: Seen, request: bytes) -> None:
        try:
            _, connection = await loop.create_connection(lambda: Connection(idle, began_at), plan.host, plan.port)
        except OSError as error:
            seen.error = repr(error)
            return
        every.append(connection)
        connection.ask(seen, request)

    connecting: set[asyncio.Task[None]] = set()
    for due_at, num_tokens, request in zip(plan.at_s, plan.num_tokens, requests, strict=True):
        await asyncio.sleep(max(0.0, began_at + due_at - time.monotonic()))
        seen = Seen(due_at=due_at, sent_at=due_at, num_tokens=num_tokens)
        report.seen.append(seen)
        if idle:
            idle.pop().ask(seen, request)
        else:
            task = asyncio.create_task(connect(seen, request))
            connecting.add(task)
            task.add_done_callback(connecting.discard)
    while time.monotonic() - began_at < plan.until_s and not all_ended(report.seen):
        await asyncio.sleep(LOOK_EVERY_S)
    for connection in every:
        connection.close()
    return report


def all_ended(seen: Sequence[Seen]) -> bool:
    return all(one.ended_at is not None or one.error is not None for one in seen)


def request_of(plan: Plan, model: str, num_tokens: int) -> bytes:
    """Return the bytes of a request."""
    body = msgspec.json.encode(
        {
            "model": model,
            "prompt": "the quick brown fox",
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": True,
        }
    )
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {plan.host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


if __name__ == "__main__":
    given = msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        found = runner.run(run(given))
    Path(sys.argv[1]).write_bytes(msgspec.json.encode(found))
