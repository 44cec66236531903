"""The cheapest client of event streams there can be, in a process of its own: sockets, epoll, and a list.

``python -m manylora.bench.http_client HOST PORT STREAMS STEP_TICKS TOKENS`` opens all streams at once against a server
with paced parts (see ``paced``), keeps what it reads with the time it read it, and only when all is over looks inside:
a client that parsed as it went would measure itself. It prints one JSON object.
"""

from __future__ import annotations

import json
import re
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from manylora.bench.paced import NUM_TICKS, TICK_S

__all__ = ["StreamsResult", "run_streams"]

STAMP = re.compile(rb"~(\d{5})")
LOOK_EVERY_S = 0.0005
"""How often sockets are looked at. A client that sleeps until each write wakes it makes the server pay for the waking,
which on a virtual machine costs more than the write; clients are elsewhere. Latencies are up to this too long."""

WARM_SHARE = 0.1
"""Share of the run at its start that is left out: prompts are read and connections made there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsResult:
    """What the client saw in the steady part of a run: from a tenth of it to the end of the first stream that ends.

    Args:
        num_streams: Concurrent streams.
        num_tokens: Tokens received in the steady part.
        num_events: Server-sent events that carried them.
        seconds: Length of the steady part.
        tokens_per_s: Tokens per second over all streams.
        latency_ms: Milliseconds from the engine's stamp to the client's read: mean, percentiles and largest.
        client_cpu_share: Share of one core that the client itself took: near 1 it would measure itself.
    """

    num_streams: int
    num_tokens: int
    num_events: int
    seconds: float
    tokens_per_s: float
    latency_ms: dict[str, float]
    client_cpu_share: float


def run_streams(host: str, port: int, *, num_streams: int, step_ticks: int, num_tokens: int) -> StreamsResult:
    """Open the streams, read them to their end, and say what came when.

    Args:
        host: Of the server.
        port: Of the server.
        num_streams: How many at once.
        step_ticks: What a step should take, in units of ``TICK_S``.
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
    reads: list[tuple[float, bytes]] = []
    num_open, first_end = num_streams, 0.0
    now = time.monotonic
    cpu_before, began_at = time.process_time(), now()
    while num_open:
        time.sleep(LOOK_EVERY_S)
        for key, _ in selector.select():
            assert isinstance(key.fileobj, socket.socket)
            data = key.fileobj.recv(1 << 16)
            read_at = now()
            if data:
                reads.append((read_at, data))
            else:
                selector.unregister(key.fileobj)
                key.fileobj.close()
                num_open -= 1
                first_end = first_end or read_at
    cpu_s, took_s = time.process_time() - cpu_before, now() - began_at
    return _summary(reads, num_streams, began_at + WARM_SHARE * took_s, first_end, cpu_s / took_s)


def _summary(
    reads: Sequence[tuple[float, bytes]], num_streams: int, from_s: float, until_s: float, cpu_share: float
) -> StreamsResult:
    read_ticks: list[float] = []
    stamps: list[int] = []
    num_events = 0
    for read_at, data in reads:
        if not from_s <= read_at < until_s:
            continue
        found = STAMP.findall(data)
        stamps += map(int, found)
        read_ticks += [read_at / TICK_S] * len(found)
        num_events += data.count(b"data: ")
    on_its_way = (np.array(read_ticks) % NUM_TICKS - np.array(stamps)) % NUM_TICKS * TICK_S * 1e3
    p50, p90, p99 = np.percentile(on_its_way, (50, 90, 99))
    return StreamsResult(
        num_streams=num_streams,
        num_tokens=len(stamps),
        num_events=num_events,
        seconds=until_s - from_s,
        tokens_per_s=len(stamps) / (until_s - from_s),
        latency_ms={
            "mean": float(on_its_way.mean()),
            "p50": float(p50),
            "p90": float(p90),
            "p99": float(p99),
            "max": float(on_its_way.max()),
        },
        client_cpu_share=cpu_share,
    )


if __name__ == "__main__":
    host, *numbers = sys.argv[1:]
    port, num_streams, step_ticks, num_tokens = map(int, numbers)
    found = run_streams(host, port, num_streams=num_streams, step_ticks=step_ticks, num_tokens=num_tokens)
    print(json.dumps(asdict(found)))
