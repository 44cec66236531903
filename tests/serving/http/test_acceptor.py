"""New connections: clients take turns, one that floods is no one's queue, and handshakes count as connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

import pytest

from manylora.serving.http.acceptor import OPENED_AT_ONCE, TAKEN_AT_ONCE, TOLD_OF_CLIENT, Acceptor
from manylora.serving.http.connections import ConnectionBounds
from manylora.serving.http.listening import new_event_loop

FLOOD, OTHER = "127.0.0.1", "127.0.0.2"


@dataclass
class World:
    """A listening socket, and the clients whose connections were opened, in order."""

    bounds: ConnectionBounds
    listening: socket.socket
    opened: list[str] = field(default_factory=list)
    num_lost: int = 0
    on_open: Callable[[], None] = lambda: None
    transports: list[asyncio.Transport] = field(default_factory=list)

    def accept(self, tls: ssl.SSLContext | None = None) -> Acceptor:
        return Acceptor(
            self.listening,
            lambda: _Opened(self),
            bounds=self.bounds,
            num_open=lambda: len(self.opened),
            backlog=1024,
            tls=None if tls is None else lambda: tls,
        )


class _Opened(asyncio.Protocol):
    def __init__(self, world: World) -> None:
        self._world = world

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        client = transport.get_extra_info("peername")[0]
        self._world.opened.append(client)
        self._world.bounds.num_of[client] += 1
        self._world.transports.append(cast(asyncio.Transport, transport))
        self._world.on_open()

    def connection_lost(self, exc: Exception | None) -> None:
        self._world.num_lost += 1


def scenario(run: Callable[[World], Awaitable[None]], *, most: int = 10_000, of_client: int = 10_000) -> None:
    async def main() -> None:
        bounds = ConnectionBounds(
            max_connections=most, max_per_address=of_client, header_timeout_s=0.05, body_timeout_s=60.0
        )
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen(1024)
            world = World(bounds, listening)
            try:
                await run(world)
            finally:
                for one in world.transports:
                    one.abort()
                await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main())


@contextlib.contextmanager
def connected(world: World, address: str, count: int = 1) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            one = stack.enter_context(socket.socket())
            one.bind((address, 0))
            one.connect(world.listening.getsockname())
            one.setblocking(False)
            made.append(one)
        yield made


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.001)


def is_closed(one: socket.socket) -> bool:
    try:
        return one.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_a_client_that_floods_has_turns_with_others() -> None:
    async def run(world: World) -> None:
        with connected(world, FLOOD, 500), connected(world, OTHER):
            acceptor = world.accept()
            await until(lambda: OTHER in world.opened)
            num_passes = 500 // TAKEN_AT_ONCE + 2  # in which the kernel's queue is emptied
            assert world.opened.index(OTHER) <= num_passes * OPENED_AT_ONCE < 500
            await until(lambda: len(world.opened) == 501)
            acceptor.close()
            await acceptor.wait_closed()

    scenario(run)


def test_beyond_the_bound_of_a_client_some_are_told_and_more_are_closed() -> None:
    async def run(world: World) -> None:
        num = TOLD_OF_CLIENT + 50
        with connected(world, FLOOD, num) as flood, connected(world, OTHER):
            acceptor = world.accept()
            await until(lambda: len(world.opened) + sum(map(is_closed, flood)) == num + 1)
            assert OTHER in world.opened
            assert 10 < world.bounds.num_of[FLOOD] <= 10 + TOLD_OF_CLIENT
            acceptor.close()

    scenario(run, of_client=10)


def test_beyond_the_bound_in_all_an_idle_connection_makes_room() -> None:
    class Idle:
        is_open = True

        def close_idle(self) -> bool:
            was_open, self.is_open = self.is_open, False
            return was_open

        def check_reader(self, now: float) -> None: ...

    async def run(world: World) -> None:
        idle = Idle()
        world.bounds.idle[idle] = None
        with connected(world, OTHER, 4):
            acceptor = world.accept()
            await until(lambda: len(world.opened) == 4)
            assert not idle.is_open
            acceptor.close()

    scenario(run, most=3)


def test_handshakes_that_do_not_end_are_counted_and_ended() -> None:
    async def run(world: World) -> None:
        with connected(world, FLOOD, 20) as flood:
            acceptor = world.accept(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            await until(lambda: sum(map(is_closed, flood)) >= 15)
            await until(lambda: all(map(is_closed, flood)))
            assert not world.opened
            acceptor.close()
            await acceptor.wait_closed()

    scenario(run, of_client=5)


def test_an_end_closes_the_connections_in_line() -> None:
    async def run(world: World) -> None:
        with connected(world, FLOOD, 100) as flood:
            acceptor = world.accept()
            await until(lambda: bool(world.opened))
            acceptor.close()
            acceptor.close()
            await acceptor.wait_closed()
            await until(lambda: sum(map(is_closed, flood)) > 0)

    scenario(run)


def test_a_connection_that_is_opened_at_the_end_is_told_of_its_own() -> None:
    """A server waits for the connections that it knows: one that is never lost would hold it for its whole drain."""

    async def run(world: World) -> None:
        with connected(world, OTHER, 3) as made:
            acceptor = world.accept()
            world.on_open = acceptor.close
            await until(lambda: all(map(is_closed, made)))
            await acceptor.wait_closed()
            await until(lambda: world.num_lost == len(world.opened) > 0)

    scenario(run)


def test_without_open_files_it_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(world: World) -> None:
        class Scarce:
            """The listening socket of a process that has no file left for a while."""

            has_files = False

            def __getattr__(self, name: str) -> object:
                return getattr(listening, name)

            def accept(self) -> object:
                if not self.has_files:
                    self.has_files = True
                    raise OSError(24, "Too many open files")
                return listening.accept()

        listening, world.listening = world.listening, cast(socket.socket, Scarce())
        monkeypatch.setattr("manylora.serving.http.acceptor.PAUSE_S", 0.0)
        with connected(world, OTHER):
            acceptor = world.accept()
            await until(lambda: world.opened == [OTHER])
            acceptor.close()

    scenario(run)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does not tell")
def test_a_connection_that_its_client_has_closed_is_not_opened() -> None:
    async def run(world: World) -> None:
        with connected(world, FLOOD, 100) as flood, connected(world, OTHER):
            for one in flood:
                one.send(b"POST / HTTP/1.1\r\nHost: x\r\n")
                one.close()
            acceptor = world.accept()
            await until(lambda: bool(world.opened))
            assert world.opened == [OTHER]
            acceptor.close()

    scenario(run)
