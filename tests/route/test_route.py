"""`manylora route` over fake servers: models, choice, adapters, keys, and answers that pass byte by byte."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from pathlib import Path
from random import Random
from typing import Any

import pytest
from proxying import Behaviour, Call, FakeServer, names, recite, routing, run, servers, until

from manylora.route.serve import Proxy
from manylora.route.upstream.address import Address

ADAPTERS = {name: f"/adapters/{name}" for name in names(12)}


def test_models_are_the_union_and_an_unknown_one_is_a_404_as_of_openai() -> None:
    async def test() -> None:
        fakes = FakeServer({"a": "/a", "both": "/b"}), FakeServer({"both": "/b", "z": "/z"})
        async with servers(*fakes) as urls, routing(*urls) as (_, client):
            listed = (await client.ask("GET", "/v1/models")).json
            assert [card["id"] for card in listed["data"]] == ["base", "a", "both", "z"]
            assert listed["data"][1]["parent"] == "base"
            assert (await client.ask("GET", "/v1/models/z")).json["root"] == "/z"
            for model, fake in (("a", fakes[0]), ("z", fakes[1]), ("base:z", fakes[1])):
                assert (await client.complete(model)).status == 200
                assert fake.completions[-1].json["model"] == model.removeprefix("base:")
            unknown = await client.complete("b")
            assert (unknown.status, unknown.json["error"]["type"]) == (404, "NotFoundError")
            assert "`b` does not exist" in unknown.json["error"]["message"]
            fakes[0].adapters["b"] = "/late"  # loaded behind the router's back: seen when it is asked for
            answers = [await client.complete("b")]
            while answers[-1].status == 404:
                await asyncio.sleep(0.05)
                answers.append(await client.complete("b"))
            assert answers[-1].json["model"] == "b"

    run(test)


def test_requests_for_an_adapter_stay_together_and_the_base_is_spread() -> None:
    async def test() -> None:
        fakes = [FakeServer(dict(ADAPTERS)) for _ in range(3)]
        async with servers(*fakes) as urls, routing(*urls) as (_, client):
            for name in [*ADAPTERS, *ADAPTERS]:
                assert (await client.complete(name)).status == 200
            homes = [{call.json["model"] for call in fake.completions} for fake in fakes]
            assert sum(map(len, homes)) == len(ADAPTERS)
            assert all(homes)

    run(test)


def test_a_router_that_knows_adapters_waits_for_fewer_loads_than_round_robin() -> None:
    """Three servers that hold four of twelve adapters each, and load another one while its request waits."""
    wanted = [name for _ in range(8) for name in Random(7).sample(sorted(ADAPTERS), len(ADAPTERS))]
    Random(8).shuffle(wanted)

    def holding(num_held: int, loads: list[str]) -> Behaviour:
        held: OrderedDict[str, None] = OrderedDict()

        async def serve(call: Call) -> None:
            name = call.json["model"]
            if name not in held:
                loads.append(name)
                await asyncio.sleep(0.002)
                held[name] = None
            held.move_to_end(name)
            if len(held) > num_held:
                held.popitem(last=False)
            await recite(call)

        return serve

    async def loads_of(router: str) -> int:
        loads: list[str] = []
        fakes = [FakeServer(dict(ADAPTERS), behave=holding(4, loads)) for _ in range(3)]
        async with servers(*fakes) as urls, routing(*urls, router=router) as (_, client):
            for name in wanted:
                assert (await client.complete(name)).status == 200
            assert all(fake.completions for fake in fakes)
        return len(loads)

    async def test() -> None:
        blind = await loads_of(f"{Path(__file__).parents[2]}/examples/round_robin.py:RoundRobin")
        assert await loads_of("affinity") < blind / 2

    run(test)


def test_a_conversation_returns_to_its_server_and_another_caller_s_never_counts_as_cached() -> None:
    system = {"role": "system", "content": "You are a helpful assistant. " * 300}

    def turn(number: int, tool: str = "") -> dict[str, Any]:
        talk = [{"role": ("user", "assistant")[one % 2], "content": f"{one}: {'word ' * 200}"} for one in range(number)]
        return {"model": "base", "tools": [tool], "messages": [system, *talk]}

    async def test() -> None:
        fakes = [FakeServer() for _ in range(3)]
        async with servers(*fakes) as urls, routing(*urls) as (proxy, client):

            async def ask(body: dict[str, Any], key: str) -> tuple[int, float]:
                before = [len(fake.completions) for fake in fakes]
                cached = expected(proxy)
                answer = await client.ask("POST", "/v1/chat/completions", body, authorization=f"Bearer {key}")
                assert answer.status == 200
                now = [len(fake.completions) for fake in fakes]
                return next(place for place in range(3) if now[place] > before[place]), expected(proxy) - cached

            home, cached = await ask(turn(1), "mine")
            assert cached == 0
            for number in (3, 5, 7):
                place, cached = await ask(turn(number), "mine")
                assert place == home
                assert cached > 2000 + 500 * (number - 3) / 2
            assert (await ask(turn(9), "other"))[1] == 0
            assert (await ask(turn(9, tool="a"), "mine"))[1] == 0

    run(test)


def expected(proxy: Proxy) -> float:
    """Return the prompt tokens that were expected in prefix caches so far."""
    lines = proxy.metrics.render(proxy.backends).decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("manylora_route_cached_tokens_total{"))


def test_bytes_of_a_body_and_its_headers_pass_unchanged() -> None:
    raw = b'{ "model" : "base",\n "prompt": [1, 2,3], "unknown": {"x": [1e400, "\\u00e9"]}, "stream": true }'
    told: list[Call] = []

    async def odd(call: Call) -> None:
        told.append(call)
        await call.write(b"HTTP/1.1 201 Created\r\nX-Request-Id: 7\r\nConnection: x-secret\r\nX-Secret: 1\r\n")
        await call.write(b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        await call.write(b"3\r\nda\0\r\n1\r\n\xff\r\n0\r\n\r\n")

    async def test() -> None:
        async with servers(FakeServer(behave=odd)) as urls, routing(*urls) as (_, client):
            answer = await client.ask(
                "POST", "/v1/completions?x=1", raw, authorization="Bearer own", te="trailers", x_mine="yes"
            )
            assert (answer.status, answer.body, answer.is_whole) == (201, b"da\0\xff", True)
            assert answer.headers["x-request-id"] == "7"
            assert "x-secret" not in answer.headers
            call = told[0]
            assert (call.body, call.path) == (raw, "/v1/completions?x=1")
            assert (call.headers["authorization"], call.headers["x-mine"]) == ("Bearer own", "yes")
            assert call.headers["x-forwarded-for"] == "127.0.0.1"
            assert not {"te", "connection"} & call.headers.keys()

    run(test)


def test_keys_of_the_router_and_of_its_backends_are_apart() -> None:
    async def test() -> None:
        fake = FakeServer()
        async with servers(fake) as urls:
            async with routing(*urls, api_keys=("mine",), backend_key="theirs") as (_, client):
                assert (await client.complete("base")).status == 401
                assert not fake.completions
                assert (await client.complete("base", authorization="Bearer mine")).status == 200
                assert {call.headers["authorization"] for call in fake.calls} == {"Bearer theirs"}
                assert (await client.ask("GET", "/status")).status == 401
            fake.calls.clear()
            async with routing(*urls, api_keys=("mine",)) as (_, client):
                assert (await client.complete("base", authorization="Bearer mine")).status == 200
                assert all("authorization" not in call.headers for call in fake.calls)

    run(test)


def test_a_tenant_s_key_is_passed_on_and_other_models_do_not_exist_for_it(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"acme").hexdigest()
    (tmp_path / "tenants.toml").write_text(f'[tenants.acme]\nkeys = [{{sha256 = "{digest}"}}]\nmodels = ["a*"]\n')

    async def test() -> None:
        fake = FakeServer(adapters={"a1": "/a1", "b1": "/b1"})
        keys = {"tenants": str(tmp_path / "tenants.toml"), "backend_key": "theirs", "admin_key": "admin"}
        async with servers(fake) as urls, routing(*urls, **keys) as (_, client):
            acme, admin = {"authorization": "Bearer acme"}, {"authorization": "Bearer admin"}
            assert {call.headers["authorization"] for call in fake.calls} == {"Bearer theirs"}
            for model, status in (("a1", 200), ("b1", 404), ("base", 404), ("none", 404)):
                assert (await client.complete(model, **acme)).status == status
                assert (await client.ask("GET", f"/v1/models/{model}", **acme)).status == status
            assert (await client.complete("b1", **admin)).status == 200
            assert [call.headers["authorization"] for call in fake.completions] == ["Bearer acme", "Bearer theirs"]
            listed = (await client.ask("GET", "/v1/models", **acme)).json["data"]
            assert [card["id"] for card in listed] == ["a1"]
            assert (await client.complete("a1")).status == 401

    run(test)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"nonsense", 400),
        (b'{"model": 3}', 400),
        (b'{"model": "base", "prompt": "' + b"x" * 5000 + b'"}', 413),
        (b'{"model": "base", "x": ' + b"[" * 30_000 + b"]" * 30_000 + b"}", 400),
    ],
)
def test_a_wrong_body_goes_nowhere(body: bytes, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manylora.route.relay.relay.MAX_BODY_BYTES", 4096 if status == 413 else 100_000)

    async def test() -> None:
        fake = FakeServer()
        async with servers(fake) as urls, routing(*urls) as (_, client):
            answer = await client.ask("POST", "/v1/completions", body)
            assert answer.status == status
            assert answer.json["error"]["code"] == status
            assert not fake.completions
            assert (await client.ask("POST", "/v1/secret", b"{}")).status == 404
            assert (
                await client.ask("POST", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/x"})
            ).status == 403
            assert [call for call in fake.calls if call.method == "POST"] == []

    run(test)


def test_bodies_that_stall_leave_room_for_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manylora.route.relay.relay.MAX_HELD_BYTES", 200_000)
    long = b'{"model": "base", "prompt": "' + b"x" * 150_000 + b'"}'

    async def test() -> None:
        fake = FakeServer()
        async with servers(fake) as urls, routing(*urls) as (proxy, client):
            host, port = proxy.url.removeprefix("http://").split(":")
            _, stalled = await asyncio.open_connection(host, int(port))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(long)}\r\n\r\n"
            stalled.write(head.encode() + long[:-1])
            await stalled.drain()
            # It sends on while it is refused, and asks to be closed: it may see a reset (0) in place of the answer.
            while (await client.ask("POST", "/v1/completions", long)).status not in (0, 429):
                await asyncio.sleep(0.01)
            assert (await client.complete("base")).status == 200
            stalled.write(long[-1:])
            while (await client.ask("POST", "/v1/completions", long)).status != 200:
                await asyncio.sleep(0.01)
            stalled.close()

    run(test)


def test_sglang_is_told_the_base_with_the_adapter() -> None:
    async def test() -> None:
        fake = FakeServer({"a": "/a"}, owner="sglang", metrics="sglang:num_running_reqs 3.0\n")
        async with servers(fake) as urls, routing(*urls, manage_adapters=True) as (_, client):
            body = {"model": "a", "prompt": "hello", "seed": 2**60, "stop": ["é"]}
            assert (await client.ask("POST", "/v1/completions", body)).status == 200
            assert fake.completions[0].json == {**body, "model": "base:a"}
            assert (await client.complete("base")).status == 200
            assert fake.completions[1].json["model"] == "base"
            load = await client.ask("POST", "/v1/load_lora_adapter", {"lora_name": "b", "lora_path": "/b"})
            assert load.status == 200
            assert next(call for call in fake.calls if "load_lora" in call.path).path == "/load_lora_adapter"

    run(test)


def test_an_adapter_is_loaded_replaced_and_unloaded_on_all_or_the_answer_says_where_not() -> None:
    async def test() -> None:
        fakes = FakeServer(), FakeServer()
        async with servers(*fakes) as urls, routing(*urls, manage_adapters=True) as (proxy, client):

            async def load(**more: Any) -> tuple[int, str]:
                body = {"lora_name": "sql", "lora_path": "/sql", **more}
                answer = await client.ask("POST", "/v1/load_lora_adapter", body)
                return answer.status, answer.body.decode()

            assert await load() == (200, "Success: LoRA adapter 'sql' added successfully.")
            assert all(fake.adapters == {"sql": "/sql"} for fake in fakes)
            assert (await load())[0] == 400
            assert (await load(lora_path="/sql2", load_inplace=True))[0] == 200
            assert all(fake.adapters == {"sql": "/sql2"} for fake in fakes)
            assert (await client.complete("sql")).status == 200
            status, text = await load(lora_name="other", lora_path="/missing")
            assert status == 404
            assert all(url in text for url in urls)
            late = FakeServer()  # a backend that comes back empty gets the book before it gets requests
            await fakes[1].stop()
            await until(lambda: proxy.backends.num_up == 1)
            await late.start(port=fakes[1].port)
            await until(lambda: proxy.backends.num_up == 2)
            assert late.adapters == {"sql": "/sql2"}
            gone = await client.ask("POST", "/v1/unload_lora_adapter", {"lora_name": "sql"})
            assert gone.status == 200
            assert fakes[0].adapters == late.adapters == {}
            assert (await client.ask("DELETE", "/adapters/sql")).status == 404
            await late.stop()

    run(test)


def test_an_adapter_is_placed_where_the_router_wants_it_and_the_oldest_makes_room() -> None:
    async def test() -> None:
        fakes = FakeServer(dict(ADAPTERS)), FakeServer()
        async with servers(*fakes) as urls, routing(*urls, manage_adapters=True, max_placed=2) as (_, client):
            for name in [*ADAPTERS, *ADAPTERS]:  # served by the backend that has it, while the other loads it
                answer = await client.complete(name)
                assert answer.json["model"] == name
            loads = [call.json["lora_name"] for call in fakes[1].calls if call.path == "/v1/load_lora_adapter"]
            await until(lambda: len(fakes[1].adapters) <= 2)
            assert len(loads) > 2
            calls = [call.json for call in fakes[1].calls if call.path == "/v1/load_lora_adapter"]
            assert all(call["lora_path"] == f"/adapters/{call['lora_name']}" for call in calls)

    run(test)


def test_what_others_send_counts_and_the_loaded_backend_is_left_alone() -> None:
    async def test() -> None:
        fakes = FakeServer(running=40, waiting=5), FakeServer()
        async with servers(*fakes) as urls, routing(*urls) as (proxy, client):
            await until(lambda: next(iter(proxy.backends)).view.load == 45)
            for _ in range(4):
                assert (await client.complete("base")).status == 200
            assert [len(fake.completions) for fake in fakes] == [0, 4]
            fakes[0].metrics = "nothing here"
            await until(lambda: next(iter(proxy.backends)).view.load == 0)

    run(test)


def test_addresses_of_a_name_join_and_leave() -> None:
    async def test() -> None:
        first, second = FakeServer(), FakeServer()
        async with servers(first):
            await second.start(host="127.0.0.2", port=first.port)
            found = {"127.0.0.1"}

            async def look_up(name: str, port: int) -> set[str]:
                if not found:
                    raise OSError("no answer")
                return set(found)

            name = f"dns:fleet.example:{first.port}"
            async with routing(name, look_up=look_up, resolve_s=0.02) as (proxy, client):
                assert proxy.backends.num_up == 1
                found.add("127.0.0.2")
                await until(lambda: proxy.backends.num_up == 2)
                for _ in range(6):
                    assert (await client.complete("base")).status == 200
                assert first.completions[0].headers["host"] == f"fleet.example:{first.port}"
                found.remove("127.0.0.1")
                await until(lambda: len(proxy.backends) == 1)
                before = len(first.completions)
                for _ in range(3):
                    assert (await client.complete("base")).status == 200
                assert len(first.completions) == before
                found.clear()  # a resolver that fails takes no backend away
                await asyncio.sleep(0.1)
                assert (await client.complete("base")).status == 200
            await second.stop()

    run(test)


def test_a_name_that_is_given_twice_is_looked_up_once() -> None:
    async def test() -> None:
        async with servers(FakeServer()) as (url,):
            asked: list[str] = []

            async def look_up(name: str, port: int) -> set[str]:
                asked.append(name)
                return {"127.0.0.1"}

            name = f"dns:fleet.example:{url.rpartition(':')[2]}"
            async with routing(name, name, url, look_up=look_up) as (proxy, client):
                assert [backend.url for backend in proxy.backends] == [url]
                assert (await client.complete("base")).status == 200
            assert asked == ["fleet.example"]

    run(test)


def test_state_and_metrics_tell_of_every_backend() -> None:
    async def test() -> None:
        fakes = FakeServer({"a": "/a"}, running=2), FakeServer()
        async with servers(*fakes) as urls, routing(*urls) as (proxy, client):
            for model in ("a", "base", "base"):
                await client.complete(model)
            status = (await client.ask("GET", "/status")).json
            assert [row["url"] for row in status["backends"]] == urls
            assert status["backends"][0]["reported"] == {"num_running": 2, "num_waiting": 0, "kv_usage": 0.25}
            assert {row["state"] for row in status["backends"]} == {"up"}
            reader, page = await client.open("GET", "/ui/events")  # open until the router stops, without delay
            while not (line := await reader.readline()).startswith(b"data: "):
                assert line
            shown = json.loads(line.removeprefix(b"data: "))["route"]
            assert [row["url"] for row in shown["backends"]] == urls and shown["manages_adapters"] is False
            text = (await client.ask("GET", "/metrics")).body.decode()
            assert f'manylora_route_backend_up{{backend="{urls[0]}"}} 1.0' in text
            assert 'manylora_route_adapter_requests_total{backend="' + urls[0] + '",resident="yes"} 1.0' in text
            answered = [line for line in text.splitlines() if "requests_total" in line and 'outcome="answered"' in line]
            assert sum(float(line.split()[-1]) for line in answered) == 3
            health = await client.ask("GET", "/health")
            assert (health.status, health.json["backends"]) == (200, 2)
            for fake in fakes:
                await fake.stop()
            await until(lambda: proxy.backends.num_up == 0)
            assert (await client.ask("GET", "/health")).status == 503
            answer = await client.complete("base")
            assert answer.status == 503
            assert int(answer.headers["retry-after"]) >= 1
        page.close()

    run(test)


def test_the_name_of_an_address() -> None:
    from manylora.core.errors import ConfigError
    from manylora.route.upstream.address import parse_backend

    assert parse_backend("http://h:8000/v1") == Address(host="h", name="h", port=8000)
    assert parse_backend("h:8000").url == "http://h:8000"
    assert parse_backend("https://h/x/").url == "https://h:443/x"
    assert parse_backend("dns+https:h:8443").is_name_of_many
    assert parse_backend("http://[::1]:8000").authority == "[::1]:8000"
    for wrong in ("", "ftp://h", "http://h:0", "http://h\r\nx:1", "http://u:p@h", "http://h?x", "h:99999", "a..b:80"):
        with pytest.raises(ConfigError, match="expected something like"):
            parse_backend(wrong)
