"""Refusals from headers alone: which requests get one, its bytes, the connection after it, and ``Retry-After``."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.types import Receive, Scope, Send
from transports import Transport
from uvicorn.server import ServerState

from manylora.core.errors import CapacityError
from manylora.serving.http.access import MOST_BODY_BYTES, MOST_RETRY_S, Refusals, RetryTimes
from manylora.serving.http.auth import Gate
from manylora.serving.http.connections import ConnectionBounds
from manylora.serving.http.http_protocol import ChunkWritingProtocol
from manylora.serving.http.room import CallerRoom

BODY = b'{"prompt": "say"}'


@dataclass
class World:
    """A connection to a server whose application answers 200 to all that reaches it."""

    has_room: bool = False
    status: int = 429
    counted: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    reached: list[str] = field(default_factory=list)
    callers: CallerRoom = field(default_factory=lambda: CallerRoom(2, lambda: 1))

    def check_room(self) -> None:
        if not self.has_room:
            raise CapacityError("full", retry_after_s=0.2, every_s=0.5, status=self.status)

    def count(self, method: str, route: str, status: int) -> None:
        self.counted[method, route, status] += 1

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.reached.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    def send(self, *pieces: bytes, keys: tuple[str, ...] = (), names_all: bool = False) -> Transport:
        async def main() -> Transport:
            protocol = ChunkWritingProtocol(
                uvicorn.Config(self.app, lifespan="off", interface="asgi3"),
                ServerState(),
                {},
                bounds=ConnectionBounds(
                    max_connections=10, max_per_address=10, header_timeout_s=60.0, body_timeout_s=60.0
                ),
                refusals=Refusals(
                    paths=["/v1/completions"],
                    check_room=self.check_room,
                    callers=self.callers,
                    gate=Gate(keys),
                    retries=RetryTimes(),
                    count=self.count,
                    monotonic_s=lambda: 100.0,
                    names_all=names_all,
                ),
            )
            transport = Transport()
            protocol.connection_made(transport)
            for piece in pieces:
                protocol.data_received(piece)
                for _ in range(5):
                    await asyncio.sleep(0)
            timer = protocol.timeout_keep_alive_task
            assert (protocol._deadline is None) or timer is None  # an idle connection waits for its next request alone
            protocol._stop_waiting()
            protocol._unset_keepalive_if_required()
            return transport

        return asyncio.run(main())


def ask(*headers: str, line: str = "POST /v1/completions HTTP/1.1", body: bytes = BODY) -> bytes:
    lines = [line, "Host: here", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def test_a_refusal_is_whole_counted_and_leaves_the_connection_open() -> None:
    world = World()
    transport = world.send(ask(), ask()[:-5], ask()[-5:])
    one = len(transport.written) // 2
    head, _, body = transport.written[:one].partition(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")
    headers = dict(line.split(b": ") for line in lines)
    assert status == b"HTTP/1.1 429 Too Many Requests"
    assert headers == {
        b"retry-after": b"1",
        b"content-type": b"application/json",
        b"content-length": str(len(body)).encode(),
    }
    assert json.loads(body)["error"] == {"message": "full", "type": "RateLimitError", "param": None, "code": 429}
    assert transport.written[one:].endswith(body)
    assert world.counted == {("POST", "/v1/completions", 429): 2}
    assert world.reached == []
    assert not transport.is_closed


def test_pipelined_requests_are_answered_in_order() -> None:
    world = World()
    transport = world.send(ask() + ask(line="GET /health HTTP/1.1", body=b"") + ask())
    statuses = [part[:3] for part in transport.written.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"429", b"200", b"200"]  # the third came while the second was under way: its route decides


def test_refusals_of_one_piece_of_data_have_a_bound() -> None:
    world = World()
    transport = world.send(ask() * 1_000)
    assert transport.is_closed
    assert transport.written.count(b"HTTP/1.1 429 ") == 8
    assert not world.send(*[ask() * 8] * 3).is_closed


def test_a_client_that_asks_so_is_hung_up_on() -> None:
    transport = World().send(ask("Connection: close"))
    assert b"\r\nconnection: close\r\n" in transport.written
    assert transport.is_closed


def test_names_come_back() -> None:
    assert b"\r\nx-request-id: mine\r\n" in World().send(ask("X-Request-Id: mine")).written
    assert b"x-request-id" not in World().send(ask("X-Request-Id: for ged")).written
    assert b"x-request-id" in World().send(ask(), names_all=True).written


@pytest.mark.parametrize(
    "request_",
    [
        ask(line="POST /v1/models HTTP/1.1"),
        ask(line="GET /v1/completions HTTP/1.1"),
        ask(line="POST /v1/completions HTTP/1.0"),
        ask("Expect: 100-continue"),
        ask("Origin: http://elsewhere"),
        ask(body=b"a" * (MOST_BODY_BYTES + 1)),
        b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_other_requests_go_to_their_route(request_: bytes) -> None:
    world = World()
    assert b" 200 OK" in world.send(request_).written
    assert not world.counted


def test_room_another_reason_and_a_wrong_key_go_to_the_route() -> None:
    assert b" 200 OK" in World(has_room=True).send(ask()).written
    assert b" 200 OK" in World(status=503).send(ask()).written
    assert b" 200 OK" in World().send(ask("Authorization: Bearer wrong"), keys=("right",)).written
    assert b" 429 " in World().send(ask("Authorization: Bearer right"), keys=("right",)).written


@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 70), st.sampled_from([0.01, 0.3, 2.0])), min_size=1, max_size=50)
)
def test_clients_come_back_no_faster_than_places_become_free(refusals: list[tuple[float, float, float]]) -> None:
    """A flood at one moment is told times at the rate of service, each at most a minute."""
    retries, now = RetryTimes(), 10.0
    for pause_s, retry_after_s, every_s in refusals:
        now += pause_s
        error = CapacityError("full", retry_after_s=retry_after_s, every_s=every_s)
        assert 1 <= retries.after_s(error, now) <= MOST_RETRY_S
    flood = Counter(retries.after_s(CapacityError("full", retry_after_s=0.0, every_s=0.25), 999.0) for _ in range(100))
    assert set(flood) == set(range(1, 26))
    assert all(num in (4, 5) for second, num in flood.items() if second < 25)


def test_a_refusal_without_places_is_told_its_own_time() -> None:
    retries = RetryTimes()
    error = CapacityError("starting", retry_after_s=4.2, status=503)
    assert [retries.after_s(error, 0.0) for _ in range(3)] == [5, 5, 5]


def test_a_tenant_without_room_is_refused_and_another_is_not() -> None:
    keys = ("one", "two")
    tenant = Gate(keys).check_inference(Request({"type": "http", "headers": [(b"authorization", b"Bearer one")]}))
    world = World(has_room=True)
    first, second = ask("Authorization: Bearer one"), ask("Authorization: Bearer two")
    places = world.callers.take(tenant, 1)
    assert b" 200 OK" in world.send(first, keys=keys).written
    last = world.callers.take(tenant, 1)
    assert b" 429 " in world.send(first, keys=keys).written
    assert b" 200 OK" in world.send(second, keys=keys).written
    places.close()
    assert b" 200 OK" in world.send(first, keys=keys).written
    places.close()  # it has none any more
    assert world.callers.take(tenant, 1)
    places.close()
    assert b" 429 " in world.send(first, keys=keys).written
    last.close()
    assert world.counted == {("POST", "/v1/completions", 429): 2}
