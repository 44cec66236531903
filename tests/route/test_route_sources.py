"""Backends of `manylora route` that come and go while it runs, their keys, and public names of models."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proxying import Call, FakeServer, routing, run, servers, until

from manylora.core.errors import ConfigError
from manylora.route.config import ProxyConfig
from manylora.route.fleet.kubernetes import Cluster
from manylora.route.fleet.names import Arm, arms_in_order, conversation_key, parse_names
from manylora.route.fleet.sources import Pods, Sources, parse_source, resolve
from manylora.route.outbox import Listed, Said
from manylora.route.serve import _reloaded, reload_on_change
from manylora.route.upstream.address import Address, parse_backend
from manylora.serving.http.rereading import stamp_of

ADMIN = {"authorization": "Bearer admin"}


def test_backends_are_added_with_keys_of_their_own_and_drained(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    going = asyncio.Event()

    async def slow(call: Call) -> None:
        await call.begin_stream()
        await call.event("first")
        await going.wait()
        await call.event("last")
        await call.end_stream()

    async def test() -> None:
        first, second = FakeServer(behave=slow), FakeServer()
        key = tmp_path / "key"
        key.write_text("of-first\n")
        async with (
            servers(first, second) as (one, two),
            routing(f"{one}#file:{key}", backend_key="common", admin_key="admin") as (proxy, client),
        ):
            refused = await client.ask("POST", "/backends", {"url": two})
            assert refused.status == 401
            streaming = asyncio.ensure_future(client.complete("base", stream=True))
            await until(lambda: bool(first.completions))
            added = await client.ask("POST", "/backends", {"url": two, "key": "of-second"}, **ADMIN)
            assert (added.status, added.json) == (202, {"url": two})
            await until(lambda: proxy.backends.num_up == 2)
            gone = await client.ask("DELETE", "/backends", {"url": one}, **ADMIN)
            assert (gone.status, gone.json["in_flight"]) == (202, 1)
            assert (await client.complete("base")).json["model"] == "base"
            assert [call.headers["authorization"] for call in second.completions] == ["Bearer of-second"]
            going.set()
            whole = await streaming
            assert whole.is_whole
            assert b"last" in whole.body
            assert {call.headers["authorization"] for call in first.calls} == {"Bearer of-first"}
            listed = await client.ask("GET", "/backends", **ADMIN)
            assert [backend["url"] for backend in listed.json["backends"]] == [two]
            assert b"of-" not in listed.body
            for body in (
                {"url": "ftp://x"},
                {"url": "dns:x:1"},
                {"url": f"{two}#file:{key}"},
                {"url": two, "key": "\n"},
            ):
                assert (await client.ask("POST", "/backends", body, **ADMIN)).status == 400
            assert (await client.ask("DELETE", "/backends", {"url": one}, **ADMIN)).status == 404

    async def without_admin_key() -> None:
        async with servers(FakeServer()) as (url,), routing(url) as (proxy, client):
            assert (await client.ask("POST", "/backends", {"url": "http://127.0.0.1:1"})).status == 403
            assert (await client.ask("DELETE", "/backends", {"url": url})).status == 403
            assert len(proxy.backends) == 1

    with caplog.at_level(logging.DEBUG):
        run(test)
        run(without_admin_key)
    assert "of-first" not in caplog.text
    assert "of-second" not in caplog.text


def test_servers_beyond_the_most_are_told_by_their_number(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one by one at each change of any: those of a large pool are many."""
    monkeypatch.setattr("manylora.route.fleet.members.MAX_BACKENDS", 1)

    async def test() -> None:
        async with servers(FakeServer()) as (one,), routing(one, admin_key="admin") as (proxy, client):
            for other in ("http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:2"):
                await client.ask("POST", "/backends", {"url": other}, **ADMIN)
            assert [backend.url for backend in proxy.backends] == [one]

    run(test)
    told = [line.split()[1] for line in caplog.messages if "left_out" in line or "ignored" in line]
    assert told == ["num=1", "num=2"]


