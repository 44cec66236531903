"""Processes of `proxy.py`: a source of streams that costs little, and the plainest relay of a web framework.

    python bench/proxy_parts.py source PORTS GROUPS
    python bench/proxy_parts.py relay URL...

Each prints one line, which ends with its ports. The source listens on several ports as several servers would. Its
streams are in groups, as those of one engine: a group's streams get their tokens at once, the groups one after the
other.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import sys
import time
from typing import Any

import httptools
import uvloop
from paced import TICK_S, chunk

MODELS = json.dumps({"object": "list", "data": [{"id": "paced", "owned_by": "vllm", "root": "/paced", "parent": None}]})
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


class Group:
    """Streams that get their tokens at once, every so many ticks."""

    def __init__(self, loop: asyncio.AbstractEventLoop, phase: float) -> None:
        self._loop = loop
        self._phase = phase
        self._streams: dict[Connection, int] = {}
        self._step_s = 0.0
        self._is_running = False

    def join(self, stream: Connection, step_s: float, num_tokens: int) -> None:
        self._streams[stream] = num_tokens
        self._step_s = step_s
        if not self._is_running:
            self._is_running = True
            self._due = self._loop.time() + self._phase * step_s
            self._loop.call_at(self._due, self._step)

    def leave(self, stream: Connection) -> None:
        self._streams.pop(stream, None)

    def _step(self) -> None:
        body = chunk(time.monotonic())
        framed = b"%x\r\n%b\r\n" % (len(body), body)
        for stream, left in list(self._streams.items()):
            stream.transport.write(framed if left > 1 else framed + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            if left > 1:
                self._streams[stream] = left - 1
            else:
                del self._streams[stream]
                stream.end()
        self._is_running = bool(self._streams)
        if self._is_running:
            self._due = max(self._due + self._step_s, self._loop.time())
            self._loop.call_at(self._due, self._step)


class Connection(asyncio.Protocol):
    """A connection of a client or a relay."""

    def __init__(self, groups: list[Group], numbers: itertools.count[int]) -> None:
        self._groups = groups
        self._numbers = numbers
        self._group: Group | None = None
        self._new()

    def _new(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._url = self._body = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._group is not None:
            self._group.leave(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._keeps_alive = self._parser.should_keep_alive()
        if self._url == b"/v1/completions":
            asked = json.loads(self._body)
            self.transport.write(HEAD)
            self._group = self._groups[next(self._numbers) % len(self._groups)]
            self._group.join(self, asked["prompt"][0] * TICK_S, asked["max_tokens"])
            return
        body = MODELS.encode() if self._url == b"/v1/models" else b""
        self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        self.end()

    def end(self) -> None:
        self._group = None
        if not self._keeps_alive:
            self.transport.close()
        asyncio.get_running_loop().call_soon(self._new)


async def source(num_ports: int, num_groups: int) -> None:
    loop = asyncio.get_running_loop()
    groups = [Group(loop, phase / num_groups) for phase in range(num_groups)]
    numbers = itertools.count()
    servers = []
    for _ in range(num_ports):
        servers.append(await loop.create_server(lambda: Connection(groups, numbers), "127.0.0.1", 0, backlog=2048))
    print("source at", *(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.Event().wait()


async def relay(urls: list[str]) -> None:
    """aiohttp on both sides: read a piece, write it."""
    from aiohttp import ClientSession, TCPConnector, web

    session = ClientSession(connector=TCPConnector(limit=0), auto_decompress=False)
    turns = itertools.cycle(urls)

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        async with session.post(next(turns) + request.path, data=body) as answer:
            response = web.StreamResponse(status=answer.status)
            response.content_type = "text/event-stream"
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            return response

    app = web.Application()
    app.router.add_post("/v1/completions", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    bound = socket.create_server(("127.0.0.1", 0), backlog=2048)
    await web.SockSite(runner, bound, backlog=2048).start()
    print(f"relay at {bound.getsockname()[1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    role, *rest = sys.argv[1:]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(source(*map(int, rest)) if role == "source" else relay(rest))
