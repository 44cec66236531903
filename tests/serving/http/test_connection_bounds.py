"""The bounds of connections: pipelined requests, clients that do not read, room for new connections, upgrades."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from transports import Transport
from uvicorn.server import ServerState

from manylora.core.config import ServerConfig
from manylora.route.serve import max_connections
from manylora.serving.http.connections import REPEATED_EVERY_S, ConnectionBounds, client_of
from manylora.serving.http.http_protocol import ChunkWritingProtocol, chunk_writer
from manylora.serving.server.http_server import connection_bounds

GET = b"GET /%d HTTP/1.1\r\nHost: here\r\n\r\n"


@dataclass
class World:
    """A server of three connections, two of one address, whose application answers once it may."""

    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    reached: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    state: ServerState = field(default_factory=ServerState)
    bounds: ConnectionBounds = field(
        default_factory=lambda: ConnectionBounds(
            max_connections=3, max_per_address=2, header_timeout_s=60.0, body_timeout_s=60.0, write_timeout_s=100.0
        )
    )

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.reached.append(scope["path"])
        await receive()

        async def answer() -> None:
            await self.may_answer.wait()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})

        answering = asyncio.create_task(answer())
        if (await receive())["type"] == "http.disconnect" and not self.may_answer.is_set():
            self.left.append(scope["path"])
            answering.cancel()

    def connect(self, address: str = "10.0.0.1") -> tuple[ChunkWritingProtocol, Transport]:
        config = uvicorn.Config(self.app, lifespan="off", interface="asgi3")
        protocol = ChunkWritingProtocol(config, self.state, {}, bounds=self.bounds)
        transport = Transport(address)
        protocol.connection_made(transport)
        return protocol, transport


def scenario(run: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        await run(World())

    asyncio.run(main())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_pipelined_requests_have_a_bound() -> None:
    async def run(world: World) -> None:
        protocol, transport = world.connect()
        protocol.data_received(b"".join([GET % i for i in range(10_000)]))
        assert len(protocol.pipeline) == 8
        assert transport.is_closed
        await settle()
        assert world.reached == ["/0"]

    scenario(run)


def test_pipelined_requests_are_answered_before_more_are_read() -> None:
    async def run(world: World) -> None:
        world.may_answer.set()
        protocol, transport = world.connect()
        paused: list[bool] = []
        respond = protocol.on_response_complete

        def note() -> None:
            respond()
            paused.append(transport.is_paused)

        protocol.on_response_complete = note  # type: ignore[method-assign]
        protocol.data_received(b"".join([GET % i for i in range(5)]))
        await settle()
        assert transport.written.count(b"200 OK") == 5
        assert paused == [True, True, True, False, False]  # the last but one begins the last
        assert list(world.bounds.idle) == [protocol]

    scenario(run)


def test_a_client_that_leaves_ends_the_request_before_the_last() -> None:
    async def run(world: World) -> None:
        protocol, _ = world.connect()
        protocol.data_received(GET % 0 + GET % 1)
        await settle()
        protocol.connection_lost(None)
        await settle()
        assert world.left == ["/0"]
        assert world.reached == ["/0"]

    scenario(run)


CHUNKED = b"POST /0 HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("before", "again"),
    [
        (CHUNKED + b"0\r\nx: ", b"a"),
        (CHUNKED + b"0\r\n", b"a: b\r\n"),
        (CHUNKED + b"1;x=", b"a"),
        (CHUNKED, b"0"),
        (CHUNKED, b"1;%b\r\nx\r\n" % (b"a" * 1000)),
        (b"", b"\r\n"),
    ],
    ids=["trailer", "trailers", "extension", "zeros", "extensions", "empty lines"],
)
def test_bytes_of_no_head_and_no_body_have_a_bound(before: bytes, again: bytes) -> None:
    async def run(world: World) -> None:
        protocol, transport = world.connect()
        protocol.data_received(before)
        most = world.bounds.max_header_bytes + 4096
        for _ in range(0, most, 1024):
            assert not transport.is_closed
            protocol.data_received(again * max(1, 1024 // len(again)))
            if transport.is_closed:
                break
        assert transport.written.startswith(b"HTTP/1.1 431 ")
        assert transport.is_closed

    scenario(run)


def test_a_body_in_chunks_of_a_byte_has_no_bound_here() -> None:
    async def run(world: World) -> None:
        world.may_answer.set()
        protocol, transport = world.connect()
        protocol.data_received(CHUNKED)
        for _ in range(100):
            protocol.data_received(b"00000001\r\nx\r\n" * 100)
            protocol.data_received(b"1\r\nx\r\n" * 100)
        protocol.data_received(b"0\r\nAuthorization: x\r\n\r\n")
        await settle()
        assert b"authorization" not in dict(protocol.scope["headers"]), "a trailer is no header"
        assert transport.written.startswith(b"HTTP/1.1 200 ")
        assert not transport.is_closed

    scenario(run)


def test_bad_requests_are_logged_together(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def run(world: World) -> None:
        for i in range(50):
            protocol, _ = world.connect(f"10.0.0.{i}")
            protocol.data_received(b"no HTTP\r\n\r\n")
            protocol.connection_lost(None)
        await asyncio.sleep(REPEATED_EVERY_S * 1.5)

    scenario(run)
    lines = [one.getMessage() for one in caplog.records if "asyncio" not in one.name]
    assert lines == [
        "connection_refused status=400 num=1 address=10.0.0.0",
        "connection_refused status=400 num=49 address=10.0.0.49",
    ]


def test_an_idle_connection_makes_room_and_a_busy_one_does_not() -> None:
    async def run(world: World) -> None:
        world.may_answer.set()
        idle, idle_transport = world.connect("10.0.0.1")
        idle.data_received(GET % 0)
        await settle()
        world.may_answer.clear()
        others = [world.connect(f"10.0.0.{i}") for i in (2, 3)]
        for protocol, _ in others:
            protocol.data_received(GET % 1)
        _, newcomer = world.connect("10.0.0.4")
        assert (newcomer.written, idle_transport.is_closed) == (b"", True)
        idle.connection_lost(None)
        _, refused = world.connect("10.0.0.5")
        assert refused.written.startswith(b"HTTP/1.1 503 ")
        assert not any(transport.is_closed for _, transport in others)
        assert not world.bounds.idle

    scenario(run)


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_a_client_is_an_address_or_a_network(address: str, client: str) -> None:
    assert client_of(address) == client


def test_connections_of_one_network_are_counted_together() -> None:
    async def run(world: World) -> None:
        made = [world.connect(f"2001:db8::{i}") for i in range(1, 4)]
        assert [transport.is_closed for _, transport in made] == [False, False, True]
        for protocol, _ in made:
            protocol.connection_lost(None)
        assert not world.bounds.num_of

    scenario(run)


def test_an_address_has_a_share_of_the_files_that_may_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (1024, 1024))
    bounds = connection_bounds(ServerConfig())
    assert bounds.max_connections < 1024
    assert bounds.max_per_address == bounds.max_connections // 2


def test_an_upgrade_is_answered_as_any_other_request() -> None:
    async def run(world: World) -> None:
        world.may_answer.set()
        protocol, transport = world.connect()
        protocol.data_received(
            b"GET / HTTP/1.1\r\nHost: here\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        await settle()
        assert b"200 OK" in transport.written
        protocol.connection_lost(None)
        assert not world.bounds.num_of

    scenario(run)


@pytest.mark.parametrize("size", [1, 30, 1000])
@pytest.mark.parametrize(
    "framing", [b"Content-Length: 5\r\n\r\nhello", b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"]
)
def test_a_request_that_asks_for_an_upgrade_keeps_its_body_and_its_connection(framing: bytes, size: int) -> None:
    bodies = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body, message = b"", {"more_body": True}
        while message["more_body"]:
            message = dict(await receive())
            body += message["body"]
        bodies.append((scope["method"], scope["path"], body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def run(world: World) -> None:
        world.app = app  # type: ignore[method-assign]
        protocol, transport = world.connect()
        wish = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
        data = 2 * (b"POST /a HTTP/1.1\r\nHost: here\r\n" + wish + framing) + GET % 0
        for at in range(0, len(data), size):
            protocol.data_received(data[at : at + size])
            await settle()
        assert bodies == [("POST", "/a", b"hello"), ("POST", "/a", b"hello"), ("GET", "/0", b"")]
        assert transport.written.count(b"200 OK") == 3
        protocol.connection_lost(None)

    scenario(run)


def test_a_client_of_http_1_0_gets_no_chunks() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        for piece in (b"one ", b"two "):
            if not chunk_writer(scope)(piece):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"three", "more_body": False})

    async def run(world: World) -> None:
        world.app = app  # type: ignore[method-assign]
        protocol, transport = world.connect()
        protocol.data_received(b"GET / HTTP/1.0\r\n\r\n")
        await settle()
        head, _, body = bytes(transport.written).partition(b"\r\n\r\n")
        assert body == b"one two three"
        assert b"transfer-encoding" not in head
        assert transport.is_closing()
        protocol.connection_lost(None)

    scenario(run)


def test_a_client_that_does_not_read_is_left_and_a_slow_one_is_not() -> None:
    async def run(world: World) -> None:
        protocol, transport = world.connect()
        protocol.data_received(GET % 0)
        await settle()
        transport.unread = 100_000
        for now in (0.0, 100.0, 200.0):  # its answer is still being written
            protocol.check_reader(now)
        protocol.pause_writing()
        for now in (300.0, 399.0, 450.0):
            transport.unread -= now == 450.0  # a byte
            protocol.check_reader(now)
        assert not transport.is_closed
        protocol.check_reader(550.0)
        assert transport.is_aborted
        protocol.connection_lost(None)
        await settle()
        assert world.left == ["/0"]

    scenario(run)


def test_the_end_of_an_answer_does_not_wait_for_ever() -> None:
    async def run(world: World) -> None:
        world.may_answer.set()
        protocol, transport = world.connect()
        protocol.data_received(b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        await settle()
        assert transport.is_closed
        transport.unread = 10
        protocol.check_reader(0.0)
        assert not transport.is_aborted
        protocol.check_reader(100.0)
        assert transport.is_aborted

    scenario(run)


def test_a_router_leaves_files_for_connections_to_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (1024, 1024))
    assert 400 < max_connections() < 512
    monkeypatch.setattr("resource.getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert max_connections() == 2**16
