"""`manylora route` over servers that are slow, refuse, speak no HTTP, or die: before the first byte and after it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial

import psutil
import pytest
from proxying import Call, Client, FakeServer, recite, routing, run, servers, until
from serving import PATIENCE_S

from manylora.route.backend import Backend
from manylora.route.config import ProxyConfig
from manylora.route.fleet.adapters import RoutedAdapters
from manylora.route.serve import Proxy
from manylora.route.upstream import connection


async def die(call: Call) -> None:
    call.writer.transport.abort()


async def die_in_the_head(call: Call) -> None:
    await call.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/ev")
    call.writer.close()


async def die_behind_the_head(call: Call) -> None:
    await call.begin_stream()
    call.writer.close()


async def speak_nonsense(call: Call) -> None:
    await call.write(b"\x16\x03\x01 what is this\r\n\r\n" * 10)


async def send_a_huge_head(call: Call) -> None:
    await call.write(b"HTTP/1.1 200 OK\r\n" + b"".join(b"x-%d: %b\r\n" % (n, b"y" * 1000) for n in range(100)))


async def send_an_endless_header(call: Call) -> None:
    await call.write(b"HTTP/1.1 200 OK\r\nx: ")
    while True:
        await call.write(b"y" * 10_000)


async def refuse(call: Call) -> None:
    await call.answer(503, {"error": {"message": "restarting"}}, retry_after="7")


async def be_full(call: Call) -> None:
    await call.answer(429, {"error": {"message": "full"}}, retry_after="3")


async def be_wrong(call: Call) -> None:
    await call.answer(500, {"error": {"message": "bug"}})


async def never_answer(call: Call) -> None:
    await asyncio.Event().wait()


def num_listening(port: int) -> int:
    """Return the sockets of this process that listen on a port, which routers may share."""
    sockets = psutil.Process().net_connections("tcp")
    return sum(one.laddr.port == port and one.status == psutil.CONN_LISTEN for one in sockets)


@pytest.mark.parametrize(
    "wrong",
    [
        die,
        die_in_the_head,
        die_behind_the_head,
        speak_nonsense,
        send_a_huge_head,
        send_an_endless_header,
        refuse,
        be_full,
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_before_its_first_byte_an_answer_comes_from_elsewhere(
    wrong: Callable[[Call], Awaitable[None]], stream: bool
) -> None:
    async def test() -> None:
        fakes = FakeServer(behave=wrong), FakeServer()
        async with servers(*fakes) as urls, routing(*urls, router="first-fit", fall=100) as (proxy, client):
            answer = await client.complete("base", stream=stream)
            assert (answer.status, answer.is_whole) == (200, True)
            assert answer.body.count(b"base") == (3 if stream else 2)
            assert [len(fake.completions) for fake in fakes] == [1, 1]
            assert [backend.num_in_flight for backend in proxy.backends] == [0, 0]
            assert [backend.view.load for backend in proxy.backends] == [0, 0]

    run(test)


def test_a_request_that_two_backends_die_on_goes_to_no_third() -> None:
    async def test() -> None:
        fakes = [FakeServer(behave=die) for _ in range(4)]
        async with servers(*fakes) as urls, routing(*urls, retries=9) as (_, client):
            answer = await client.complete("base")
            assert (answer.status, answer.json["error"]["type"]) == (500, "InternalServerError")
            assert sum(len(fake.completions) for fake in fakes) == 2

    run(test)


def test_a_request_that_kills_backends_with_warm_connections_goes_to_no_third() -> None:
    async def kill(call: Call, fake: FakeServer) -> None:
        fake.crash()

    async def test() -> None:
        all_there = asyncio.Barrier(4)

        async def meet(call: Call) -> None:
            await all_there.wait()
            await recite(call)

        fakes = [FakeServer(behave=meet) for _ in range(4)]
        options = {"retries": 9, "fall": 100, "max_in_flight": 1}
        async with servers(*fakes) as urls, routing(*urls, **options) as (_, client):
            await asyncio.gather(*(client.complete("base") for _ in fakes))  # each has a connection that is used again
            for fake in fakes:
                fake.behave = partial(kill, fake=fake)
            answer = await client.complete("base")
            assert (answer.status, answer.json["error"]["type"]) == (500, "InternalServerError")
            assert sorted(len(fake.completions) for fake in fakes) == [1, 1, 2, 2]

    run(test)


@pytest.mark.parametrize(("wrong", "stale_s"), [(die, 0.0), (die_in_the_head, 60.0)])
def test_a_backend_that_worked_on_a_request_is_lost_and_not_its_idle_connection(
    wrong: Callable[[Call], Awaitable[None]], stale_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        monkeypatch.setattr(connection, "STALE_S", stale_s)
        fakes = FakeServer(), FakeServer()
        async with servers(*fakes) as urls, routing(*urls, router="first-fit") as (_, client):
            assert (await client.complete("base")).status == 200
            fakes[0].behave = wrong
            assert (await client.complete("base")).status == 200
            assert [len(fake.completions) for fake in fakes] == [2, 1]

    run(test)


def test_refusals_of_all_are_passed_on_and_an_error_is_not_tried_elsewhere() -> None:
    async def test() -> None:
        full, wrong = FakeServer(behave=be_full), FakeServer(behave=be_wrong, base="other")
        fakes = full, FakeServer(behave=be_full), wrong, FakeServer(behave=be_wrong, base="other")
        async with servers(*fakes) as urls, routing(*urls) as (_, client):
            answer = await client.complete("base")
            assert (answer.status, answer.headers["retry-after"], answer.json["error"]["message"]) == (429, "3", "full")
            answer = await client.complete("other")
            assert (answer.status, answer.json["error"]["message"]) == (500, "bug")
            assert [len(fake.completions) for fake in fakes[:2]] == [1, 1]
            assert sum(len(fake.completions) for fake in fakes[2:]) == 1

    run(test)


def test_a_refusal_whose_end_comes_later_is_passed_on_too() -> None:
    async def be_full_bit_by_bit(call: Call) -> None:
        await call.write(b"HTTP/1.1 429 X\r\ntransfer-encoding: chunked\r\nretry-after: 3\r\n\r\n4\r\nfull\r\n")
        await asyncio.sleep(0.1)
        await call.write(b"0\r\n\r\n")

    async def test() -> None:
        async with servers(FakeServer(behave=be_full_bit_by_bit)) as urls, routing(*urls) as (_, client):
            answer = await client.complete("base")
            assert (answer.status, answer.headers.get("retry-after"), answer.body) == (429, "3", b"full")

    run(test)


@pytest.mark.parametrize("is_between_events", [False, True])
def test_after_its_first_byte_an_answer_ends_visibly_and_is_never_sent_again(is_between_events: bool) -> None:
    async def half(call: Call) -> None:
        await call.begin_stream()
        await call.event("one")
        if not is_between_events:
            await call.write(b'8\r\ndata: {"\r\n')
        await asyncio.sleep(0)
        call.writer.close()

    async def test() -> None:
        fakes = FakeServer(behave=half), FakeServer(behave=half)
        async with servers(*fakes) as urls, routing(*urls) as (proxy, client):
            answer = await client.complete("base", stream=True)
            assert answer.body.startswith(b'data: {"choices":[{"index":0,"text":"one"}]}\n\n')
            assert answer.is_whole == is_between_events
            if is_between_events:
                _, error, done, _ = answer.body.decode().split("\n\n")
                assert json.loads(error.removeprefix("data: "))["error"]["code"] == 502
                assert done == "data: [DONE]"
            assert sum(len(fake.completions) for fake in fakes) == 1
            assert proxy.backends.num_up == 2

    run(test)


@pytest.mark.parametrize("pieces", [(b"\r\n\r\n",), (b"\r\n", b"\r\n"), (b"\n", b"\n"), (b"\r\n\r", b"\n")])
def test_events_may_end_in_any_line_ends_and_in_any_pieces(pieces: tuple[bytes, ...]) -> None:
    async def half(call: Call) -> None:
        await call.begin_stream()
        for piece in (b'data: {"choices":[]}', *pieces):
            await call.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await asyncio.sleep(0.02)
        call.writer.close()

    async def test() -> None:
        async with servers(FakeServer(behave=half)) as urls, routing(*urls) as (_, client):
            answer = await client.complete("base", stream=True)
            assert answer.is_whole and answer.body.endswith(b"data: [DONE]\n\n")
            assert b"The backend was lost in the middle" in answer.body

    run(test)


def test_an_answer_shorter_than_its_length_is_broken_for_the_client_too() -> None:
    async def short(call: Call) -> None:
        await call.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nonly this")
        call.writer.close()

    async def until_close(call: Call) -> None:
        await call.write(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.0 200 OK\r\n\r\nto the end")
        call.writer.close()

    async def test() -> None:
        fake = FakeServer(behave=short)
        async with servers(fake) as urls, routing(*urls) as (_, client):
            assert not (await client.complete("base")).is_whole
            fake.behave = until_close  # without a length, the end of the connection is that of the answer
            answer = await client.complete("base")
            assert (answer.status, answer.body, answer.is_whole) == (200, b"to the end", True)
            assert "link" not in answer.headers

    run(test)


def test_a_backend_that_sends_bytes_stays_in_and_a_silent_one_loses_its_requests_to_another() -> None:
    release = asyncio.Event()

    async def stream_on(call: Call) -> None:
        if call.json.get("prompt") == "wait":
            await never_answer(call)
        await call.begin_stream()
        while not release.is_set():
            await call.event("x")
            await asyncio.sleep(0.01)
        await never_answer(call)

    async def test() -> None:
        busy, other = FakeServer(behave=stream_on, poll=never_answer), FakeServer()
        busy.poll = None
        async with servers(busy, other) as urls:
            options = {"router": "first-fit", "poll_timeout_s": 0.05, "fall": 2}
            async with routing(*urls, **options) as (proxy, client):
                backend = next(iter(proxy.backends))
                streaming = asyncio.create_task(client.complete("base", stream=True))
                body = {"model": "base", "prompt": "wait"}
                waiting = asyncio.create_task(client.ask("POST", "/v1/completions", body))
                await until(lambda: len(busy.completions) == 2)
                busy.poll = never_answer
                num_polls = len(busy.calls)
                await until(lambda: len(busy.calls) >= num_polls + 8)  # eight polls without an answer
                assert backend.health.is_up
                release.set()
                await until(lambda: not backend.health.is_up)
                assert (await waiting).status == 200  # its first byte had not come: answered by the other
                assert len(other.completions) == 1
                stream = await streaming  # silent on a backend that is out: ended, and not in silence
                assert b'"error"' in stream.body
                busy.poll = None
                await until(lambda: backend.health.is_up)

    run(test)


def test_a_stream_outlives_a_restart_of_the_engine_behind_its_server() -> None:
    restarted = asyncio.Event()

    async def go_on_later(call: Call) -> None:
        if call.json.get("prompt") == "wait":
            await never_answer(call)
        await call.begin_stream()
        await call.event("begun")
        await restarted.wait()
        await call.event("resumed")
        await call.end_stream()

    async def restarting(call: Call) -> None:
        await call.answer(503, "the engine is being restarted")

    async def test() -> None:
        server, other = FakeServer(behave=go_on_later), FakeServer()
        options = {"router": "first-fit", "fall": 2}
        async with servers(server, other) as urls, routing(*urls, **options) as (proxy, client):
            backend = next(iter(proxy.backends))
            streaming = asyncio.create_task(client.complete("base", stream=True))
            body = {"model": "base", "prompt": "wait"}
            waiting = asyncio.create_task(client.ask("POST", "/v1/completions", body))
            await until(lambda: len(server.completions) == 2)
            server.poll = restarting
            assert (await waiting).status == 200  # it had not begun: answered by the other
            assert not backend.health.is_up
            num_polls = len(server.calls)
            await until(lambda: len(server.calls) >= num_polls + 8)
            restarted.set()
            assert b"begun" in (await streaming).body
            assert b"resumed" in streaming.result().body
            assert streaming.result().body.endswith(b"data: [DONE]\n\n")
            assert b'"error"' not in streaming.result().body

    run(test)


def test_refusals_of_one_request_are_no_outage_for_others() -> None:
    async def be_full_for_one(call: Call) -> None:
        await (refuse if call.json["prompt"] == "too much" else recite)(call)

    async def test() -> None:
        fakes = [FakeServer(behave=be_full_for_one) for _ in range(3)]
        async with servers(*fakes) as urls, routing(*urls) as (proxy, client):
            for _ in range(5):
                body = {"model": "base", "prompt": "too much"}
                refused = await client.ask("POST", "/v1/completions", body)
                assert (refused.status, refused.headers["retry-after"]) == (503, "7")
                assert (await client.complete("base")).status == 200
            assert proxy.backends.num_up == 3

    run(test)


def test_a_backend_that_loses_requests_is_out_until_a_probe_is_answered() -> None:
    async def test() -> None:
        fakes = FakeServer(behave=die), FakeServer()
        async with servers(*fakes) as urls, routing(*urls, router="first-fit", fall=2) as (proxy, client):
            backend = next(iter(proxy.backends))
            for _ in range(2):
                assert (await client.complete("base")).status == 200
            assert not backend.health.is_up
            fakes[0].behave = recite
            await until(lambda: backend.health.is_up)
            probe = fakes[0].completions[-1].json
            assert (len(fakes[0].completions), probe["model"], probe["max_tokens"]) == (3, "base", 1)

    run(test)


@pytest.mark.parametrize("panic_threshold", [50.0, 0.0])
def test_backends_that_are_all_out_are_tried_all_the_same(panic_threshold: float) -> None:
    async def test() -> None:
        fakes = FakeServer(poll=refuse), FakeServer(poll=refuse)
        for fake in fakes:
            fake.poll = None
        async with servers(*fakes) as urls, routing(*urls, panic_threshold=panic_threshold) as (proxy, client):
            for fake in fakes:
                fake.poll = refuse
            await until(lambda: proxy.backends.num_up == 0)
            answer = await client.complete("base")
            assert answer.status == (200 if panic_threshold else 503)

    run(test)


def test_a_backend_that_is_out_is_tried_behind_those_that_are_in() -> None:
    release = asyncio.Event()

    async def hold(call: Call) -> None:
        await release.wait()
        await recite(call)

    async def test() -> None:
        good, bad, worse = FakeServer(behave=hold), FakeServer(behave=hold), FakeServer()
        async with servers(good, bad, worse) as urls, routing(*urls, max_in_flight=1) as (proxy, client):
            bad.poll = refuse
            await worse.stop()
            await until(lambda: proxy.backends.num_up == 1)
            held = [asyncio.create_task(client.complete("base"))]
            await until(lambda: len(good.completions) == 1)
            held.append(asyncio.create_task(client.complete("base")))
            await until(lambda: len(bad.completions) == 1)
            release.set()
            assert [(await task).status for task in held] == [200, 200]

    run(test)


async def hang_behind_the_head(call: Call) -> None:
    await call.begin_stream()
    await never_answer(call)


async def hang_in_the_stream(call: Call) -> None:
    await call.begin_stream()
    await call.event("x")
    await never_answer(call)


@pytest.mark.parametrize("wrong", [never_answer, hang_behind_the_head])
def test_a_backend_that_hangs_is_out_though_its_health_is_good(wrong: Callable[[Call], Awaitable[None]]) -> None:
    async def test() -> None:
        fakes = FakeServer(behave=wrong), FakeServer()
        options = {"router": "first-fit", "first_byte_timeout_s": 0.3}
        async with servers(*fakes) as urls, routing(*urls, **options) as (proxy, client):
            backend = next(iter(proxy.backends))
            answers = await asyncio.gather(*(client.complete("base", stream=True) for _ in range(3)))
            assert [answer.status for answer in answers] == [200] * 3
            assert (len(fakes[0].completions), len(fakes[1].completions)) == (3, 3)
            assert (backend.health.is_up, backend.health.reason) == (False, "no progress")
            assert (await client.complete("base")).status == 200
            assert len(fakes[0].completions) == 3  # it waits for a probe
            fakes[0].behave = recite
            await until(lambda: backend.health.is_up)

    run(test)


def test_a_stream_that_idles_ends_with_an_error_and_is_not_sent_again() -> None:
    async def test() -> None:
        fakes = FakeServer(behave=hang_in_the_stream), FakeServer()
        options = {"router": "first-fit", "idle_timeout_s": 0.3}
        async with servers(*fakes) as urls, routing(*urls, **options) as (proxy, client):
            answer = await client.complete("base", stream=True)
            _, error, done, _ = answer.body.decode().split("\n\n")
            assert json.loads(error.removeprefix("data: "))["error"]["type"] == "GatewayTimeoutError"
            assert (done, answer.is_whole) == ("data: [DONE]", True)
            assert not fakes[1].completions
            assert proxy.backends.num_up == 1

    run(test)


def test_a_slow_request_on_a_backend_that_serves_others_is_not_sent_again() -> None:
    async def stream_or_hang(call: Call) -> None:
        if not call.json["stream"]:
            await never_answer(call)
        await call.begin_stream()
        while True:
            await call.event("x")
            await asyncio.sleep(0.02)

    async def test() -> None:
        fakes = FakeServer(behave=stream_or_hang), FakeServer()
        options = {"router": "first-fit", "first_byte_timeout_s": 0.5}
        async with servers(*fakes) as urls, routing(*urls, **options) as (proxy, client):
            body = {"model": "base", "prompt": "x", "stream": True}
            reader, writer = await client.open("POST", "/v1/completions", body)
            await reader.readuntil(b"data: ")
            answer = await client.complete("base")
            assert (answer.status, answer.json["error"]["type"]) == (504, "GatewayTimeoutError")
            assert not fakes[1].completions
            assert proxy.backends.num_up == 2
            writer.transport.abort()

    run(test)


def test_a_client_that_does_not_read_is_no_idle_backend() -> None:
    async def pour(call: Call) -> None:
        await call.begin_stream()
        for _ in range(512):
            await call.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n")
        await call.write(b"0\r\n\r\n")

    async def test() -> None:
        fake = FakeServer(behave=pour)
        async with servers(fake) as urls, routing(*urls, idle_timeout_s=0.3) as (proxy, client):
            reader, writer = await client.open("POST", "/v1/completions", {"model": "base", "stream": True})
            await asyncio.sleep(1.0)
            num_zeros = 0
            while data := await reader.read(1 << 20):
                num_zeros += data.count(0)
            assert num_zeros == 32 << 20
            assert proxy.backends.num_up == 1
            writer.close()

    run(test)


def test_a_client_that_goes_cancels_its_request_at_the_backend() -> None:
    async def stream_on(call: Call) -> None:
        if call.json["stream"]:
            await call.begin_stream()
            await call.event("x")
        await never_answer(call)

    async def test() -> None:
        fake = FakeServer(behave=stream_on)
        async with servers(fake) as urls, routing(*urls) as (proxy, client):
            backend = next(iter(proxy.backends))
            for stream in (False, True):  # while it waits for the first byte, and behind it
                body = {"model": "base", "prompt": "x", "stream": stream}
                reader, writer = await client.open("POST", "/v1/completions", body)
                if stream:
                    await reader.readuntil(b"data: ")
                await until(lambda: backend.num_in_flight == 1)
                writer.transport.abort()
                await until(lambda: backend.num_in_flight == 0)
                await until(lambda: all(call.writer.transport.is_closing() for call in fake.completions))
            assert backend.health.is_up

    run(test)


def test_a_client_that_does_not_read_holds_up_its_backend() -> None:
    num_bytes = 64 << 20
    written = 0

    async def pour(call: Call) -> None:
        nonlocal written
        await call.begin_stream()
        piece = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
        while written < num_bytes:
            await call.write(piece)
            written += 1 << 16
        await call.write(b"0\r\n\r\n")

    async def test() -> None:
        fake = FakeServer(behave=pour)
        async with servers(fake) as urls, routing(*urls) as (_, client):
            body = {"model": "base", "prompt": "x", "stream": True}
            reader, writer = await client.open("POST", "/v1/completions", body)
            before = -1
            while before != written:  # until all buffers on the way are full
                before = written
                await asyncio.sleep(0.3)
            assert 0 < written < num_bytes // 2
            num_zeros = 0
            while data := await reader.read(1 << 20):
                num_zeros += data.count(0)
            assert num_zeros == num_bytes
            writer.close()

    run(test)


def test_no_backend_gets_more_than_its_bound() -> None:
    release = asyncio.Event()

    async def hold(call: Call) -> None:
        await release.wait()
        await recite(call)

    async def test() -> None:
        fakes = FakeServer(behave=hold), FakeServer(behave=hold)
        async with servers(*fakes) as urls, routing(*urls, max_in_flight=2) as (_, client):
            held = [asyncio.create_task(client.complete("base")) for _ in range(4)]
            await until(lambda: sum(len(fake.completions) for fake in fakes) == 4)
            full = await client.complete("base")
            assert (full.status, full.json["error"]["type"]) == (429, "RateLimitError")
            assert int(full.headers["retry-after"]) >= 1
            release.set()
            assert [answer.status for answer in await asyncio.gather(*held)] == [200] * 4
            assert [len(fake.completions) for fake in fakes] == [2, 2]
            assert (await client.complete("base")).status == 200

    run(test)


def test_no_backend_gets_more_than_its_bound_while_an_adapter_is_loaded_for_them() -> None:
    async def test() -> None:
        can_load, can_answer = asyncio.Event(), asyncio.Event()

        async def hold(call: Call) -> None:
            await can_answer.wait()
            await recite(call)

        async def load(call: Call) -> None:
            await can_load.wait()
            await empty.change_adapters(call)

        holder, empty = FakeServer({"a": "/a"}, behave=hold), FakeServer(behave=hold, change=load)
        options = {"max_in_flight": 2, "manage_adapters": True}
        async with servers(holder, empty) as urls, routing(*urls, **options) as (proxy, client):
            held = [asyncio.create_task(client.complete("a")) for _ in range(2)]
            await until(lambda: len(holder.completions) == 2)
            burst = [asyncio.create_task(client.complete("a")) for _ in range(8)]
            await until(lambda: sum(task.done() for task in burst) == 6)
            can_load.set()
            await until(lambda: len(empty.completions) == 2)
            can_answer.set()
            answers = await asyncio.gather(*burst)
            assert sorted(answer.status for answer in answers) == [200] * 2 + [429] * 6
            assert [answer.status for answer in await asyncio.gather(*held)] == [200, 200]
            assert [backend.num_in_flight for backend in proxy.backends] == [0, 0]

    run(test)


def test_connections_are_used_again() -> None:
    async def test() -> None:
        fake = FakeServer()
        async with servers(fake) as urls, routing(*urls) as (_, client):
            for stream in (False, True, False, True):
                assert (await client.complete("base", stream=stream)).is_whole
            assert len({call.writer for call in fake.completions}) == 1

    run(test)


def test_an_idle_connection_that_the_backend_closed_costs_no_request() -> None:
    async def answer_and_close(call: Call) -> None:
        await recite(call)
        asyncio.get_running_loop().call_later(0.001, call.writer.transport.abort)

    async def test() -> None:
        fake = FakeServer(behave=answer_and_close)
        async with servers(fake) as urls, routing(*urls, retries=0) as (_, client):
            for _ in range(30):
                assert (await client.complete("base")).status == 200

    run(test)


def test_a_list_of_models_or_metrics_that_are_wrong_take_no_backend_in_or_out() -> None:
    async def test() -> None:
        liar, good = FakeServer(base="x" * 600), FakeServer(metrics="\0" * 100_000 + "vllm:num_requests_running{ 1e999")
        async with servers(liar, good) as urls, routing(*urls) as (proxy, client):
            num_polls = len(liar.calls)
            await until(lambda: len(liar.calls) > num_polls + 6)
            assert [backend.health.is_up for backend in proxy.backends] == [False, True]
            row = (await client.ask("GET", "/status")).json["backends"][0]
            assert (row["state"], "longer than" in row["reason"]) == ("joining", True)
            assert (await client.complete("base")).status == 200

    run(test)


def test_a_poll_that_breaks_is_a_failed_poll_and_others_follow(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        fake = FakeServer()
        async with servers(fake) as urls, routing(*urls, fall=2, rise=1, panic_threshold=0) as (proxy, client):
            (backend,) = proxy.backends

            async def broken(self: RoutedAdapters, backend: Backend) -> bool:
                raise ZeroDivisionError

            monkeypatch.setattr(RoutedAdapters, "prepare", broken)
            await until(lambda: not backend.health.is_up)
            assert "ZeroDivisionError" in backend.health.reason
            assert (await client.complete("base")).status == 503
            monkeypatch.undo()
            await until(lambda: backend.health.is_up)
            assert (await client.complete("base")).status == 200

    run(test)
    assert any("poll_broke" in record.message for record in caplog.records)


def test_a_stop_does_not_wait_for_the_first_polls() -> None:
    async def test() -> None:
        silent = FakeServer(poll=never_answer)
        async with servers(silent) as urls:
            proxy = Proxy(ProxyConfig(backends=tuple(urls), port=0, poll_timeout_s=3600.0))
            serving = asyncio.create_task(proxy.serve(lambda: None))
            await until(lambda: bool(silent.calls))
            proxy.drain()
            async with asyncio.timeout(PATIENCE_S):
                await serving

    run(test)


def test_a_router_is_replaced_under_load_and_no_request_is_lost() -> None:
    async def slow(call: Call) -> None:
        await call.begin_stream()
        for place in range(20):
            await call.event(str(place))
            await asyncio.sleep(0.005)
        await call.end_stream()

    async def test() -> None:
        fakes = FakeServer(behave=slow), FakeServer(behave=slow)
        async with servers(*fakes) as urls, routing(*urls, reuse_port=True) as (first, client):
            port = int(first.url.rpartition(":")[2])
            early = [asyncio.create_task(client.complete("base", stream=True)) for _ in range(20)]
            await until(lambda: sum(len(fake.completions) for fake in fakes) == 20)
            async with routing(*urls, reuse_port=True, port=port) as (second, _):
                assert isinstance(second, Proxy)
                first.drain()
                late: list[asyncio.Task[object]] = []
                await until(lambda: num_listening(port) == 1)
                late = [asyncio.create_task(Client(second.url).complete("base", stream=True)) for _ in range(20)]
                answers = await asyncio.gather(*early, *late)
            assert all(answer.status == 200 and answer.is_whole for answer in answers)  # type: ignore[attr-defined]
            assert len({answer.body for answer in answers}) == 1  # type: ignore[attr-defined]

    run(test)
