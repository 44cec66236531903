"""An engine's TCP sockets: both ends are known by their keys, and strangers get no further than the handshake."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from manylora.serving.hosting.protocol import Cancel, Message, Reply, decode_command, encode
from manylora.serving.hosting.ray.actor import CurveKeys, Door
from manylora.serving.hosting.ray.link import EngineConnection
from manylora.serving.hosting.sockets import MAX_FRAME_BYTES, CurveSockets, OpenSockets, open_sockets

PATIENCE_S = 30.0
REFUSED = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
REFUSED |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


def listen() -> tuple[int, int]:
    """Return the descriptor of a listening socket, and its port."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    return listening.detach(), port


@contextmanager
def engine(client_key: bytes) -> Iterator[tuple[OpenSockets, Door]]:
    """Open an engine's end for one client."""
    public_key, secret_key = zmq.curve_keypair()
    (commands_file, commands_port), (messages_file, messages_port) = listen(), listen()
    files = {"commands_file": commands_file, "messages_file": messages_file}
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ends = open_sockets(context, CurveSockets(**files, secret_key=secret_key, client_key=client_key))
    try:
        ends.commands.rcvtimeo = ends.messages.sndtimeo = int(1e3 * PATIENCE_S)
        ports = {"commands_port": commands_port, "messages_port": messages_port}
        yield ends, Door(version="1", node="n", host="127.0.0.1", public_key=public_key, resources={}, **ports)
    finally:
        ends.commands.close(0)
        ends.messages.close(0)
        context.term()


def with_connection(
    door: Door, keys: CurveKeys, check: Callable[[EngineConnection, asyncio.Queue[Message]], Awaitable[None]]
) -> None:
    """Run ``check`` beside a connection and the messages that it delivers."""

    async def run() -> None:
        delivered: asyncio.Queue[Message] = asyncio.Queue()

        def deliver(messages: Sequence[Message]) -> None:
            for message in messages:
                delivered.put_nowait(message)

        connection = EngineConnection(door, keys, deliver)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await check(connection, delivered)
        finally:
            connection.close()

    asyncio.run(run())


def refuse(port: int, options: dict[str, bytes]) -> None:
    """Send a command as a stranger would, and wait until the connection is refused."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.linger, stranger.reconnect_ivl = 0, -1
        for name, value in options.items():
            setattr(stranger, name, value)
        with stranger.get_monitor_socket(REFUSED) as monitor:
            monitor.rcvtimeo = int(1e3 * PATIENCE_S)
            stranger.connect(f"tcp://127.0.0.1:{port}")
            if not options:  # without security the stranger may believe that it is connected
                stranger.sndtimeo = 0
            with suppress(zmq.Again):
                stranger.send(encode(Cancel(["of a stranger"])))
            assert recv_monitor_message(monitor)["event"] & REFUSED
            stranger.disable_monitor()


def test_an_engine_listens_to_the_key_that_it_was_told_and_to_no_other() -> None:
    keys, others = CurveKeys(*zmq.curve_keypair()), CurveKeys(*zmq.curve_keypair())
    with engine(keys.public) as (ends, door):
        refuse(door.commands_port, {})
        known = {"curve_serverkey": door.public_key}
        refuse(door.commands_port, {**known, "curve_publickey": others.public, "curve_secretkey": others.secret})

        async def check(connection: EngineConnection, delivered: asyncio.Queue[Message]) -> None:
            connection.send(Cancel(["of the client"]))
            assert decode_command(await asyncio.to_thread(ends.commands.recv)) == Cancel(["of the client"])
            await asyncio.to_thread(ends.messages.send, encode(Reply(7)))
            assert await delivered.get() == Reply(7)
            assert not connection.lost.done()
            with pytest.raises(zmq.Again):  # the strangers' commands
                ends.commands.recv(zmq.NOBLOCK)

        with_connection(door, keys, check)


def test_a_client_knows_its_engine_by_the_key() -> None:
    keys = CurveKeys(*zmq.curve_keypair())
    with engine(keys.public) as (ends, door):
        impostor = Door(**{name: getattr(door, name) for name in door.__slots__} | {"public_key": keys.public})

        async def check(connection: EngineConnection, delivered: asyncio.Queue[Message]) -> None:
            connection.send(Cancel(["secret"]))
            await connection.lost
            assert delivered.empty()
            connection.send(Cancel(["dropped"]))
            with pytest.raises(zmq.Again):
                ends.commands.recv(zmq.NOBLOCK)

        with_connection(impostor, keys, check)


@pytest.mark.parametrize("size", [MAX_FRAME_BYTES + 1, 5])
def test_a_frame_that_is_too_long_or_no_message_ends_the_connection(size: int) -> None:
    keys = CurveKeys(*zmq.curve_keypair())
    with engine(keys.public) as (ends, door):

        async def check(connection: EngineConnection, delivered: asyncio.Queue[Message]) -> None:
            await asyncio.to_thread(ends.messages.send, b"\xc1" * size)
            await asyncio.wait({connection.lost, connection.broken}, return_when=asyncio.FIRST_COMPLETED)
            assert connection.lost.done() == (size > MAX_FRAME_BYTES)
            assert delivered.empty()

        with_connection(door, keys, check)


def test_an_engine_that_has_gone_is_noticed() -> None:
    keys = CurveKeys(*zmq.curve_keypair())
    with engine(keys.public) as (ends, door):

        async def check(connection: EngineConnection, delivered: asyncio.Queue[Message]) -> None:
            connection.send(Cancel(["one"]))
            await asyncio.to_thread(ends.commands.recv)
            await asyncio.to_thread(ends.messages.send, encode(Reply(7)))
            await delivered.get()  # both sockets have met theirs
            ends.messages.close(0)
            assert "disconnected" in await connection.lost

        with_connection(door, keys, check)
