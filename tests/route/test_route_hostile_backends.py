"""`manylora route` over servers that send more than one answer to a request, or more than an answer has."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

import pytest
from proxying import Call, FakeServer, recite, routing, run, servers, until

OTHERS = b"the answer to the next client"


def answer(status: int, body: bytes, *headers: bytes) -> bytes:
    lines = [b"HTTP/1.1 %d X" % status, *headers, b"content-length: %d" % len(body)]
    return b"\r\n".join([*lines, b"", b""]) + body


async def send_two_answers(call: Call) -> None:
    await call.write(answer(200, b"mine") + answer(200, OTHERS))


async def send_a_second_head(call: Call) -> None:
    await call.write(answer(200, b"mine") + b"HTTP/1.1 200 X\r\ncontent-le")


async def send_bytes_behind_the_end(call: Call) -> None:
    await call.write(b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n4\r\nmine\r\n0\r\n\r\n" + OTHERS)


async def send_a_second_answer_behind_a_close(call: Call) -> None:
    await call.write(answer(200, b"mine", b"connection: close") + answer(200, OTHERS))


@pytest.mark.parametrize(
    "wrong",
    [send_two_answers, send_a_second_head, send_bytes_behind_the_end, send_a_second_answer_behind_a_close],
)
def test_bytes_behind_an_answer_reach_no_client(wrong: Callable[[Call], Awaitable[None]]) -> None:
    async def test() -> None:
        fake = FakeServer(behave=wrong)
        async with servers(fake) as urls, routing(*urls, retries=0) as (_, client):
            first = await client.complete("base")
            assert (first.status, first.body, first.is_whole) == (200, b"mine", True)
            fake.behave = recite
            assert (await client.complete("base")).json["model"] == "base"
            assert len({call.writer for call in fake.completions}) == 2
            text = (await client.ask("GET", "/metrics")).body.decode()
            assert f'manylora_route_surplus_answers_total{{backend="{urls[0]}"}} 1.0' in text

    run(test)


def test_an_answer_that_was_there_before_its_request_reaches_no_client() -> None:
    """The second answer lies in the socket, and the event loop reads it only behind the next request."""

    async def test() -> None:
        fake = FakeServer()
        async with servers(fake) as urls, routing(*urls, retries=0) as (proxy, client):
            assert (await client.complete("base")).status == 200
            (backend,) = proxy.backends
            (connection,) = backend.pool._idle
            os.write(fake.completions[0].writer.get_extra_info("socket").fileno(), answer(200, OTHERS))
            assert backend.pool.idle() is None  # no turn of the event loop is between
            assert connection._transport.is_closing()
            assert (await client.complete("base")).json["model"] == "base"

    run(test)


def test_bytes_on_an_idle_connection_close_it() -> None:
    async def test() -> None:
        fake = FakeServer()
        async with servers(fake) as urls, routing(*urls) as (proxy, client):
            assert (await client.complete("base")).status == 200
            (backend,) = proxy.backends
            fake.completions[0].writer.write(answer(200, OTHERS))
            await until(lambda: backend.pool.num_surplus == 1)
            assert (await client.complete("base")).json["model"] == "base"

    run(test)


def test_a_connection_whose_request_was_answered_before_it_was_sent_is_not_used_again() -> None:
    async def test() -> None:
        fake = FakeServer()

        async def refuse_early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if b"completions" not in await reader.readuntil(b"\r\n\r\n"):
                raise ConnectionResetError
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(answer(413, b"too large"))
            await asyncio.Event().wait()

        async with servers(fake) as urls, routing(*urls, retries=0, fall=100) as (proxy, client):
            fake._one = refuse_early  # type: ignore[method-assign]
            (backend,) = proxy.backends
            body = b'{"model": "base", "prompt": "' + b"x" * (16 << 20) + b'"}'
            refused = await client.ask("POST", "/v1/completions", body)
            assert (refused.status, refused.body) == (413, b"too large")
            assert not backend.pool._idle

    run(test)


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 X\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n4\r\nmine\r\n0\r\n\r\n",
        b"HTTP/1.1 200 X\r\ncontent-length: 4\r\ncontent-length: 5\r\n\r\nmine!",
        b"HTTP/1.1 101 X\r\nconnection: upgrade\r\nupgrade: x\r\n\r\nmine",
        b"HTTP/1.1 200 X\r\nfolded: a\r\n b\r\ncontent-length: 4\r\n\r\nmine",
    ],
)
def test_an_answer_of_two_lengths_is_none(head: bytes) -> None:
    async def be_unclear(call: Call) -> None:
        await call.write(head)

    async def test() -> None:
        fakes = FakeServer(behave=be_unclear), FakeServer()
        async with servers(*fakes) as urls, routing(*urls, router="first-fit") as (_, client):
            assert (await client.complete("base")).json["model"] == "base"
            assert [len(fake.completions) for fake in fakes] == [1, 1]

    run(test)


@pytest.mark.parametrize("status", [204, 304])
def test_an_answer_without_a_body_has_none_whatever_follows(status: int) -> None:
    async def with_body(call: Call) -> None:
        await call.write(answer(status, OTHERS))

    async def test() -> None:
        fake = FakeServer(behave=with_body)
        async with servers(fake) as urls, routing(*urls, retries=0) as (proxy, client):
            reader, writer = await client.open("POST", "/v1/completions", {"model": "base", "prompt": "x"})
            data = await asyncio.wait_for(reader.read(), 10)
            writer.close()
            assert data.startswith(b"HTTP/1.1 %d " % status)
            assert OTHERS not in data
            (backend,) = proxy.backends
            assert backend.pool.num_surplus == 1
            fake.behave = recite
            assert (await client.complete("base")).json["model"] == "base"

    run(test)


async def send_endless_extensions(call: Call) -> None:
    await call.begin_stream()
    await call.event("one")
    await call.write(b"1;")
    while True:
        await call.write(b"x" * 10_000)


async def send_an_endless_trailer(call: Call) -> None:
    await call.begin_stream()
    await call.event("one")
    await call.write(b"0\r\nx: ")
    while True:
        await call.write(b"y" * 10_000)


async def send_trailers_without_end(call: Call) -> None:
    await call.begin_stream()
    await call.event("one")
    await call.write(b"0\r\n")
    while True:
        await call.write(b"x: y\r\n" * 1000)


@pytest.mark.parametrize("wrong", [send_endless_extensions, send_an_endless_trailer, send_trailers_without_end])
def test_an_answer_that_goes_on_without_a_body_is_cut(wrong: Callable[[Call], Awaitable[None]]) -> None:
    async def test() -> None:
        fake = FakeServer(behave=wrong)
        async with servers(fake) as urls, routing(*urls, fall=1000) as (_, client):
            streamed = await asyncio.wait_for(client.complete("base", stream=True), 10)
            assert b"one" in streamed.body
            assert b'"error"' in streamed.body

    run(test)


def test_interim_answers_without_end_are_cut() -> None:
    async def never_come_to_it(call: Call) -> None:
        while True:
            await call.write(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" * 100)

    async def test() -> None:
        fakes = FakeServer(behave=never_come_to_it), FakeServer()
        async with servers(*fakes) as urls, routing(*urls, router="first-fit") as (_, client):
            assert (await asyncio.wait_for(client.complete("base"), 10)).status == 200

    run(test)
