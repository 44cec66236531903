"""One address for the applications of several backbones."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from manylora.functions.agent.app import Dispatch
from manylora.serving.http.auth import Gate
from manylora.serving.http.errors import HttpError
from manylora.serving.http.room import BodyRoom


def test_one_address_serves_several_backbones() -> None:
    def app(name: str) -> Starlette:
        async def answer(request: Request) -> JSONResponse:
            return JSONResponse({"by": name, "num_bytes": len(await request.body())})

        async def models(request: Request) -> JSONResponse:
            return JSONResponse({"data": [{"id": name}]})

        return Starlette(
            routes=[
                Route("/v1/models", models),
                Route("/v1/models/{name}", answer),
                Route("/v1/completions", answer, methods=["POST"]),
                Route("/status", answer),
            ]
        )

    known = {("one", ""): "a", ("two", ""): "b"}  # of a caller without a key; of another none

    def backbone_of(model: str, caller: str) -> str | None:
        return known.get((model, caller))

    dispatch = Dispatch({"a": app("a"), "b": app("b")}, backbone_of, gate=Gate(), max_body_bytes=1000)
    keyed = Dispatch({"a": app("a"), "b": app("b")}, backbone_of, gate=Gate(["secret"]), max_body_bytes=1000)

    async def ask() -> None:
        headers = {"Authorization": "Bearer secret"}
        transport = httpx.ASGITransport(keyed)
        async with httpx.AsyncClient(transport=transport, base_url="http://agent", headers=headers) as client:
            for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models/two")):
                answer = await client.request(method, path, json={"model": "two"})
                assert answer.json()["by"] == "a", "a function that is not for a caller is answered as one that is not"
        async with httpx.AsyncClient(transport=httpx.ASGITransport(dispatch), base_url="http://agent") as client:
            for model, backbone in (("one", "a"), ("two", "b"), ("none", "a")):
                answer = (await client.post("/v1/completions", json={"model": model, "prompt": "x"})).json()
                assert (answer["by"], answer["num_bytes"]) == (backbone, len(f'{{"model":"{model}","prompt":"x"}}'))
                assert (await client.get(f"/v1/models/{model}")).json()["by"] == backbone
            broken = (await client.post("/v1/completions", content=b'{"model": "two"' + b" " * 5000)).json()
            assert broken == {"by": "a", "num_bytes": 5015}
            assert [one["id"] for one in (await client.get("/v1/models")).json()["data"]] == ["a", "b"]
            assert (await client.get("/status?backbone=b")).json()["by"] == "b"

    asyncio.run(ask())


def test_one_scrape_has_the_metrics_of_all_backbones() -> None:
    def app(name: str) -> Starlette:
        registry = CollectorRegistry()
        Gauge("manylora_functions", "Functions.", ["state"], registry=registry).labels("awake").set(len(name))
        Counter("vllm:prompt_tokens", "Tokens.", ["model_name"], registry=registry).labels(name).inc(2)
        Histogram("vllm:time_to_first_token_seconds", "Time.", registry=registry, buckets=(1.0,)).observe(0.5)
        Gauge("process_open_fds", "Descriptors.", registry=registry).set(7)
        gate = Gate(["secret"])

        async def metrics(request: Request) -> Response:
            try:
                gate.check_inference(request)
            except HttpError as error:
                return Response(status_code=error.status)
            assert "openmetrics" not in request.headers.get("accept", "")
            return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

        return Starlette(routes=[Route("/metrics", metrics)])

    dispatch = Dispatch({"a": app("a"), "bb": app("bb")}, lambda *asked: None, gate=Gate(), max_body_bytes=1000)

    async def ask() -> str:
        transport = httpx.ASGITransport(dispatch)
        async with httpx.AsyncClient(transport=transport, base_url="http://agent") as client:
            assert (await client.get("/metrics")).status_code == 401
            client.headers["Authorization"] = "Bearer secret"
            accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
            answer = await client.get("/metrics", headers=accept)
            assert answer.headers["content-type"] == CONTENT_TYPE_LATEST
            alone = await client.get("/metrics?backbone=bb", headers={"Accept": ""})
            assert 'manylora_functions{state="awake"} 2.0' in alone.text
            return answer.text

    text = asyncio.run(ask())
    families = list(text_string_to_metric_families(text))
    assert len({one.name for one in families}) == len(families) == len(text.split("# TYPE")) - 1
    found = {(sample.name, *sorted(sample.labels.items())): sample.value for one in families for sample in one.samples}
    assert found["manylora_functions", ("backbone", "a"), ("state", "awake")] == 1
    assert found["manylora_functions", ("backbone", "bb"), ("state", "awake")] == 2
    assert found["vllm:prompt_tokens_total", ("backbone", "bb"), ("model_name", "bb")] == 2
    assert found["vllm:time_to_first_token_seconds_bucket", ("backbone", "a"), ("le", "1.0")] == 1
    assert [value for key, value in found.items() if key[0] == "process_open_fds"] == [7]


def test_bodies_that_stall_before_the_choice_of_a_backbone_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BodyRoom.__init__, "__defaults__", (100_000,))
    statuses: list[int] = []

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def note(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def main() -> None:
        dispatch = Dispatch({"a": answer, "b": answer}, lambda *asked: None, gate=Gate(), max_body_bytes=1_000_000)
        may_end = asyncio.Event()
        parts = iter([b" " * 80_000, b"{}"])

        async def stalled() -> Message:
            part = next(parts)
            if part == b"{}":
                await may_end.wait()
            return {"type": "http.request", "body": part, "more_body": part != b"{}"}

        async def whole() -> Message:
            return {"type": "http.request", "body": b" " * 80_000, "more_body": False}

        scope = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": []}
        first = asyncio.create_task(dispatch(scope, stalled, note))
        await asyncio.sleep(0)
        await dispatch(scope, whole, note)
        may_end.set()
        await first
        await dispatch(scope, whole, note)

        async def unread() -> Message:
            raise AssertionError("the body of a request without a key is read")

        guarded = Dispatch(
            {"a": answer, "b": answer}, lambda *asked: None, gate=Gate(["secret"]), max_body_bytes=1_000_000
        )
        await guarded(scope, unread, note)  # the application refuses it
        with pytest.raises(AssertionError):
            await guarded(scope | {"headers": [(b"authorization", b"Bearer secret")]}, unread, note)

    asyncio.run(main())
    assert statuses == [429, 200, 200, 200]
