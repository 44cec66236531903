"""Tests of the router: fake servers with vLLM's routes and metrics, a router in front of them, and a plain client.

All run on one event loop. A fake server answers as it is told, also with bytes that are no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from serving import PATIENCE_S

from manylora.route.config import ProxyConfig
from manylora.route.fleet.sources import Resolve, resolve
from manylora.route.serve import Proxy
from manylora.serving.http.listening import new_event_loop

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="base"}} {running:.1f}
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="base"}} {waiting:.1f}
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="base"}} 0.25
# HELP vllm:lora_requests_info Running stats on lora requests.
# TYPE vllm:lora_requests_info gauge
vllm:lora_requests_info{{max_lora="4",running_lora_adapters="",waiting_lora_adapters=""}} 1.0e+09
vllm:lora_requests_info{{max_lora="4",running_lora_adapters="{in_use}",waiting_lora_adapters="{in_use}"}} 1.7e+09
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="16",cache_dtype="auto",engine="0"}} 1.0
"""

Headers = dict[str, str]
ANSWERED = "completions", "/responses"
"""Ends of the paths that a behaviour answers."""


@dataclass
class Call:
    """A request that a fake server got."""

    method: str
    path: str
    headers: Headers
    body: bytes
    writer: asyncio.StreamWriter

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, status: int, body: bytes | str | dict[str, Any], **headers: str) -> None:
        """Send a whole answer, as JSON or text."""
        kind = "application/json" if isinstance(body, dict) else "text/plain"
        data = (
            json.dumps(body).encode() if isinstance(body, dict) else body if isinstance(body, bytes) else body.encode()
        )
        lines = [f"HTTP/1.1 {status} X", f"content-type: {kind}", f"content-length: {len(data)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        if not self.path.partition("?")[0].endswith(ANSWERED):
            lines.append("connection: close")  # requests use connections again that had requests: polls warm none
        await self.write("\r\n".join([*lines, "", ""]).encode() + data)

    async def begin_stream(self) -> None:
        await self.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n")
        await self.write(b"transfer-encoding: chunked\r\n\r\n")

    async def event(self, text: str) -> None:
        data = f'data: {{"choices":[{{"index":0,"text":"{text}"}}]}}\n\n'.encode()
        await self.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def end_stream(self) -> None:
        await self.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


Behaviour = Callable[[Call], Awaitable[None]]


async def recite(call: Call) -> None:
    """Answer a completion with the model's name, whole or as three events."""
    asked = call.json
    if not asked.get("stream"):
        await call.answer(200, {"model": asked["model"], "choices": [{"index": 0, "text": asked["model"]}]})
        return
    await call.begin_stream()
    for place in range(3):
        await call.event(f"{asked['model']}-{place}")
    await call.end_stream()


@dataclass
class FakeServer:
    """A server with vLLM's routes.

    Args:
        adapters: Paths by name, loaded at start.
        behave: Answers requests for completions.
        poll: Answers ``/health``; ``None`` for 200.
        change: Answers requests to load and unload adapters; ``None`` for ``change_adapters``.
    """

    adapters: dict[str, str] = field(default_factory=dict)
    base: str = "base"
    owner: str = "vllm"
    behave: Behaviour = recite
    poll: Behaviour | None = None
    change: Behaviour | None = None
    running: int = 0
    waiting: int = 0
    metrics: str | None = None
    calls: list[Call] = field(default_factory=list)
    num_open: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def changes(self) -> list[tuple[str, str | None]]:
        """Names and paths of the requests to load adapters, and ``None`` to unload."""
        calls = [call.json for call in self.calls if call.path.endswith("load_lora_adapter")]
        return [(call["lora_name"], call.get("lora_path")) for call in calls]

    @property
    def completions(self) -> list[Call]:
        return [call for call in self.calls if call.path.endswith(ANSWERED)]

    async def start(self, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_server(self._serve, host, port, ssl=tls)
        self.port: int = self._server.sockets[0].getsockname()[1]

    def crash(self) -> None:
        """Die at once, also within an answer: stop to listen, and break every connection."""
        self._server.close()
        for task in list(self._tasks):
            task.cancel()

    async def stop(self) -> None:
        """Die, and wait for it."""
        self.crash()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.num_open += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while True:
                    await self._one(reader, writer)
        finally:
            self.num_open -= 1
            self._tasks.discard(task)
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        call = Call(method, path, headers, body, writer)
        self.calls.append(call)
        answering = asyncio.create_task(self._answer(call))
        ended = asyncio.create_task(reader.read(1)) if path.endswith(ANSWERED) else None
        try:
            await asyncio.wait({answering, *([ended] if ended else [])}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise ConnectionResetError
            answering.result()
        finally:
            for task in (answering, ended):
                if task is not None:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)

    async def _answer(self, call: Call) -> None:
        route = call.path.partition("?")[0]
        if route == "/health":
            await (self.poll(call) if self.poll is not None else call.answer(200, ""))
        elif route == "/v1/models":
            base = {"id": self.base, "object": "model", "owned_by": self.owner, "root": "/m", "parent": None}
            cards = [
                {"id": name, "object": "model", "owned_by": self.owner, "root": path, "parent": self.base}
                for name, path in self.adapters.items()
            ]
            await call.answer(200, {"object": "list", "data": [base, *cards]})
        elif route == "/metrics":
            in_use = ",".join(list(self.adapters)[:1])
            text = METRICS.format(running=self.running, waiting=self.waiting, in_use=in_use)
            await call.answer(200, self.metrics if self.metrics is not None else text)
        elif route.endswith("load_lora_adapter"):
            await (self.change or self.change_adapters)(call)
        elif route.endswith(ANSWERED):
            await self.behave(call)
        else:
            await call.answer(404, {"error": {"message": "no such route", "code": 404}})

    async def change_adapters(self, call: Call) -> None:
        """Load or unload an adapter as vLLM does."""
        name, path = call.json["lora_name"], call.json.get("lora_path")
        if path is None:
            is_known = self.adapters.pop(name, None) is not None
            await call.answer(200 if is_known else 404, "Success." if is_known else "not found")
        elif path.startswith("/missing"):
            await call.answer(404, {"error": {"message": "no such path", "code": 404}})
        elif name in self.adapters and not call.json.get("load_inplace"):
            await call.answer(400, {"error": {"message": "has already been loaded", "code": 400}})
        else:
            self.adapters[name] = path
            await call.answer(200, f"Success: LoRA adapter '{name}' added successfully.")


@dataclass
class Answer:
    """An answer as the client saw it; ``is_whole`` is false where the connection broke."""

    status: int
    headers: Headers
    body: bytes
    is_whole: bool = True

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """A client that opens a connection for each request, and sees every byte."""

    def __init__(self, url: str) -> None:
        self._host, _, port = url.partition("://")[2].partition(":")
        self._port = int(port)

    async def open(
        self, method: str, path: str, body: bytes | dict[str, Any] | None = None, **headers: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request; return its connection."""
        data = json.dumps(body).encode() if isinstance(body, dict) else body or b""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        lines = [f"{method} {path} HTTP/1.1", f"host: {self._host}:{self._port}", f"content-length: {len(data)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join([*lines, "connection: close", "", ""]).encode() + data)
        return reader, writer

    async def ask(self, method: str, path: str, body: bytes | dict[str, Any] | None = None, **headers: str) -> Answer:
        """Send a request; return the whole answer."""
        reader, writer = await self.open(method, path, body, **headers)
        try:
            data = await reader.read()
        except ConnectionResetError:
            data = b""
        writer.close()
        if not data:
            return Answer(0, {}, b"", is_whole=False)
        head, _, raw = data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        found = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        if found.get("transfer-encoding") != "chunked":
            return Answer(int(first.split(" ")[1]), found, raw, len(raw) == int(found.get("content-length", len(raw))))
        body_bytes, is_whole = b"", False
        while raw:
            size, _, raw = raw.partition(b"\r\n")
            if not size or int(size, 16) == 0:
                is_whole = True
                break
            body_bytes += raw[: int(size, 16)]
            raw = raw[int(size, 16) + 2 :]
        return Answer(int(first.split(" ")[1]), found, body_bytes, is_whole)

    async def complete(self, model: str, *, stream: bool = False, **headers: str) -> Answer:
        """Ask for a completion."""
        return await self.ask(
            "POST", "/v1/completions", {"model": model, "prompt": "hello", "stream": stream}, **headers
        )


@contextlib.asynccontextmanager
async def servers(*fakes: FakeServer) -> AsyncIterator[list[str]]:
    """Start fake servers; yield their URLs."""
    for fake in fakes:
        await fake.start()
    try:
        yield [fake.url for fake in fakes]
    finally:
        for fake in fakes:
            await fake.stop()


@contextlib.asynccontextmanager
async def routing(*urls: str, look_up: Resolve = resolve, **options: Any) -> AsyncIterator[tuple[Proxy, Client]]:
    """Run a router in front of servers, quick to poll; yield it with a client."""
    quick = {"port": 0, "poll_s": 0.05, "poll_timeout_s": 2.0, "slow_start_s": 0.0, "drain_timeout_s": 5.0}
    proxy = Proxy(ProxyConfig(backends=urls, **{**quick, **options}), resolve=look_up)
    ready = asyncio.Event()
    serving = asyncio.create_task(proxy.serve(ready.set))
    try:
        await asyncio.wait({serving, asyncio.ensure_future(ready.wait())}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        yield proxy, Client(proxy.url)
    finally:
        proxy.drain()
        await serving


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    """Run a test on the event loop that the router is started with."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(test())


async def until(condition: Callable[[], bool]) -> None:
    """Return when a condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        await asyncio.sleep(0.005)


def names(count: int) -> list[str]:
    """Return names of adapters."""
    return [f"a{index}" for index in itertools.islice(itertools.count(), count)]
