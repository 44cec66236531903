"""Workers of `manylora route`: one book over all of them, and processes that are started again."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ended import is_gone
from proxying import Call, Client, FakeServer, names, run, servers, until
from serving import wait_for
from test_route_tenants import bearer, tenants_file

from manylora.core.errors import ConfigError
from manylora.core.routing.view import Sent
from manylora.route import outbox as told
from manylora.route.config import ProxyConfig
from manylora.route.serve import Proxy, bind_workers
from manylora.route.workers import RouteWorker

ADMIN = {"authorization": "Bearer admin"}


@contextlib.asynccontextmanager
async def working(
    folder: Path, *urls: str, numbers: tuple[int, ...] = (0, 1), **options: Any
) -> AsyncIterator[list[tuple[Proxy, Client]]]:
    """Run workers of one router on this event loop; each has a port of its own, to be asked by itself."""
    quick = {"port": 0, "poll_s": 0.05, "slow_start_s": 0.0, "drain_timeout_s": 5.0, "workers": 3}
    config = ProxyConfig(backends=urls, **{**quick, **options})
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for number in numbers:
            bound = socket.create_server(("127.0.0.1", 0))
            worker = RouteWorker(number, 3, folder, bound, is_again=False, parent=-1)
            proxy = Proxy(config, worker=worker)
            ready = asyncio.Event()
            serving = asyncio.create_task(proxy.serve(ready.set))
            await ready.wait()
            stack.push_async_callback(asyncio.wait_for, serving, 10)
            stack.callback(proxy.drain)
            found.append((proxy, Client(proxy.url)))
        await until(
            lambda: all(
                one._peers is not None and len(one._peers._outbox.listeners) >= len(numbers) - 1 for one, _ in found
            )
        )
        yield found


def in_flight(proxy: Proxy) -> list[int]:
    return [one.num_in_flight for one in proxy.backends]


class Gate:
    """Lets streams begin, and end once it is opened."""

    def __init__(self) -> None:
        self.is_open = asyncio.Event()

    async def stream(self, call: Call) -> None:
        await call.begin_stream()
        await call.event("first")
        await self.is_open.wait()
        await call.end_stream()


def test_a_request_of_one_worker_counts_in_the_book_of_all_until_it_ends(tmp_path: Path) -> None:
    async def test() -> None:
        gate = Gate()
        fakes = [FakeServer({"a": "/a"}, behave=gate.stream) for _ in range(2)]
        async with servers(*fakes) as urls, working(tmp_path, *urls, router="least-loaded") as workers:
            (one, asks_one), (two, asks_two) = workers
            streams = [asyncio.ensure_future(asks_one.complete("a", stream=True))]
            await until(lambda: sum(in_flight(two)) == 1)
            streams.append(asyncio.ensure_future(asks_two.complete("a", stream=True)))  # goes to the idle one
            await until(lambda: in_flight(one) == in_flight(two) == [1, 1])
            views = [backend.view for backend in two.backends]
            await until(lambda: all(view.num_waiting == 0 for view in views))  # both answers have begun
            assert all(view.adapters["a"] == 1 and "a" in view.resident for view in views)
            assert all(view.num_foreign == 0 for view in views)
            # A worker that comes up is told of all that is open.
            async with working(tmp_path, *urls, numbers=(2,), router="least-loaded") as ((three, _),):
                await until(lambda: in_flight(three) == [1, 1])
            gate.is_open.set()
            assert all(answer.is_whole for answer in await asyncio.gather(*streams))
            await until(lambda: in_flight(one) == in_flight(two) == [0, 0])

    run(test)


def test_a_conversation_returns_to_its_server_by_way_of_another_worker(tmp_path: Path) -> None:
    async def test() -> None:
        fakes = [FakeServer() for _ in range(3)]
        prompt = "tell me " * 4000
        async with servers(*fakes) as urls, working(tmp_path, *urls) as workers:
            for turn in range(6):
                _, client = workers[turn % 2]
                body = {"model": "base", "prompt": prompt + f"turn {turn}", "max_tokens": 4}
                assert (await client.ask("POST", "/v1/completions", body)).status == 200
                await asyncio.sleep(0.02)
            assert sorted(len(fake.completions) for fake in fakes) == [0, 0, 6]

    run(test)


def test_a_worker_that_is_lost_takes_its_requests_along(tmp_path: Path) -> None:
    async def test() -> None:
        gate = Gate()
        fake = FakeServer(behave=gate.stream)
        async with servers(fake) as urls, working(tmp_path, *urls) as ((one, client), (two, _)):
            stream = asyncio.ensure_future(client.complete("base", stream=True))
            await until(lambda: in_flight(two) == [1])
            assert one._peers is not None
            await one._peers.stop()  # as at its end
            await until(lambda: in_flight(two) == [0])
            gate.is_open.set()
            assert (await stream).is_whole

    run(test)


def test_a_worker_that_does_not_read_is_left_and_told_all_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(told, "MOST_UNREAD_BYTES", -1)

    async def test() -> None:
        gate = Gate()
        fake = FakeServer(behave=gate.stream)
        async with servers(fake) as urls, working(tmp_path, *urls, numbers=(0,)) as ((one, client),):
            streams = [asyncio.ensure_future(client.complete("base", stream=True)) for _ in range(3)]
            await until(lambda: in_flight(one) == [3])
            assert one._peers is not None
            monkeypatch.setattr(told, "MOST_UNREAD_BYTES", 1 << 20)
            async with working(tmp_path, *urls, numbers=(1,)) as ((two, _),):
                await until(lambda: in_flight(two) == [3])
            gate.is_open.set()
            await asyncio.gather(*streams)

    run(test)


def test_a_message_reaches_the_others_beside_a_worker_that_has_just_ended(tmp_path: Path) -> None:
    """Its connection is broken in the turn of the event loop in which the message leaves."""

    async def test() -> None:
        kinds: list[str] = []
        decode = msgspec.msgpack.Decoder(list[told.Message]).decode

        async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError, asyncio.CancelledError):
                while True:
                    size = int.from_bytes(await reader.readexactly(4), "big")
                    kinds.extend(type(one).__name__ for one in decode(await reader.readexactly(size)))

        outbox, path = told.WorkerOutbox(), str(tmp_path / "1")
        server = await asyncio.start_unix_server(hear, path)
        (_, ended), (_, other) = [await asyncio.open_unix_connection(path) for _ in range(2)]
        with contextlib.closing(server), contextlib.closing(ended), contextlib.closing(other):
            hello = told.Hello(0, 0.0, [], told.Listed([], {}), {})
            outbox.join(1, ended.transport, hello)
            begun = outbox.begun("http://one", Sent(replica=0, adapter=None, rank=0, num_prompt_tokens=3), [])
            outbox.join(2, other.transport, hello)
            ended.transport.abort()
            await asyncio.sleep(0)
            outbox.ended(begun)
            await until(lambda: "Ended" in kinds)
            assert outbox.listeners == [2]
        await asyncio.sleep(0.01)

    run(test)


def test_limits_of_tenants_hold_over_all_workers(tmp_path: Path) -> None:
    async def test() -> None:
        fake = FakeServer({"b-own": "/b"})
        async with servers(fake) as urls, working(tmp_path, *urls, tenants=tenants_file(tmp_path)) as workers:
            for (_, client), left in zip(workers, "10", strict=True):  # two requests a minute
                answer = await client.complete("b-own", **bearer("beta"))
                assert (answer.status, answer.headers["x-ratelimit-remaining-requests"]) == (200, left)
                await asyncio.sleep(0.05)
            for _, client in workers:
                assert (await client.complete("b-own", **bearer("beta"))).status == 429

    run(test)


def test_a_worker_that_starts_again_has_the_limits_that_are_left(tmp_path: Path) -> None:
    async def test() -> None:
        fake, options = FakeServer({"b-own": "/b"}), {"tenants": tenants_file(tmp_path)}
        gate = Gate()
        async with servers(fake) as urls, working(tmp_path, *urls, numbers=(0,), **options) as ((one, client),):
            fake.behave = gate.stream
            stream = asyncio.ensure_future(client.complete("b-own", stream=True, **bearer("beta")))
            await until(lambda: in_flight(one) == [1])
            async with working(tmp_path, *urls, numbers=(1,), **options) as ((two, other),):
                await until(lambda: in_flight(two) == [1])
                gate.is_open.set()
                await stream
                answer = await other.complete("b-own", **bearer("beta"))  # the second of two requests a minute
                assert (answer.status, answer.headers["x-ratelimit-remaining-requests"]) == (200, "0")
            assert one._peers is not None
            one._peers._outbox._listeners[1].abort()  # as a process that ends does
            async with working(tmp_path, *urls, numbers=(1,), **options) as ((two, other),):
                assert two._peers is not None
                tenants: Any = two._peers._tenants
                await until(lambda: bool(tenants.room.taken()))
                assert (await other.complete("b-own", **bearer("beta"))).status == 429

    run(test)


def test_backends_that_one_worker_is_told_of_join_and_leave_all(tmp_path: Path) -> None:
    async def test() -> None:
        fakes = [FakeServer() for _ in range(3)]
        options = {"admin_key": "admin", "backend_key": "common"}
        async with servers(*fakes) as urls, working(tmp_path, *urls[:2], **options) as workers:
            (_, asks_one), (two, asks_two) = workers
            added = {"url": urls[2], "key": "own"}
            assert (await asks_one.ask("POST", "/backends", added, **ADMIN)).status == 202
            await until(lambda: two.backends.num_up == 3)
            assert (await asks_two.ask("DELETE", "/backends", {"url": urls[0]}, **ADMIN)).status == 202
            for proxy, _ in workers:
                await until(lambda proxy=proxy: [one.url for one in proxy.backends] == urls[1:])
            # One that comes up learns both, and gives the backends the places that they have in the others.
            async with working(tmp_path, *urls[:2], numbers=(2,), **options) as ((three, _),):
                await until(lambda: {one.url for one in three.backends} == set(urls[1:]))
                places = [proxy._peers._choice.places() for proxy in (two, three) if proxy._peers is not None]
                await until(lambda: three.backends.num_up == 2)
                assert places[0] == places[1]
            keys = {call.headers["authorization"] for call in fakes[2].calls}
            assert keys == {"Bearer own"}

    run(test)


def test_a_worker_that_is_started_again_accepts_once_it_has_heard_the_others(tmp_path: Path) -> None:
    """Its configuration names a backend that was removed since, and not the one that was added."""

    async def test() -> None:
        fakes = [FakeServer() for _ in range(3)]
        async with servers(*fakes) as urls, working(tmp_path, *urls[:1], admin_key="admin") as workers:
            (one, asks_one), (two, _) = workers
            for method, url in (("POST", urls[1]), ("POST", urls[2]), ("DELETE", urls[0])):
                assert (await asks_one.ask(method, "/backends", {"url": url}, **ADMIN)).status == 202
            await until(lambda: [[back.url for back in proxy.backends] for proxy in (one, two)] == [urls[1:]] * 2)
            bound = socket.create_server(("127.0.0.1", 0))
            three = Proxy(
                ProxyConfig(backends=tuple(urls[:1]), port=0, workers=3, slow_start_s=0.0),
                worker=RouteWorker(2, 3, tmp_path, bound, is_again=True, parent=-1),
            )
            at_begin: list[object] = []

            def is_ready() -> None:
                found = {back.url for back in three.backends}
                at_begin.extend([found, three.backends.num_up, *(one._peers._choice.places() for one in (two, three))])

            serving = asyncio.create_task(three.serve(is_ready))
            await until(lambda: bool(at_begin) or serving.done())
            assert at_begin[:2] == [set(urls[1:]), 2] and at_begin[2] == at_begin[3]
            assert (await Client(three.url).complete("base")).status == 200
            three.drain()
            await serving
            assert not fakes[0].completions

    run(test)


def test_backends_that_two_workers_are_told_of_at_once_join_all(tmp_path: Path) -> None:
    async def test() -> None:
        fakes = [FakeServer() for _ in range(4)]
        async with servers(*fakes) as urls, working(tmp_path, urls[0]) as workers:
            for (proxy, _), url in zip(workers, urls[1:3], strict=True):  # before either hears of the other
                proxy._sources.add(url)
            for proxy, _ in workers:
                await until(lambda proxy=proxy: {one.url for one in proxy.backends} == set(urls[:3]))
            workers[0][0]._sources.add(urls[3])
            assert workers[1][0]._sources.remove(urls[1])
            for proxy, _ in workers:
                await until(lambda proxy=proxy: {one.url for one in proxy.backends} == {urls[0], *urls[2:]})
            async with working(tmp_path, urls[0], numbers=(2,)) as ((three, _),):
                await until(lambda: {one.url for one in three.backends} == {urls[0], *urls[2:]})

    run(test)


def test_one_scrape_has_the_counters_of_all_workers_and_each_gauge_once(tmp_path: Path) -> None:
    async def test() -> None:
        fake = FakeServer(dict.fromkeys(names(2), "/"))
        async with servers(fake) as (url,), working(tmp_path, url) as workers:
            for number, (_, client) in enumerate(workers):
                for _ in range(number + 1):
                    await client.complete("a0")
            lines = (await workers[0][1].ask("GET", "/metrics")).body.decode().splitlines()
            name = "manylora_route_requests_total"
            counted = [line for line in lines if line.startswith(name)]
            assert counted == [
                f'{name}{{backend="{url}",outcome="answered",worker="{number}"}} {number + 1}.0' for number in (0, 1)
            ]
            assert lines.count(f'manylora_route_backend_up{{backend="{url}"}} 1.0') == 1
            assert lines.count(f"# TYPE {name} counter") == 1
            # A worker that does not tell in time is left out.
            two = workers[1][0]._peers
            assert two is not None
            two._take = lambda *_: None  # type: ignore[method-assign]
            text = (await workers[0][1].ask("GET", "/metrics")).body
            assert b'worker="0"' in text and b'worker="1"' not in text

    run(test)


def test_a_port_that_is_taken_is_refused_and_adapters_are_managed_by_one_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match="another process listens there"):
            bind_workers(ProxyConfig(backends=("http://x:1",), port=port, workers=2))
    with pytest.raises(ConfigError, match="workers = 2 with manage_adapters"):
        ProxyConfig(backends=("http://x:1",), workers=2, manage_adapters=True)


# -- processes ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def fake_in_thread(gate: threading.Event) -> Iterator[str]:
    """A server whose streams end once the gate is open."""
    url: list[str] = []
    ready, over = threading.Event(), threading.Event()

    async def stream(call: Call) -> None:
        await call.begin_stream()
        await call.event("first")
        while not gate.is_set():
            await asyncio.sleep(0.01)
        await call.end_stream()

    async def serve() -> None:
        async with servers(FakeServer(behave=stream)) as (one,):
            url.append(one)
            ready.set()
            while not over.is_set():
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=lambda: run(serve))
    thread.start()
    ready.wait()
    try:
        yield url[0]
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def routing(url: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A router of two workers, from its start on."""
    command = [sys.executable, "-m", "manylora", "route", "--backend", url, "--port", "0", "--workers", "2", *options]
    router = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield router
    finally:
        router.kill()
        router.communicate()


