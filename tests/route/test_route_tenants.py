"""`manylora route --tenants`: keys and models of tenants, their names on the way to backends, limits and usage."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import logging
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from proxying import Call, FakeServer, recite, routing, run, servers, until
from serving import PATIENCE_S, wait_for

from manylora.route import serve
from manylora.route.config import ProxyConfig
from manylora.route.relay.tenants import PlacedCounts, TenantCall
from manylora.serving.http import listening
from manylora.serving.http.room import CallerRoom
from manylora.serving.metrics.usage import read_usage


def tenants_file(folder: Path) -> str:
    keys = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("acme", "beta")}
    (folder / "tenants.toml").write_text(
        f'[tenants.acme]\nkeys = [{{ sha256 = "{keys["acme"]}" }}]\nmodels = ["base", "a-*"]\nweight = 2.5\n'
        f'[tenants.beta]\nkeys = [{{ sha256 = "{keys["beta"]}" }}]\nmodels = ["b-*"]\nrequests_per_minute = 2\n'
    )
    return str(folder / "tenants.toml")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def answer_with_usage(call: Call) -> None:
    """Answer whole with usage, or stream without."""
    if call.json.get("stream"):
        await recite(call)
    else:
        usage = {"prompt_tokens": 11, "completion_tokens": 5}
        text = '"completion_tokens": 999'
        await call.answer(200, {"model": call.json["model"], "choices": [{"text": text}], "usage": usage})


def test_a_router_tells_tenants_by_their_keys_and_backends_by_name(tmp_path: Path) -> None:
    adapters = {"a-sql": "/secret/a", "b-sql": "/secret/b"}
    vllm = FakeServer(adapters, behave=answer_with_usage)
    own = FakeServer({"b-own": "/secret/own"}, base="other", owner="manylora")
    options = {
        "tenants": tenants_file(tmp_path),
        "usage": str(tmp_path / "usage.db"),
        "router_key": "inner",
        "backend_key": "polls",
    }

    async def scenario() -> None:
        async with servers(vllm, own) as urls, routing(*urls, admin_key="root", **options) as (_, client):
            # Keys.
            assert (await client.complete("a-sql")).status == 401
            for path in ("/metrics", "/status", "/v1/load_lora_adapter"):
                method = "POST" if path.endswith("adapter") else "GET"
                assert (await client.ask(method, path, **bearer("acme"))).status == 403
                assert (await client.ask(method, path)).status == 401
            assert (await client.ask("GET", "/metrics", **bearer("root"))).status == 200
            # Models: what a tenant may not call is as what does not exist, also behind the base's name.
            texts = set()
            for name in ("b-sql", "b-none", "base:b-sql", "base:b-none", "other"):
                refused = await client.complete(name, **bearer("acme"))
                assert refused.status == 404
                texts.add(refused.body.replace(name.encode(), b"?"))
                got = await client.ask("GET", f"/v1/models/{name}", **bearer("acme"))
                assert got.status == 404
            assert len(texts) == 1
            listed = await client.ask("GET", "/v1/models", **bearer("acme"))
            assert [one["id"] for one in listed.json["data"]] == ["base", "a-sql"]
            assert b"/secret" not in listed.body and b"/m" not in listed.body
            assert len((await client.ask("GET", "/v1/models", **bearer("root"))).json["data"]) == 5
            # The way to backends: the tenant by name, no key of its own, and no name that a client gives.
            whole = await client.complete("a-sql", **bearer("acme"), x_manylora_tenant="beta;1")
            assert whole.status == 200
            (call,) = vllm.completions
            assert call.headers["x-manylora-tenant"] == "acme;2.5" and call.headers["authorization"] == "Bearer inner"
            assert call.json["cache_salt"] == "acme " and call.json["prompt"] == "hello"
            body = b'{"model":"b-sql","prompt":"x","cache_salt":"y","model":"a-sql"}'
            assert (await client.ask("POST", "/v1/completions", body, **bearer("acme"))).status == 200
            sent = vllm.completions[-1]
            assert sent.json["cache_salt"] == "acme y" and sent.body.count(b'"model"') == 1
            for salt in (b'"\xff"', b"1e999"):
                body = b'{"model":"a-sql","prompt":"x","cache_salt":' + salt + b"}"
                assert (await client.ask("POST", "/v1/completions", body, **bearer("acme"))).status == 400
            # Limits.
            streamed = await client.complete("b-own", stream=True, **bearer("beta"))
            assert streamed.headers["x-ratelimit-remaining-requests"] == "1"
            assert "cache_salt" not in own.completions[0].json
            assert (await client.complete("b-sql", **bearer("beta"))).status == 200
            refused = await client.complete("b-sql", **bearer("beta"))
            assert refused.status == 429 and int(refused.headers["retry-after"]) > 20
            assert (await client.complete("a-sql", **bearer("acme"))).status == 200

    run(scenario)
    usage = {row[:2]: row[2:] for row in read_usage(tmp_path / "usage.db", ("tenant", "adapter"))}
    assert usage == {
        ("acme", "a-sql"): (3, 33, 0, 15, 0.0),
        ("beta", "b-own"): (1, 1, 0, 3, 0.0),  # by the events of the stream
        ("beta", "b-sql"): (1, 11, 0, 5, 0.0),
    }


@pytest.mark.parametrize(("model", "patterns"), [("base:base:secret", ["base*"]), ("base:x", ["x"]), (None, ["none"])])
def test_the_name_that_a_tenant_may_call_is_the_name_that_answers(
    tmp_path: Path, model: str | None, patterns: list[str]
) -> None:
    digest = hashlib.sha256(b"acme").hexdigest()
    (tmp_path / "tenants.toml").write_text(
        f'[tenants.acme]\nkeys = [{{ sha256 = "{digest}" }}]\nmodels = {json.dumps(patterns)}\n'
    )
    fake = FakeServer({"secret": "/secret", "base:x": "/x"})

    async def scenario() -> None:
        async with servers(fake) as urls, routing(*urls, tenants=str(tmp_path / "tenants.toml")) as (proxy, client):
            if model is None:  # it is known only once the lists are read anew
                (backend,) = proxy.backends
                backend.models_body, backend.models_read_at = b"", -float("inf")
                proxy.backends.catalog.update(backend, {}, {})
            body = {"prompt": "hello"} if model is None else {"model": model, "prompt": "hello"}
            assert (await client.ask("POST", "/v1/completions", body, **bearer("acme"))).status == 404
            assert not fake.completions

    run(scenario)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_tokens_are_counted_whatever_the_pieces(size: int) -> None:
    text = json.dumps({"text": '"output_tokens": 9'})
    answer = f'data: {text}\n\ndata: {{"usage":{{"input_tokens":17,"output_tokens": 1234}}}}\n\ndata: [DONE]\n\n'
    room = CallerRoom(4, lambda: 1)
    call = TenantCall("a", "", room.take("a", 1), None, 0)
    for at in range(0, len(answer), size):
        call.read(answer[at : at + size].encode())
    assert (call.num_prompt_tokens, call.num_output_tokens, call._num_events) == (17, 1234, 2)
    call.close()
    assert not room._callers


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_a_stream_that_is_cut_has_the_tokens_behind_the_count_at_its_begin(size: int) -> None:
    room = CallerRoom(8, lambda: 1)
    call = TenantCall("a", "", room.take("a", 1), None, 0)
    begin = b'event: message_start\ndata: {"message":{"usage":{"input_tokens":17,"output_tokens":0}}}\n\n'
    answer = begin + 50 * b'event: content_block_delta\ndata: {"delta":{"text":"x"}}\n\n'
    for start in range(0, len(answer), size):
        call.read(answer[start : start + size])
    assert (call.num_prompt_tokens, call.num_output_tokens) == (17, 50)
    call.read(b'data: {"usage":{"output_tokens":48}}\n\nevent: message_stop\ndata: {"type":"message_stop"}\n\n')
    assert call.num_output_tokens == 48
    call.close()


FORGED = {"usage": {"input_tokens": 1, "output_tokens": 2, "text": '\\" }' + 70 * "\\"}}
TOOLS = [{"parameters": {**FORGED, "response": FORGED}}]
REPEATED = {
    "tools": TOOLS,
    "user": "usage",
    "usage": {"input_tokens": 1234, "input_tokens_details": {"cached_tokens": 3}, "output_tokens": 56},
    "input_messages": TOOLS,
}


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_counts_that_a_request_names_are_not_those_of_its_answer(size: int) -> None:
    begin = f'event: response.created\ndata: {{"response":{json.dumps({"tools": TOOLS})}}}\n\n'
    begin += 3 * 'event: response.output_text.delta\ndata: {"delta":"{"}\n\n'
    end = f'event: response.completed\ndata: {{"response":{json.dumps(REPEATED)}}}\n\n'
    room = CallerRoom(4, lambda: 1)
    call = TenantCall("a", "", room.take("a", 1), None, 1000, placed=PlacedCounts())
    for text, counts in ((begin, (1000, 4)), (end, (1234, 56))):
        for at in range(0, len(text), size):
            call.read(text[at : at + size].encode())
        assert (call.num_prompt_tokens, call.num_output_tokens) == counts


def test_the_ledger_has_the_counts_of_answers_that_repeat_their_request(tmp_path: Path) -> None:
    async def repeat(call: Call) -> None:
        await call.answer(200, REPEATED)

    async def scenario() -> None:
        options = {"tenants": tenants_file(tmp_path), "usage": str(tmp_path / "usage.db")}
        async with servers(FakeServer(behave=repeat)) as urls, routing(*urls, **options) as (_, client):
            body = {"model": "base", "input": "x"}
            assert (await client.ask("POST", "/v1/responses", body, **bearer("acme"))).json == REPEATED

    run(scenario)
    ((_, _, num_prompt, _, num_output, _),) = read_usage(tmp_path / "usage.db", ("tenant",))
    assert (num_prompt, num_output) == (1234, 56)


def test_a_tenant_cannot_hide_its_tokens_by_compression(tmp_path: Path) -> None:
    async def compress(call: Call) -> None:
        body = json.dumps({"usage": {"prompt_tokens": 3, "completion_tokens": 700}}).encode()
        if "gzip" in call.headers.get("accept-encoding", ""):
            await call.answer(200, gzip.compress(body), content_encoding="gzip")
        else:
            await call.answer(200, body)

    async def scenario() -> None:
        options = {"tenants": tenants_file(tmp_path), "usage": str(tmp_path / "usage.db")}
        async with servers(FakeServer(behave=compress)) as urls, routing(*urls, **options) as (_, client):
            answer = await client.complete("base", **bearer("acme"), **{"accept-encoding": "gzip"})
            assert json.loads(answer.body)["usage"]["completion_tokens"] == 700

    run(scenario)
    ((_, _, num_prompt, _, num_output, _),) = read_usage(tmp_path / "usage.db", ("tenant",))
    assert (num_prompt, num_output) == (3, 700)


def test_a_tenant_that_leaves_within_a_whole_answer_has_used_its_tokens(tmp_path: Path) -> None:
    whole = {"choices": [{"text": "x" * 100_000}], "usage": {"prompt_tokens": 3, "completion_tokens": 700}}
    body, has_left, is_sent = json.dumps(whole).encode(), asyncio.Event(), asyncio.Event()

    async def answer_slowly(call: Call) -> None:
        await call.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
        await call.write(b"content-length: %d\r\n\r\n" % len(body) + body[:1000])
        await has_left.wait()
        await call.write(body[1000:])
        is_sent.set()

    async def scenario() -> None:
        options = {"tenants": tenants_file(tmp_path), "usage": str(tmp_path / "usage.db")}
        async with servers(FakeServer(behave=answer_slowly)) as urls, routing(*urls, **options) as (proxy, client):
            asked = {"model": "base", "prompt": "hi"}
            reader, writer = await client.open("POST", "/v1/completions", asked, **bearer("acme"))
            await reader.readuntil(b"xxx")
            writer.transport.abort()
            assert proxy._http is not None
            await until(lambda: not proxy._http.server_state.connections)
            has_left.set()
            async with asyncio.timeout(PATIENCE_S):
                await is_sent.wait()

    run(scenario)
    ((_, _, num_prompt, _, num_output, _),) = read_usage(tmp_path / "usage.db", ("tenant",))
    assert (num_prompt, num_output) == (3, 700)


def test_a_hangup_reads_both_options_and_tenants_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO)
    config = ProxyConfig(backends=("http://127.0.0.1:9",), port=0, tenants=tenants_file(tmp_path), router_key="inner")
    read, is_ready = list[ProxyConfig](), threading.Event()
    monkeypatch.setattr(listening, "SWITCH_S", sys.getswitchinterval())
    monkeypatch.setattr(serve, "print", lambda *words, flush: is_ready.set(), raising=False)

    def reread() -> ProxyConfig:
        read.append(config)
        return config

    def signal_it() -> None:
        is_ready.wait()
        try:
            os.kill(os.getpid(), signal.SIGHUP)
            wait_for(lambda: "tenants_read" in caplog.text)
            num_read = len(read)
            os.kill(os.getpid(), signal.SIGHUP)
            wait_for(lambda: len(read) > num_read)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    with ThreadPoolExecutor(1) as signals:
        signalling = signals.submit(signal_it)
        assert serve.run(config, file=str(tmp_path / "route.toml"), read=reread) == 0
        signalling.result()
