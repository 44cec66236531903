"""Connections that send too much, too slowly or not at all."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
from attack_target import MIB, MODEL, Target, Watch, half_sent, running

PER_ADDRESS = 40


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A server with little patience."""
    options = (
        "--header-timeout",
        "1",
        "--body-timeout",
        "1",
        "--write-timeout",
        "1",
        "--max-connections-per-address",
        str(PER_ADDRESS),
    )
    with running(tmp_path_factory.mktemp("guarded"), *options) as target:
        yield target


def answer_of(connection: socket.socket) -> bytes:
    """Return all that the server sends until it closes."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def send_until_closed(connection: socket.socket, data: bytes, num_bytes: int) -> int:
    """Return the number of bytes that the server took."""
    taken = 0
    with contextlib.suppress(OSError):
        while taken < num_bytes:
            connection.sendall(data)
            taken += len(data)
    return taken


@pytest.mark.parametrize("head", [b"", b"GET /health HTTP/1.1\r\nX: "], ids=["line", "header"])
def test_headers_without_end_are_cut_off(target: Target, head: bytes) -> None:
    with Watch(target) as seen, target.connect() as connection:
        connection.sendall(head)
        taken = send_until_closed(connection, b"a" * (1 << 16), 64 * MIB)
    assert taken < 16 * MIB, "beyond what sockets hold, the server went on reading"
    seen.check()


def test_a_trailer_without_end_is_cut_off(target: Target) -> None:
    """The parser puts a trailer together piece by piece, each time from its begin: megabytes would hold the loop."""
    with Watch(target) as seen, target.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        connection.sendall(b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nX: ")
        taken = send_until_closed(connection, b"a" * (1 << 16), 64 * MIB)
    assert taken < 16 * MIB, "beyond what sockets hold, the server went on reading"
    seen.check()


def test_headers_are_counted(target: Target) -> None:
    with target.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 1000)
        assert answer_of(connection).startswith(b"HTTP/1.1 431 ")


def test_a_body_above_the_bound_is_refused_by_its_length(target: Target) -> None:
    with target.connect() as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 30000000\r\n\r\n"
        )
        assert answer_of(connection).startswith(b"HTTP/1.1 413 ")


def test_half_sent_requests_are_ended_and_connections_are_counted(guarded: Target) -> None:
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(one) for one in half_sent(guarded, 2 * PER_ADDRESS)]
        answers = [answer_of(one)[:13] for one in opened]
    assert answers == [b"HTTP/1.1 408 "] * PER_ADDRESS + [b"HTTP/1.1 503 "] * PER_ADDRESS
    guarded.wait_until(200)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{",
    ],
    ids=["nothing", "empty lines", "half a body"],
)
def test_a_connection_that_falls_silent_is_closed(guarded: Target, sent: bytes) -> None:
    with guarded.connect() as connection:
        connection.sendall(sent)
        assert answer_of(connection).startswith(b"HTTP/1.1 408 ")


def test_requests_on_one_connection_are_each_given_time(guarded: Target) -> None:
    """A request that follows another on a kept connection is waited for as the first is, and no deadline is left."""
    with guarded.connect() as connection:
        for _ in range(3):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"GET /hea")
        assert answer_of(connection).startswith(b"HTTP/1.1 408 ")


def test_a_client_that_stops_reading_is_left(guarded: Target) -> None:
    """Its answer is larger than all buffers: the connection is broken, and its request ends."""
    prompt = b",".join([b"%d" % (20 + i % 90) for i in range(1_000)])
    body = b'{"model":"%b","n":8,"max_tokens":1,"prompt_logprobs":20,"prompt":[%b]}' % (MODEL.encode(), prompt)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((guarded.host, guarded.port))
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        guarded.wait_for_log("reader_stopped")
        assert len(answer_of(connection)) < 4 * MIB, "the answer is larger, and was not sent whole"


def test_requests_that_wait_for_no_answer_are_cut_off(target: Target) -> None:
    with Watch(target) as seen:
        for _ in range(20):
            with target.connect() as connection:
                send_until_closed(connection, b"GET / HTTP/1.1\r\n\r\n" * 14_000, 4 * MIB)
    seen.check()