def read_until(router: subprocess.Popen[str], *texts: str) -> None:
    """Read a router's log up to a line with each text, one after the other."""
    assert router.stderr is not None
    for text in texts:
        while text not in (line := router.stderr.readline()):
            assert line, f"its log ended without {text!r}"


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def begin(address: str) -> http.client.HTTPResponse:
    """Begin a stream; return it after its first bytes."""
    connection = http.client.HTTPConnection(address.partition("://")[2], timeout=30)
    body = '{"model": "base", "prompt": "x", "stream": true}'
    connection.request("POST", "/v1/completions", body, {"Connection": "close"})  # it ends with its answer
    answer = connection.getresponse()
    assert answer.read(1)
    return answer


def serving_worker(parent: int, answer: http.client.HTTPResponse) -> int:
    """Return the worker that has the other end of a connection."""
    assert answer.fp is not None
    port = answer.fp.raw._sock.getsockname()[1]  # type: ignore[attr-defined]
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = {f"socket:[{row[9]}]" for row in rows if row[2].endswith(f":{port:04X}")}
    for pid in children(parent):
        links = {os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir() if one.is_symlink()}
        if links & sockets:
            return pid
    raise AssertionError("no worker has the connection")


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
def test_a_worker_that_dies_loses_its_own_streams_alone_and_is_started_again(tmp_path: Path) -> None:
    gate = threading.Event()
    config = tmp_path / "route.toml"
    with fake_in_thread(gate) as url:
        config.write_text(f'backend = ["{url}"]\nworkers = 2\nport = 0\nslow-start = 0.0\nlog-level = "warning"\n')
        command = [sys.executable, "-m", "manylora", "route", "--config", str(config)]
        router = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert router.stdout is not None and router.stderr is not None
        try:
            line = router.stdout.readline()
            assert "by 2 workers at http://" in line
            address = line.split()[-1]
            wait_for(lambda: len(children(router.pid)) == 2)
            time.sleep(0.3)  # until the second listens
            streams: dict[int, list[http.client.HTTPResponse]] = {}
            while len(streams) < 2 or min(map(len, streams.values())) < 2:
                stream = begin(address)
                streams.setdefault(serving_worker(router.pid, stream), []).append(stream)
            (dies, lost), (_, kept) = streams.items()
            before = set(children(router.pid))
            os.kill(dies, signal.SIGKILL)
            for stream in lost:
                with pytest.raises((http.client.IncompleteRead, ConnectionError)):
                    stream.read()
                stream.close()
            wait_for(lambda: len(set(children(router.pid)) | before) == 3 and len(children(router.pid)) == 2)
            config.write_text(config.read_text() + 'name = ["public=base:1"]\n')
            router.send_signal(signal.SIGHUP)  # to all, and the new one
            host = address.partition("://")[2]

            def knows_name() -> bool:
                with urllib.request.urlopen(f"http://{host}/v1/models", timeout=10) as answer:
                    return b"public" in answer.read()

            wait_for(lambda: all(knows_name() for _ in range(8)))
            begun = begin(address)
            router.send_signal(signal.SIGTERM)
            wait_for(lambda: not can_connect(host))
            gate.set()
            for stream in (*kept, begun):
                assert b"[DONE]" in stream.read()
            assert router.wait(25) == 0  # a connection without an end would hold it for 30
        finally:
            gate.set()
            router.kill()
            router.communicate()


