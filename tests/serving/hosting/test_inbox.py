"""Messages of an engine are all delivered, in order, and no more at once than takes a few milliseconds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import zmq

from manylora.core.errors import EngineDead
from manylora.serving.hosting.links.process import AT_ONCE_BYTES, Inbox
from manylora.serving.hosting.protocol import Fault, Message, Reply, encode

NUM = 500


def test_a_flood_is_delivered_in_pieces_and_in_order() -> None:
    messages = [encode(Reply(call, fault=Fault.of(EngineDead("x" * 4096)))) for call in range(NUM)]
    context = zmq.Context()
    source, sink = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    source.set_hwm(0)
    sink.set_hwm(0)
    sink.bind("inproc://inbox")
    source.connect("inproc://inbox")
    for message in messages:
        source.send(message)

    async def read() -> list[list[int]]:
        pieces: list[list[int]] = []
        done = asyncio.Event()

        def deliver(messages: Sequence[Message]) -> None:
            pieces.append([one.call for one in messages if isinstance(one, Reply)])
            if sum(map(len, pieces)) == NUM:
                done.set()

        inbox = Inbox(sink, deliver)
        await asyncio.wait_for(done.wait(), 30)
        inbox.close()
        return pieces

    pieces = asyncio.run(read())
    source.close(linger=0)
    context.term()
    assert [call for piece in pieces for call in piece] == list(range(NUM))
    assert max(map(len, pieces)) <= -(-AT_ONCE_BYTES // len(messages[0])) < NUM