def test_a_key_that_is_replaced_in_its_file_is_sent_from_then_on(tmp_path: Path) -> None:
    async def test() -> None:
        fake, key = FakeServer(), tmp_path / "key"
        key.write_text("old")
        async with servers(fake) as (url,), routing(f"{url}#file:{key}"):
            key.write_text("new")
            await until(lambda: fake.calls[-1].headers["authorization"] == "Bearer new")
            key.unlink()  # for a moment, while it is replaced
            count = len(fake.calls)
            await until(lambda: len(fake.calls) > count + 3)
            assert fake.calls[-1].headers["authorization"] == "Bearer new"

    run(test)


def test_another_configuration_replaces_backends_and_names_and_a_wrong_one_is_refused(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manylora.route.serve.REREAD_S", 0.01)
    file = tmp_path / "route.toml"

    async def test() -> None:
        fakes = FakeServer({"v1": "/v1"}), FakeServer({"v2": "/v2"})
        async with servers(*fakes) as (one, two), routing(one) as (proxy, client):
            file.write_text("0")
            wanted: list[dict[str, Any]] = [
                {},
                {"backends": (two,), "names": ("x=v2:1",), "retries": 5},
                {"backends": ("ftp://x",)},
            ]

            def read() -> ProxyConfig:
                return ProxyConfig(**{"backends": (one,), **wanted[int(file.read_text())]})

            seen = stamp_of(file)
            file.write_text("1 ")  # before anybody looks: between a start's reading and its serving
            watching = asyncio.ensure_future(reload_on_change(proxy, read, file, seen))
            await until(lambda: [backend.url for backend in proxy.backends] == [two] and proxy.backends.num_up == 1)
            await until(lambda: "x" in proxy.backends.catalog.names)
            assert (await client.complete("x")).json["model"] == "v2"
            file.write_text("2")
            await until(lambda: "reload_refused" in caplog.text)
            assert (await client.complete("x")).status == 200
            watching.cancel()

    with caplog.at_level(logging.INFO):
        run(test)
    assert "reload_needs_restart options=retries" in caplog.text
    assert "ftp://x" in caplog.text


def test_a_start_takes_the_file_of_now_and_sees_a_change_while_it_reads(tmp_path: Path) -> None:
    file = tmp_path / "route.toml"
    file.write_text("http://one")
    started = ProxyConfig(backends=("http://before",), retries=5)

    def read() -> ProxyConfig:
        text = file.read_text()
        file.write_text("http://changed")
        return ProxyConfig(backends=(text,))

    config, seen = _reloaded(started, read, str(file))
    assert (config.backends, config.retries) == (("http://one",), 5)
    assert seen != stamp_of(file)

    def refuse() -> ProxyConfig:
        raise ConfigError("no")

    assert _reloaded(started, refuse, str(file)) == (started, stamp_of(file))


def test_a_conversation_stays_with_its_version_and_weights_are_kept() -> None:
    def talk(number: int, turns: int, **more: Any) -> dict[str, Any]:
        messages = [{"role": "system", "content": "be brief"}]
        messages += [{"role": ("user", "assistant")[turn % 2], "content": f"{number}/{turn}"} for turn in range(turns)]
        return {"model": "sql", "messages": messages, **more}

    async def test() -> None:
        fakes = [FakeServer({"sql-v1": "/1", "sql-v2": "/2"}) for _ in range(2)]
        async with servers(*fakes) as urls, routing(*urls, names=("sql=sql-v1:3,sql-v2:1",)) as (_, client):
            arms = []
            for number in range(60):
                answers = [await client.ask("POST", "/v1/chat/completions", talk(number, turns)) for turns in (1, 3)]
                seen = {(answer.headers["x-manylora-model"], answer.json["model"]) for answer in answers}
                assert len(seen) == 1
                arm, model = seen.pop()
                assert arm == model
                arms.append(arm)
            assert 5 <= arms.count("sql-v2") <= 27
            named = [await client.ask("POST", "/v1/chat/completions", talk(n, 1, user="me")) for n in range(8)]
            assert len({answer.headers["x-manylora-model"] for answer in named}) == 1
            listed = (await client.ask("GET", "/v1/models")).json["data"]
            assert [card["id"] for card in listed] == ["base", "sql-v1", "sql-v2", "sql"]
            text = (await client.ask("GET", "/metrics")).body.decode()
            assert 'manylora_route_arm_requests_total{model="sql-v1",name="sql",outcome="answered"}' in text
            fakes[0].adapters.pop("sql-v2"), fakes[1].adapters.pop("sql-v2")
            while (await client.complete("sql-v2")).status != 404:
                await asyncio.sleep(0.02)
            for number in range(8):  # the other version stands in
                assert (await client.ask("POST", "/v1/chat/completions", talk(number, 1))).json["model"] == "sql-v1"

    run(test)


def test_a_change_of_weights_moves_as_few_conversations_as_it_can() -> None:
    keys = [str(number).encode() for number in range(2000)]

    def homes(*weights: float) -> list[str]:
        arms = [Arm(f"v{number}", weight) for number, weight in enumerate(weights)]
        return [arms_in_order("x", arms, key)[0].model for key in keys]

    before, after = homes(90, 10), homes(80, 20)
    assert abs(before.count("v1") / len(keys) - 0.1) < 0.03
    assert abs(after.count("v1") / len(keys) - 0.2) < 0.03
    assert not any(old == "v1" and new == "v0" for old, new in zip(before, after, strict=True))
    assert set(homes(1, 0)) == {"v0"}


@pytest.mark.parametrize("body", [b"", b"[]", b'{"messages": 3}', b'{"messages": [3]}', b'{"user": 3}', b"[" * 10_000])
def test_a_body_without_a_conversation_has_a_key_all_the_same(body: bytes) -> None:
    assert conversation_key(body) == body[: 16 * 1024]


@pytest.mark.parametrize(
    "text",
    ["", "x", "x=", "x=a", "x=a:b", "x=a:-1", "x=a:0", "=a:1", "x=x:1", "x=a:1,a:2", "x=a@ftp://b:1", "x=\x01:1"],
)
def test_names_of_another_form_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        parse_names([text])
    with pytest.raises(ConfigError, match="public name"):
        parse_names(["x=y:1", "y=z:1"])


def test_sources_are_read_and_wrong_ones_named() -> None:
    pods = parse_source("pods:ns/app=vllm,tier in (a,b):8000#env:KEY", {"KEY": "secret"})
    assert pods == Pods("ns", "app=vllm,tier in (a,b)", 8000, key_from="key:secret")
    assert parse_source("pool:ns/llama", {}) == Pods("ns", pool="llama")
    assert "secret" not in repr(parse_source("http://h:1#env:KEY", {"KEY": "secret"}))
    for text in (
        "pods:app=x:80",
        "pods:ns/app=x",
        "pool:ns",
        "pool:n s/x",
        "http://h#key:x",
        "http://h#env:NONE",
        "http://h#file:",
    ):
        with pytest.raises(ConfigError, match="Got backend"):
            parse_source(text, {})


# -- pods --------------------------------------------------------------------------------------------------------------


@dataclass
class FakeCluster(FakeServer):
    """The API of a cluster: pods with addresses, listed in pages and watched; ``gone`` versions answer 410."""

    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    version: int = 1
    gone_below: int = 0
    port_of_pool: int = 0
    watchers: list[Call] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def set(self, name: str, ip: str, *, is_ready: bool = True, **metadata: str) -> dict[str, Any]:
        self.version += 1
        status = {"podIP": ip, "conditions": [{"type": "Ready", "status": str(is_ready)}]}
        self.pods[name] = {
            "metadata": {"name": name, "resourceVersion": str(self.version), **metadata},
            "status": status,
        }
        return self.pods[name]

    async def tell(self, kind: str, content: dict[str, Any]) -> None:
        for call in self.watchers:
            line = json.dumps({"type": kind, "object": content}).encode() + b"\n"
            half = len(line) // 2
            for part in (line[:half], line[half:]):
                await call.write(b"%x\r\n%b\r\n" % (len(part), part))

    async def end_watches(self) -> None:
        watchers, self.watchers = self.watchers, []
        for call in watchers:
            await call.write(b"0\r\n\r\n")

    async def _answer(self, call: Call) -> None:
        query = dict(part.partition("=")[::2] for part in call.path.partition("?")[2].split("&"))
        if call.path.startswith("/apis/inference.networking.k8s.io/v1/namespaces/ns/inferencepools/llama"):
            spec = {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": self.port_of_pool}]}
            await call.answer(200, {"spec": spec})
        elif not call.path.startswith("/api/v1/namespaces/ns/pods?labelSelector=app%3Dvllm"):
            await call.answer(404, {"code": 404})
        elif "watch" not in query:
            names = sorted(self.pods)
            place = int(query["continue"] or 0)
            more = str(place + 1) if place + 1 < len(names) else ""
            items = [self.pods[name] for name in names[place : place + 1]]
            await call.answer(
                200, {"metadata": {"resourceVersion": str(self.version), "continue": more}, "items": items}
            )
        elif int(query["resourceVersion"]) < self.gone_below:
            await call.answer(410, {"kind": "Status", "code": 410})
        else:
            await call.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
            self.watchers.append(call)
            await asyncio.Event().wait()


@pytest.mark.parametrize("source", ["pods:ns/app=vllm:{port}", "pool:ns/llama"])
def test_ready_pods_are_backends_through_every_trouble_of_a_watch(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("manylora.route.fleet.kubernetes.FIRST_WAIT_S", 0.01)
    token = tmp_path / "token"
    token.write_text("one\n")

    async def test() -> None:
        fakes = [FakeServer() for _ in range(3)]
        cluster = FakeCluster()
        async with contextlib.AsyncExitStack() as stack:
            port = 0
            for number, fake in enumerate(fakes):
                await fake.start(f"127.0.0.{number + 2}", port)
                stack.push_async_callback(fake.stop)
                port = fake.port
            cluster.port_of_pool = port
            cluster.set("a", "127.0.0.2")
            cluster.set("b", "127.0.0.3", is_ready=False)
            cluster.set("c", "127.0.0.4", deletionTimestamp="now")
            (api,) = await stack.enter_async_context(servers(cluster))
            options = {"kubernetes_api": api, "kubernetes_account": str(tmp_path), "resolve_s": 0.05}
            proxy, client = await stack.enter_async_context(routing(source.format(port=port), **options))

            def hosts() -> list[int]:
                return sorted(int(backend.address.host[-1]) for backend in proxy.backends)

            assert hosts() == [2]
            assert (await client.complete("base")).status == 200
            await until(lambda: bool(cluster.watchers))
            await cluster.tell("MODIFIED", cluster.set("b", "127.0.0.3"))
            await until(lambda: hosts() == [2, 3])
            cluster.version = 90
            await cluster.tell("BOOKMARK", {"metadata": {"resourceVersion": "90"}})
            await cluster.tell("MODIFIED", cluster.set("a", "127.0.0.2", is_ready=False))
            await until(lambda: hosts() == [3])
            token.write_text("two\n")  # as the cluster does, once an hour
            await cluster.end_watches()
            await until(lambda: bool(cluster.watchers))
            assert cluster.watchers[0].headers["authorization"] == "Bearer two"
            assert "resourceVersion=91" in cluster.watchers[0].path
            cluster.set("c", "127.0.0.4")  # no event tells of it
            cluster.version = cluster.gone_below = 1000
            await cluster.tell("ERROR", {"kind": "Status", "code": 410})
            await cluster.end_watches()
            await until(lambda: hosts() == [3, 4])
            await until(lambda: bool(cluster.watchers))
            cluster.watchers.clear()
            caplog.clear()
            await cluster.stop()
            await until(lambda: "watch_failed" in caplog.text)
            assert hosts() == [3, 4]
            await cluster.start(port=cluster.port)
            await until(lambda: bool(cluster.watchers))
            await cluster.tell("DELETED", cluster.pods.pop("b"))
            await until(lambda: hosts() == [4])
            assert (await client.complete("base")).status == 200

    with caplog.at_level(logging.INFO):
        run(test)


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
TROUBLES = {
    "refused": b"HTTP/1.1 403 X\r\ncontent-length: 28\r\n\r\n" + b'{"kind":"Status","code":403}',
    "overloaded": b"HTTP/1.1 429 X\r\ncontent-length: 22\r\n\r\n" + b"Too many, later please",
    "gone": HEAD + b'38\r\n{"type":"ERROR","object":{"kind":"Status","code": 410}}\n\r\n',
    "unreadable": HEAD + b"5\r\noops\n\r\n",
    "endless": HEAD + b"ffff\r\n" + b"x" * 4096,
    "over at once": HEAD + b"0\r\n\r\n",
}


@dataclass
class TroubledCluster(FakeCluster):
    """Answers each watch with ``trouble``, changes its pods meanwhile and leaves the connection open."""

    trouble: bytes = b""
    num_watches: int = 0

    async def _answer(self, call: Call) -> None:
        if "watch=true" not in call.path:
            await super()._answer(call)
            return
        self.num_watches += 1
        self.set("a", f"127.0.1.{self.num_watches}")
        await call.write(self.trouble)
        await asyncio.Event().wait()


class NoJitter(Random):
    def uniform(self, a: float, b: float) -> float:
        return 0.0


def waits(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line.rpartition("again_s=")[2] for line in caplog.messages if "watch_failed" in line]


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_watch_in_trouble_is_given_up_at_once_and_tried_ever_more_rarely(
    trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("manylora.route.fleet.kubernetes.MAX_LINE_BYTES", 1000)
    (tmp_path / "token").write_text("one")
    told: list[list[str]] = []

    async def test() -> None:
        cluster = TroubledCluster(trouble=TROUBLES[trouble])
        cluster.set("a", "127.0.1.0")
        async with servers(cluster) as (api,):
            watched = Cluster(api, str(tmp_path), again_s=60.0, rng=NoJitter())
            pods = Pods("ns", "app=vllm", 80)
            watching = asyncio.create_task(watched.watch(pods, lambda ips: told.append([one.host for one in ips])))
            await until(lambda: len(waits(caplog)) > 3 and cluster.num_watches > 3)
            watching.cancel()

    run(test)
    assert waits(caplog)[:4] == ["0.5", "1.0", "2.0", "4.0"]
    if trouble != "over at once":  # the others may have missed events
        assert told[:4] == [[f"127.0.1.{number}"] for number in range(4)]


def test_a_list_without_pods_may_be_null(tmp_path: Path) -> None:
    class EmptyCluster(FakeCluster):
        async def _answer(self, call: Call) -> None:
            if "watch=true" in call.path:
                await super()._answer(call)
            else:
                await call.answer(200, {"metadata": {"resourceVersion": "1"}, "items": None})

    (tmp_path / "token").write_text("one")
    told: list[list[str]] = []

    async def test() -> None:
        cluster = EmptyCluster()
        async with servers(cluster) as (api,):
            watched, pods = Cluster(api, str(tmp_path), again_s=60.0, rng=NoJitter()), Pods("ns", "app=vllm", 80)
            watching = asyncio.create_task(watched.watch(pods, lambda ips: told.append([one.host for one in ips])))
            await until(lambda: bool(cluster.watchers))
            await cluster.tell("ADDED", cluster.set("a", "127.0.1.0"))
            await until(lambda: told == [[], ["127.0.1.0"]])
            watching.cancel()

    run(test)


def test_a_pool_is_read_in_the_version_that_the_account_may_read(tmp_path: Path) -> None:
    class OldCluster(FakeCluster):
        async def _answer(self, call: Call) -> None:
            if call.path == "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/ns/inferencepools/llama":
                await call.answer(200, {"spec": {"selector": {"app": "vllm"}, "targetPortNumber": 80}})
            elif call.path.startswith("/apis/"):
                await call.answer(403, {"code": 403})
            else:
                await super()._answer(call)

    (tmp_path / "token").write_text("one")
    told: list[list[str]] = []

    async def test() -> None:
        cluster = OldCluster()
        cluster.set("a", "fd00::1")
        async with servers(cluster) as (api,):
            watched, pods = Cluster(api, str(tmp_path), again_s=60.0, rng=NoJitter()), Pods("ns", pool="llama")
            watching = asyncio.create_task(watched.watch(pods, lambda ips: told.append([one.url for one in ips])))
            await until(lambda: told == [["http://[fd00::1]:80"]])
            watching.cancel()

    run(test)


def test_a_watch_that_lasted_is_begun_again_soon_whatever_ended_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("manylora.route.fleet.kubernetes.WELL_S", 0.0)
    (tmp_path / "token").write_text("one")

    async def test() -> None:
        cluster = FakeCluster()
        cluster.set("a", "127.0.1.0")
        async with servers(cluster) as (api,):
            watched = Cluster(api, str(tmp_path), again_s=60.0, rng=NoJitter())
            watching = asyncio.create_task(watched.watch(Pods("ns", "app=vllm", 80), lambda ips: None))
            for _ in range(3):
                await until(lambda: bool(cluster.watchers))
                cluster.watchers.pop().writer.transport.abort()
            await until(lambda: len(waits(caplog)) == 3)
            watching.cancel()

    run(test)
    assert waits(caplog) == ["0.5"] * 3


def test_a_backend_of_a_replaced_source_stays_while_the_new_one_is_looked_up() -> None:
    """Its source gets a key: other backends come and go meanwhile."""

    async def test() -> None:
        is_known = asyncio.Event()
        is_known.set()
        seen: list[dict[str, str]] = []

        async def look_up(name: str, port: int) -> set[str]:
            await is_known.wait()
            return {"10.0.0.1"}

        def note(found: Mapping[str, Address]) -> None:
            seen.append({url: address.key_from for url, address in found.items()})

        sources = Sources(60.0, look_up, watch_nothing, note, {"KEY": "secret"})
        await sources.configure(["dns:vllm:8000"])
        is_known.clear()
        configuring = asyncio.create_task(sources.configure(["dns:vllm:8000#env:KEY"]))
        await asyncio.sleep(0)
        sources.add("http://other:80")
        assert seen[-1] == {"http://10.0.0.1:8000": "", "http://other:80": ""}
        is_known.set()
        await configuring
        assert seen[-1] == {"http://10.0.0.1:8000": "key:secret", "http://other:80": ""}
        await sources.stop()

    asyncio.run(test())


@pytest.mark.parametrize("is_soon", [True, False])
def test_a_pod_that_was_removed_stays_out_also_when_it_was_not_ready_meanwhile(
    is_soon: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its address may be another pod's a good while later."""
    now = 0.0
    monkeypatch.setattr("manylora.route.fleet.sources.monotonic", lambda: now)

    async def test() -> None:
        nonlocal now
        one, other = parse_backend("http://10.0.0.1:80"), parse_backend("http://10.0.0.2:80")
        updates: list[Callable[[Iterable[Address]], None]] = []
        seen: list[set[str]] = []

        async def watch(pods: Pods, update: Callable[[Iterable[Address]], None]) -> None:
            updates.append(update)
            update([one, other])

        sources = Sources(60.0, resolve, watch, lambda found: seen.append(set(found)), {})
        await sources.configure(["pods:ns/app=vllm:80"])
        now = 1.0
        assert sources.remove(one.url) and not sources.remove("http://10.0.0.3:80")
        for _ in range(2):
            for ready in ([other], [], [one], [one, other]):
                updates[0](ready)
                assert one.url not in seen[-1]
        updates[0]([other])
        now += 500.0 if is_soon else 700.0
        updates[0]([one, other])
        assert (one.url in seen[-1]) is not is_soon
        sources.add(one.url)
        assert seen[-1] == {one.url, other.url}
        await sources.stop()

    asyncio.run(test())


class Worker:
    """The sources of one worker of three, and what is on its way from it to the others, in order."""

    def __init__(self) -> None:
        self.urls: set[str] = set()
        self.under_way: dict[int, list[Said | Listed]] = {}
        self.sources = Sources(60.0, resolve, watch_nothing, self.update, {}, self)  # type: ignore[arg-type]

    def update(self, found: Mapping[str, Address]) -> None:
        self.urls = {f"{url} {address.key_from}" for url, address in found.items()}

    def tell(self, said: Said) -> None:
        for messages in self.under_way.values():
            messages.append(said)


async def watch_nothing(pods: Pods, update: Callable[[Iterable[Address]], None]) -> None:
    """No test here has pods."""


ACTS = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "hear", "hear", "hear", "meet", "fresh"]), st.integers(0, 99))
)


@settings(max_examples=300, deadline=None)
@given(ACTS)
def test_workers_that_are_told_different_things_at_once_end_with_the_same(acts: list[tuple[str, int]]) -> None:
    """Whatever the order in which they hear of each other, and who begins anew or loses a connection meanwhile."""

    async def test() -> None:
        workers = [Worker() for _ in range(3)]

        def meet(one: int, other: int) -> None:
            workers[one].under_way[other] = [workers[one].sources.listed()]

        for one, other in itertools.permutations(range(3), 2):
            meet(one, other)

        def hear(one: int, other: int) -> None:
            if messages := workers[one].under_way[other]:
                message, heard = messages.pop(0), workers[other].sources
                heard.heed(message) if isinstance(message, Said) else heard.adopt(message)

        last: dict[str, str | None] = {}
        for kind, value in acts:
            one, other = list(itertools.permutations(range(3), 2))[value % 6]
            url = f"http://gpu{value // 6 % 3}:80"
            if kind == "add":
                workers[one].sources.add(url, f"k{value}")
                last[url] = f"{url} key:k{value}"
            elif kind == "remove" and workers[one].sources.remove(url):
                last[url] = None
            elif kind == "hear":
                hear(one, other)
            elif kind == "meet":
                meet(one, other)
            elif kind == "fresh" and not any(workers[one].under_way.values()):  # else what it said is lost with it
                workers[one] = Worker()
                for peer in {0, 1, 2} - {one}:
                    meet(one, peer)
                    meet(peer, one)
        while any(any(worker.under_way.values()) for worker in workers):
            for one, other in itertools.permutations(range(3), 2):
                hear(one, other)
        assert [worker.urls for worker in workers] == [set(filter(None, last.values()))] * 3

    asyncio.run(test())


def test_a_client_that_leaves_while_it_sends_a_backend_is_no_bug(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[dict[str, Any]] = []

    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    async def test() -> None:
        async with servers(FakeServer()) as (url,), routing(url, admin_key="admin") as (proxy, _):
            scope = {"type": "http", "method": "POST", "path": "/backends", "scheme": "http", "query_string": b""}
            headers = [(b"authorization", b"Bearer admin"), (b"content-length", b"100")]
            await proxy._app({**scope, "headers": headers, "client": ("127.0.0.1", 1)}, gone, send)

    run(test)
    assert sent[0]["status"] == 400 and "bug" not in caplog.text