def can_connect(host: str) -> bool:
    name, _, port = host.partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((name, int(port))) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
@pytest.mark.parametrize("is_parent_first", [False, True])
def test_a_signal_to_every_process_is_one(is_parent_first: bool) -> None:
    """As a service manager sends it: the parent's word and the signal are not two signals, in either order."""
    gate = threading.Event()
    with fake_in_thread(gate) as url, routing(url) as router:
        assert router.stdout is not None
        stream = begin(router.stdout.readline().split()[-1])
        pids = [serving_worker(router.pid, stream), router.pid]
        for pid in reversed(pids) if is_parent_first else pids:
            os.kill(pid, signal.SIGTERM)
            read_until(router, "draining")
        gate.set()
        assert b"[DONE]" in stream.read()
        assert router.wait(60) == 0


def test_a_second_signal_ends_the_workers_at_once() -> None:
    gate = threading.Event()
    with fake_in_thread(gate) as url, routing(url) as router:
        assert router.stdout is not None
        stream = begin(router.stdout.readline().split()[-1])
        router.send_signal(signal.SIGTERM)
        read_until(router, "draining")
        router.send_signal(signal.SIGTERM)
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            stream.read()
        assert router.wait(60) == 130
        gate.set()


def test_a_router_that_is_stopped_while_it_starts_starts_no_more_workers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as backend:
        url = f"http://127.0.0.1:{backend.getsockname()[1]}"
        with routing(url, "--poll-timeout", "60") as router:
            poll, _ = backend.accept()  # the first worker starts, and knows signals
            router.send_signal(signal.SIGTERM)
            read_until(router, "draining")
            poll.close()
            output, log = router.communicate(timeout=60)
            assert (router.returncode, output, log.count("Traceback")) == (0, "", 0)


