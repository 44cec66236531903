"""`manylora route` and the adapters of its fleet: backends that come, go and fail meanwhile, and bounds."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from proxying import Call, Client, FakeServer, names, routing, run, servers, until

from manylora.route.fleet import changes


async def be_ill(call: Call) -> None:
    await call.answer(500, "")


async def load(client: Client, name: str, path: str, **more: Any) -> int:
    body = {"lora_name": name, "lora_path": path, **more}
    return (await client.ask("POST", "/v1/load_lora_adapter", body)).status


async def unload(client: Client, name: str) -> int:
    return (await client.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})).status


def test_a_backend_that_was_away_makes_the_changes_that_it_missed() -> None:
    async def test() -> None:
        fakes = FakeServer(), FakeServer()
        async with servers(*fakes) as urls, routing(*urls, manage_adapters=True) as (proxy, client):
            for name in ("kept", "replaced", "rewritten", "gone"):
                assert await load(client, name, f"/{name}") == 200
            num_before = len(fakes[1].changes)
            fakes[1].poll = be_ill
            await until(lambda: proxy.backends.num_up == 1)
            assert await load(client, "replaced", "/2", load_inplace=True) == 200
            assert await load(client, "rewritten", "/rewritten", load_inplace=True) == 200  # other weights at its path
            assert await unload(client, "gone") == 200
            fakes[1].poll = None
            await until(lambda: proxy.backends.num_up == 2)
            changes = {("replaced", "/2"), ("rewritten", "/rewritten"), ("gone", None)}
            assert set(fakes[1].changes[num_before:]) == changes
            book = {"kept": "/kept", "replaced": "/2", "rewritten": "/rewritten"}
            assert [fake.adapters for fake in fakes] == [book, book]

            await fakes[1].stop()
            await until(lambda: proxy.backends.num_up == 1)
            late = FakeServer({"kept": "/own", "gone": "/own"})  # restarted, with adapters of its command line
            await late.start(port=fakes[1].port)
            await until(lambda: proxy.backends.num_up == 2)
            assert late.adapters == book
            await late.stop()

    run(test)


@pytest.mark.parametrize("status", [404, 500, None])
def test_an_adapter_that_cannot_be_loaded_keeps_no_backend_out(status: int | None) -> None:
    async def test() -> None:
        fakes, late = (FakeServer(), FakeServer()), FakeServer()

        async def fail(call: Call) -> None:
            if call.json["lora_name"] != "bad":
                await late.change_adapters(call)
            elif status is None:
                call.writer.transport.abort()
            else:
                await call.answer(status, "no")

        options = {"manage_adapters": True, "router": "random"}
        async with servers(*fakes) as urls, routing(*urls, **options) as (proxy, client):
            for name in ("good", "bad"):
                assert await load(client, name, f"/{name}") == 200
            await fakes[1].stop()
            await until(lambda: proxy.backends.num_up == 1)
            late.change = fail
            await late.start(port=fakes[1].port)
            await until(lambda: proxy.backends.num_up == 2)
            assert late.adapters == {"good": "/good"}
            answers = [await client.complete(name) for name in ["good", "bad"] * 12]
            assert {answer.status for answer in answers} == {200}
            assert {call.json["model"] for call in late.completions} == {"good"}
            await late.stop()

    run(test)


def test_a_backend_that_keeps_an_old_version_gets_no_request_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        fakes = FakeServer(), FakeServer()

        async def fail(call: Call) -> None:
            await call.answer(500, "no")

        options = {"manage_adapters": True, "router": "random"}
        async with servers(*fakes) as urls, routing(*urls, **options) as (proxy, client):
            assert await load(client, "sql", "/1") == 200
            fakes[1].change = fail
            body = {"lora_name": "sql", "lora_path": "/2", "load_inplace": True}
            answer = await client.ask("POST", "/v1/load_lora_adapter", body)
            assert (answer.status, urls[0] in answer.body.decode(), urls[1] in answer.body.decode()) == (
                500,
                False,
                True,
            )
            for _ in range(2):  # while it is up, and when it was away
                assert fakes[1].adapters == {"sql": "/1"}
                for _ in range(12):
                    assert (await client.complete("sql")).status == 200
                assert not fakes[1].completions
                status = (await client.ask("GET", "/status")).json
                assert [row["adapters_left_out"] for row in status["backends"]] == [0, 1]
                fakes[1].poll = be_ill
                await until(lambda: proxy.backends.num_up == 1)
                fakes[1].poll = None
                await until(lambda: proxy.backends.num_up == 2)
            fakes[1].change = None
            monkeypatch.setattr(changes, "AGAIN_S", 0.0)  # it is tried again
            await until(lambda: fakes[1].adapters == {"sql": "/2"})
            while not fakes[1].completions:
                assert (await client.complete("sql")).status == 200

    run(test)


def test_a_backend_that_comes_up_during_a_load_gets_the_adapter() -> None:
    async def test() -> None:
        can_load = asyncio.Event()
        first, second = FakeServer(), FakeServer(poll=be_ill)

        async def wait(call: Call) -> None:
            await can_load.wait()
            await first.change_adapters(call)

        first.change = wait
        async with servers(first, second) as urls, routing(*urls, manage_adapters=True) as (proxy, client):
            loading = asyncio.create_task(load(client, "sql", "/sql"))
            await until(lambda: len(first.changes) == 1)
            second.poll = None
            await until(lambda: proxy.backends.num_up == 2)
            can_load.set()
            assert await loading == 200
            assert first.adapters == second.adapters == {"sql": "/sql"}

    run(test)


@pytest.mark.parametrize("own", [{}, {"kept": "/own"}], ids=["none", "its own"])
def test_a_backend_that_restarts_between_two_polls_gets_its_adapters_back(own: dict[str, str]) -> None:
    """Its counters begin anew, or its list has an adapter from another path: it was never out."""

    def counted(num: int) -> str:
        return f'# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total{{engine="0"}} {num}.0\n'

    async def test() -> None:
        fakes = FakeServer(), FakeServer(metrics=counted(100))
        options = {"manage_adapters": True, "router": "random"}
        async with servers(*fakes) as urls, routing(*urls, **options) as (proxy, client):
            assert await load(client, "kept", "/kept") == 200
            assert await load(client, "gone", "/gone") == 200
            assert await unload(client, "gone") == 200
            (backend,) = [one for one in proxy.backends if one.url == urls[1]]
            await until(lambda: backend.metrics.num_tokens == 100)
            fakes[1].adapters = dict(own)
            fakes[1].metrics = None if own else counted(0)
            await until(lambda: fakes[1].adapters == {"kept": "/kept"} and not backend.outdated)
            while not fakes[1].completions:
                assert (await client.complete("kept")).status == 200
            assert (backend.health.num_joins, proxy.backends.num_up) == (1, 2)

    run(test)


def test_an_unload_that_was_made_although_it_failed_leaves_nothing_out() -> None:
    async def test() -> None:
        fakes = FakeServer(), FakeServer()

        async def fail(call: Call) -> None:
            fakes[1].adapters.clear()
            await call.answer(503, "no")

        async with servers(*fakes) as urls, routing(*urls, manage_adapters=True) as (proxy, client):
            assert await load(client, "sql", "/1") == 200
            fakes[1].change = fail
            assert await unload(client, "sql") == 503
            await until(lambda: not any(backend.outdated for backend in proxy.backends))
            assert [fake.adapters for fake in fakes] == [{}, {}]

    run(test)


def test_placements_at_once_stay_within_their_bound() -> None:
    async def test() -> None:
        can_load = asyncio.Event()
        loads: list[str] = []
        num_loaded = [0]
        adapters = {name: f"/{name}" for name in names(8)}
        holder, empty = FakeServer(dict(adapters)), FakeServer()

        async def change(call: Call) -> None:
            if call.path.endswith("/load_lora_adapter"):
                loads.append(call.json["lora_name"])
                await can_load.wait()
            await empty.change_adapters(call)
            num_loaded.append(len(empty.adapters))

        empty.change = change
        options = {"manage_adapters": True, "max_placed": 2, "router": "first-fit"}
        async with servers(empty, holder) as urls, routing(*urls, **options) as (_, client):
            for name in adapters:
                assert (await client.complete(name)).json["model"] == name
            await until(lambda: len(loads) >= 2)
            assert len(loads) == 2
            can_load.set()
            await until(lambda: len(empty.adapters) == 2)
            for name in adapters:
                assert (await client.complete(name)).json["model"] == name
            await until(lambda: len(num_loaded) > 4)
            assert max(num_loaded) == 2

    run(test)


def test_an_adapter_that_cannot_be_unloaded_keeps_its_place() -> None:
    async def test() -> None:
        adapters = {name: f"/{name}" for name in names(3)}
        holder, empty = FakeServer(dict(adapters)), FakeServer()

        async def change(call: Call) -> None:
            if call.path.endswith("/unload_lora_adapter"):
                await call.answer(500, "no")
            else:
                await empty.change_adapters(call)

        empty.change = change
        options = {"manage_adapters": True, "max_placed": 1, "router": "first-fit"}
        async with servers(empty, holder) as urls, routing(*urls, **options) as (_, client):
            for num_unloads, name in enumerate(adapters):
                while empty.changes.count(("a0", None)) < num_unloads or not empty.adapters:
                    assert (await client.complete(name)).json["model"] == name
            assert [path for _, path in empty.changes if path is not None] == ["/a0"]

    run(test)
