"""A minimal client of event streams, in a process of its own: sockets, epoll, and a list.

``python bench/http_client.py HOST PORT STREAMS STEP_TICKS TOKENS`` opens all streams at once against a
server with paced parts (see ``paced``). It stores each read with its time and parses after the run: a client that
parsed meanwhile would measure itself. It prints one JSON object.

The client is late itself: it sleeps between two polls, and reads the last of two hundred sockets after all others.
Linux gives the time at which bytes arrived in a socket, which separates the server's latency from the client's.
"""

from __future__ import annotations

import json
import re
import selectors
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias

import numpy as np
from paced import NUM_TICKS, TICK_S

STAMP = re.compile(rb"~(\d{5})")
LOOK_EVERY_S = 0.0005
"""Seconds between two polls of the sockets. A client that each write wakes makes the server pay for the wake-up, which
on a virtual machine costs more than the write; real clients are elsewhere. Latencies are up to this too long."""

SO_TIMESTAMPNS = 35 if sys.platform == "linux" else None
"""The option with which a socket gives the time of arrival of its bytes; Python has no name for it."""

_TIMESPEC = struct.Struct("@qq")

WARM_SHARE = 0.1
"""Share of the run at its start that is left out: prompts are read and connections made there."""


Read: TypeAlias = tuple[float, list[tuple[int, int, bytes]], bytes]
"""Time of the read on the monotonic clock, the socket's ancillary data, and the bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsResult:
    """What the client saw in the steady part of a run: from a tenth of it to the end of the first stream that ends.

    Args:
        num_streams: Concurrent streams.
        num_tokens: Tokens received in the steady part.
        num_events: Server-sent events that carried them.
        num_bytes: Bytes that carried those.
        seconds: Length of the steady part.
        tokens_per_s: Tokens per second over all streams.
        latency_ms: Milliseconds from the engine's stamp to the arrival in the client's socket: mean, percentiles and
            largest. Where several chunks are read at once, that of the last.
        read_ms: To the client's read; the same as ``latency_ms`` where the system does not tell of arrivals.
        client_cpu_share: Share of one core that the client itself took: near 1 it would measure itself.
    """

    num_streams: int
    num_tokens: int
    num_events: int
    num_bytes: int
    seconds: float
    tokens_per_s: float
    latency_ms: dict[str, float]
    read_ms: dict[str, float]
    client_cpu_share: float


def run_streams(host: str, port: int, *, num_streams: int, step_ticks: int, num_tokens: int) -> StreamsResult:
    """Open the streams, read them to their end, and say what came when.

    Args:
        host: Of the server.
        port: Of the server.
        num_streams: Concurrent streams.
        step_ticks: Duration of a step, in units of ``TICK_S``.
        num_tokens: Tokens of each stream.
    """
    selector = selectors.DefaultSelector()
    for index in range(num_streams):
        body = json.dumps(
            {
                "model": "paced",
                "prompt": [step_ticks, index],
                "max_tokens": num_tokens,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        connection = socket.create_connection((host, port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        )
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ)
        if SO_TIMESTAMPNS is not None:
            connection.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    reads: list[Read] = []
    num_open, first_end = num_streams, 0.0
    now, room = time.monotonic, socket.CMSG_SPACE(_TIMESPEC.size)
    cpu_before, began_at = time.process_time(), now()
    while num_open:
        time.sleep(LOOK_EVERY_S)
        for key, _ in selector.select():
            assert isinstance(key.fileobj, socket.socket)
            data, told, _, _ = key.fileobj.recvmsg(1 << 16, room)
            read_at = now()
            if data:
                reads.append((read_at, told, data))
            else:
                selector.unregister(key.fileobj)
                key.fileobj.close()
                num_open -= 1
                first_end = first_end or read_at
    cpu_s, took_s = time.process_time() - cpu_before, now() - began_at
    return _summary(reads, num_streams, began_at + WARM_SHARE * took_s, first_end, cpu_s / took_s)


def epoch_s() -> float:
    """Return what the system's clock said when the monotonic one began, in seconds; the best of several looks."""
    looks = [(time.monotonic(), time.time(), time.monotonic()) for _ in range(20)]
    before, epoch, after = min(looks, key=lambda look: look[2] - look[0])
    return epoch - (before + after) / 2


def arrived_at(read: Read, epoch: float) -> float:
    """Return when the last bytes of a read came in, in seconds of the monotonic clock; if nothing tells, the read's.

    Args:
        read: A read.
        epoch: See ``epoch_s``.
    """
    read_at, told, _ = read
    for _, kind, value in told:
        if kind == SO_TIMESTAMPNS:
            seconds, nanoseconds = _TIMESPEC.unpack(value[: _TIMESPEC.size])
            return min(read_at, float(seconds - epoch + nanoseconds * 1e-9))
    return read_at


def _summary(reads: Sequence[Read], num_streams: int, from_s: float, until_s: float, cpu_share: float) -> StreamsResult:
    epoch = epoch_s()
    read_at: list[float] = []
    arrivals: list[float] = []
    stamps: list[int] = []
    num_events = num_bytes = 0
    for read in reads:
        if not from_s <= read[0] < until_s:
            continue
        found = STAMP.findall(read[2])
        stamps += map(int, found)
        read_at += [read[0]] * len(found)
        arrivals += [arrived_at(read, epoch)] * len(found)
        num_events += read[2].count(b"data: ")
        num_bytes += len(read[2])
    return StreamsResult(
        num_streams=num_streams,
        num_tokens=len(stamps),
        num_events=num_events,
        num_bytes=num_bytes,
        seconds=until_s - from_s,
        tokens_per_s=len(stamps) / (until_s - from_s),
        latency_ms=_spread(arrivals, stamps),
        read_ms=_spread(read_at, stamps),
        client_cpu_share=cpu_share,
    )


def _spread(times_s: Sequence[float], stamps: Sequence[int]) -> dict[str, float]:
    """Return how long after their stamps things happened, in milliseconds; a stamp is up to a tenth of one early."""
    late = (np.array(times_s) / TICK_S % NUM_TICKS - np.array(stamps)) % NUM_TICKS * TICK_S * 1e3
    p50, p90, p99 = np.percentile(late, (50, 90, 99))
    return {
        "least": float(late.min()),
        "mean": float(late.mean()),
        "p50": float(p50),
        "p90": float(p90),
        "p99": float(p99),
        "max": float(late.max()),
    }


if __name__ == "__main__":
    host, *numbers = sys.argv[1:]
    port, num_streams, step_ticks, num_tokens = map(int, numbers)
    found = run_streams(host, port, num_streams=num_streams, step_ticks=step_ticks, num_tokens=num_tokens)
    print(json.dumps(asdict(found)))