def test_a_worker_that_has_no_handlers_yet_is_not_ended_by_the_first_signal() -> None:
    script = """
import os, select, socket, sys
from manylora.route.workers import start_workers
worker = start_workers(1, lambda: [socket.socket()])
if isinstance(worker, int):
    sys.exit(worker)
print("begun", flush=True)
select.select([worker.parent], [], [])
print("told", flush=True)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None and parent.stdout.readline() == "begun\n"
        parent.send_signal(signal.SIGTERM)
        assert parent.communicate(timeout=60)[0] == "told\n"
        assert parent.returncode == 0
    finally:
        parent.kill()


def test_a_router_whose_worker_ends_at_once_hears_signals_meanwhile() -> None:
    script = """
import select, socket, sys
from manylora.route import workers
workers.LEAST_LIFE_S = 3600.0
worker = workers.start_workers(2, lambda: [socket.socket(), socket.socket()])
if isinstance(worker, int):
    sys.exit(worker)
worker.say_ready()
if worker.number == 0:
    select.select([worker.parent], [], [])
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    try:
        assert parent.stderr is not None and "worker_ended worker=1" in parent.stderr.readline()
        parent.send_signal(signal.SIGTERM)
        assert (parent.communicate(timeout=60)[1], parent.returncode) == ("", 0)
    finally:
        parent.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
def test_workers_without_a_file_start_stay_and_end_with_their_parent() -> None:
    command = [sys.executable, "-m", "manylora", "route", "--backend", "http://127.0.0.1:9", "--port", "0"]
    router = subprocess.Popen([*command, "--workers", "3"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert router.stdout is not None
    try:
        assert "by 3 workers" in router.stdout.readline()
        wait_for(lambda: len(children(router.pid)) == 3)
        router.send_signal(signal.SIGHUP)  # there is nothing to read again
        time.sleep(0.5)
        workers = children(router.pid)
        router.kill()
        _, log = router.communicate(timeout=20)  # their ends of the pipes close when they end
        assert len(workers) == 3 and "worker_ended" not in log
        wait_for(lambda: all(map(is_gone, workers)))
    finally:
        router.kill()


@pytest.mark.parametrize("flag", ["--router=none-such", "--tenants=/missing/file"])
def test_a_mistake_is_told_once_and_ends_the_command(flag: str) -> None:
    command = [sys.executable, "-m", "manylora", "route", "--backend", "http://127.0.0.1:9", "--port", "0"]
    done = subprocess.run([*command, "--workers", "3", flag], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode not in (0, None)
    assert done.stderr.count("Got") == 1, done.stderr
