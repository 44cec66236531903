"""Tokens on their way out: given where they arrive, gathered for who is slow, and each stream's trouble its own."""

from __future__ import annotations

import asyncio

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from manylora.core.errors import EngineDead
from manylora.core.types import Output, SampledToken
from manylora.serving.hosting.links.in_flight import Flush, OutputStream
from manylora.serving.http.connections import ConnectionBounds
from manylora.serving.http.http_protocol import ChunkWritingProtocol, chunk_writer

BOUNDS = ConnectionBounds(max_connections=10, max_per_address=10, header_timeout_s=60.0, body_timeout_s=60.0)


def output(token_id: int) -> Output:
    return Output(request_id="r", tokens=(SampledToken(token_id=token_id),))


def ids(outputs: list[Output]) -> list[int]:
    return [token.token_id for one in outputs for token in one.tokens]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass


def test_a_chunk_is_written_at_once_unless_it_has_to_wait() -> None:
    """Not before the answer has begun, nor while the client reads slowly, nor after it left, nor after the end."""
    said: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        write = chunk_writer(scope)
        said.append(write(b"too soon"))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        said.append(write(b"first"))
        protocol.pause_writing()
        said.append(write(b"slow"))
        protocol.resume_writing()
        said.append(write(b"second!!!!!"))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        said.append(write(b"too late"))

    async def main() -> bytes:
        nonlocal protocol
        protocol = ChunkWritingProtocol(uvicorn.Config(app, lifespan="off"), ServerState(), {}, bounds=BOUNDS)
        transport = Transport()
        protocol.connection_made(transport)
        protocol.data_received(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        await settle()
        return b"".join(transport.written)

    protocol: ChunkWritingProtocol
    head, _, body = asyncio.run(main()).partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    assert body == b"5\r\nfirst\r\nb\r\nsecond!!!!!\r\n0\r\n\r\n"
    assert said == [False, True, False, True, False]


def test_behind_another_server_every_chunk_is_sent() -> None:
    assert not chunk_writer({"type": "http"})(b"chunk")
    assert not chunk_writer({"type": "http", "extensions": {"http.response.pathsend": {}}})(b"chunk")


def test_outputs_are_consumed_where_they_arrive_and_the_task_sleeps() -> None:
    async def main() -> None:
        stream, consumed = OutputStream(), []
        stream.push(output(1))
        stream.push(output(2))

        def consume(outputs: list[Output]) -> None:
            consumed.append(ids(outputs))
            if consumed[-1] == [5]:
                stream.close()

        delivering = asyncio.create_task(stream.deliver(consume))
        await settle()
        assert consumed == [[1, 2]]  # what came before
        stream.push(output(3))
        stream.push(output(4))
        assert consumed == [[1, 2]]
        stream.wake()
        assert consumed == [[1, 2], [3, 4]]  # no turn of the event loop between
        stream.push(output(5))
        stream.wake()
        await asyncio.wait_for(delivering, 5)
        stream.push(output(6))
        stream.wake()
        assert consumed == [[1, 2], [3, 4], [5]]

    asyncio.run(main())


def test_a_slow_consumer_gets_all_that_came_meanwhile() -> None:
    async def main() -> None:
        stream, consumed, may_go_on = OutputStream(), [], asyncio.Event()

        async def until_it_may() -> None:
            await may_go_on.wait()

        def consume(outputs: list[Output]) -> Flush | None:
            consumed.append(ids(outputs))
            if len(consumed) == 3:
                stream.close()
            return until_it_may if len(consumed) == 1 else None

        delivering = asyncio.create_task(stream.deliver(consume))
        await settle()
        for token in range(4):
            stream.push(output(token))
            stream.wake()
            await settle()
        assert consumed == [[0]]
        may_go_on.set()
        await settle()
        assert consumed == [[0], [1, 2, 3]]
        stream.push(output(4))
        stream.wake()
        assert consumed == [[0], [1, 2, 3], [4]]
        await asyncio.wait_for(delivering, 5)

    asyncio.run(main())


@pytest.mark.parametrize("is_waiting", [True, False])
def test_an_error_comes_after_what_has_arrived(is_waiting: bool) -> None:
    async def main() -> None:
        stream, consumed = OutputStream(), []
        delivering = asyncio.create_task(stream.deliver(lambda outputs: consumed.append(ids(outputs))))
        if is_waiting:
            await settle()
        stream.push(output(1))
        stream.fail(EngineDead("gone"))
        with pytest.raises(EngineDead, match="gone"):
            await asyncio.wait_for(delivering, 5)
        assert consumed == [[1]]

    asyncio.run(main())


def test_a_consumer_that_fails_fails_its_own_task_and_nobody_elses() -> None:
    async def main() -> None:
        stream = OutputStream()

        def consume(outputs: list[Output]) -> None:
            raise ValueError("cannot encode")

        delivering = asyncio.create_task(stream.deliver(consume))
        await settle()
        stream.push(output(1))
        stream.wake()
        stream.push(output(2))
        stream.wake()  # already failed, not yet told
        with pytest.raises(ValueError, match="cannot encode"):
            await asyncio.wait_for(delivering, 5)

    asyncio.run(main())
