"""Registries that mean harm: no answer holds a question beyond its time, and none is followed to another place."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from bad_adapters import tiny_base

from manylora.core.adapters.read import ReadRules
from manylora.core.adapters.sources import open_folder
from manylora.core.errors import AdapterError, AdapterForbidden, AdapterUnavailable
from manylora.execution.storage.http_registry import HttpRegistry

LIMIT_S = 0.5
OK = b'HTTP/1.1 200 OK\r\nETag: "a"\r\n'
CONFIG = OK + b"Content-Length: 2\r\n\r\n{}"


@contextmanager
def answering(answer: Callable[[socket.socket, bytes], None]) -> Iterator[str]:
    """Serve raw answers on loopback: ``answer`` gets each connection and the head of its request; yield the URL."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=talk, args=(connection,), daemon=True).start()

    def talk(connection: socket.socket) -> None:
        with connection:
            try:
                answer(connection, connection.recv(65536))
            except OSError:
                """The client has seen enough."""

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def drip(connection: socket.socket, head: bytes) -> None:
    """Send a byte now and then, for four limits of a question."""
    connection.sendall(head)
    for _ in range(40):
        time.sleep(LIMIT_S / 10)
        connection.sendall(b"x")


@pytest.mark.parametrize(
    "head",
    [b"", b"HTTP/1.1 200 OK\r\nX: ", OK + b"Content-Length: 60000\r\n\r\n"],
    ids=["status line", "headers", "body"],
)
def test_a_drip_of_bytes_ends_with_the_question_in_every_phase(head: bytes) -> None:
    with answering(lambda connection, asked: drip(connection, head)) as url:
        registry = HttpRegistry([url], limit_s=LIMIT_S, retries_s=())
        began = time.monotonic()
        with pytest.raises(AdapterUnavailable):
            registry.open("mine", f"{url}/a/adapter_config.json", 1 << 20)
        assert time.monotonic() - began < 3 * LIMIT_S
        registry.close()


def test_silence_and_retries_end_with_the_question() -> None:
    with answering(lambda connection, asked: time.sleep(4 * LIMIT_S)) as url:
        registry = HttpRegistry([url], limit_s=LIMIT_S, retries_s=(60.0,))
        began = time.monotonic()
        with pytest.raises(AdapterUnavailable, match=r"took longer than 0\.5 s"):
            registry.open("mine", f"{url}/a/adapter_config.json", 1 << 20)
        assert time.monotonic() - began < 3 * LIMIT_S
        registry.close()


def test_an_announced_size_is_refused_before_a_byte_is_waited_for() -> None:
    """Of the weights as well, whose identity is asked for before they are read."""

    def answer(connection: socket.socket, asked: bytes) -> None:
        if b"adapter_config" in asked:
            connection.sendall(CONFIG)
        else:
            connection.sendall(OK + b"Content-Length: 999999999999\r\n\r\n")
            connection.recv(1)  # until the client closes

    with answering(answer) as url:
        registry = HttpRegistry([url], limit_s=10.0, retries_s=())
        folder = open_folder("mine", f"{url}/a", None, registry)
        with pytest.raises(AdapterError, match="has 999999999999 bytes, at most 1000000 are accepted"):
            ReadRules(base=tiny_base(), dtype="float32", max_bytes=1_000_000).file_key_of(folder)
        registry.close()


def test_a_flood_of_headers_is_cut() -> None:
    def answer(connection: socket.socket, asked: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n")
        for _ in range(4096):
            connection.sendall(b"X: " + b"y" * 8192 + b"\r\n")

    with answering(answer) as url:
        registry = HttpRegistry([url], limit_s=10.0, retries_s=())
        with pytest.raises(AdapterError, match=r"cannot read adapter_config\.json"):
            registry.open("mine", f"{url}/a/adapter_config.json", 1 << 20)
        registry.close()


@pytest.mark.parametrize(
    "place", ["http://169.254.169.254/latest/", "http://127.0.0.1:1/", "file:///etc/passwd", "//other.org/a"]
)
def test_no_redirect_is_followed(place: str) -> None:
    asked_for = []

    def answer(connection: socket.socket, asked: bytes) -> None:
        asked_for.append(asked.split(b"\r\n")[0])
        connection.sendall(f"HTTP/1.1 307 Go\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n".encode())

    with answering(answer) as url:
        registry = HttpRegistry([url], limit_s=10.0)
        with pytest.raises(AdapterError, match="redirects are not followed"):
            registry.open("mine", f"{url}/a/adapter_config.json", 1 << 20)
        assert asked_for == [b"GET /a/adapter_config.json HTTP/1.1"]
        registry.close()


def test_no_name_of_a_file_leads_out_of_the_registry() -> None:
    registry = HttpRegistry(["http://127.0.0.1:1/org"])
    for file in ("../../x", "..", "%2e%2e/x", "a\\b", "//x", "a?b", "a#b"):
        with pytest.raises(AdapterForbidden):
            registry.open("mine", f"http://127.0.0.1:1/org/{file}", 1 << 20)
    registry.close()
