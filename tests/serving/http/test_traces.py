"""Traces of OpenTelemetry: one from the client's span over the router and the server to the engine's parts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from proxying import routing, run
from reciter import engine_config
from serving import wait_for

from manylora.core.config import ServerConfig
from manylora.core.errors import ConfigError
from manylora.core.server_config import TraceConfig, WebConfig
from manylora.serving.http import traces
from manylora.serving.server import BackgroundServer, LoraModule

export = pytest.importorskip("opentelemetry.sdk.trace.export", reason="needs the extra otel")
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

TRACE_ID, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
COLLECTOR = TraceConfig(otlp_traces_endpoint="http://127.0.0.1:1")


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The spans of all servers and routers, which the exporter keeps in memory."""
    exporter = memory.InMemorySpanExporter()
    monkeypatch.setattr(export, "BatchSpanProcessor", lambda _: export.SimpleSpanProcessor(exporter))
    yield exporter


def test_a_trace_goes_from_the_client_over_the_router_to_the_engine(
    tokenizer: Path, lora_dir: Path, spans: Any
) -> None:
    config = ServerConfig(port=0, in_process=True, web=WebConfig(traces=COLLECTOR))
    modules = [LoraModule(name, str(lora_dir / name)) for name in "mn"]
    body = {"prompt": ["say", "more"], "max_tokens": 3, "n": 2, "temperature": 0.5}
    sampled = {"traceparent": f"00-{TRACE_ID}-{CALLER}-01", "tracestate": "vendor=1"}

    async def ask(url: str, model: str, headers: dict[str, str]) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            asked = {**body, "model": model}
            assert (await http.post("/v1/completions", json=asked, headers=headers)).status_code == 200
            assert (await http.get("/health")).status_code == 200

    with BackgroundServer(engine_config(tokenizer), config, modules, builder="reciter:reciter_parts") as server:

        async def test() -> None:
            async with routing(server.url, traces=COLLECTOR) as (proxy, _):
                await ask(proxy.url, "n", {"traceparent": f"00-{TRACE_ID}-{CALLER}-00"})  # not sampled
                await ask(proxy.url, "m", sampled)

        run(test)
        wait_for(lambda: len(spans.get_finished_spans()) >= 21)
    made = spans.get_finished_spans()
    assert {f"{one.context.trace_id:032x}" for one in made} == {TRACE_ID}
    by_id = {one.context.span_id: one for one in made}
    paths = [path_of(one, by_id) for one in made]
    route = "POST /v1/completions"
    engine = f"{route}/relay/{route}/llm_request"
    expected = {route: 1, f"{route}/choice": 1, f"{route}/relay": 1, f"{route}/relay/{route}": 1}
    expected |= {f"{route}/relay/{route}/parse": 1, engine: 4}
    expected |= {f"{engine}/{name}": 4 for name in ("queue", "prefill", "decode")}
    found = {path: paths.count(path) for path in paths}
    num_loads = found.pop(f"{engine}/queue/load")
    assert 1 <= num_loads <= 4  # the requests that met a cold adapter
    assert found == expected
    (root,) = [one for one in made if one.name == route and one.parent.span_id == int(CALLER, 16)]
    assert root.resource.attributes["service.name"] == "manylora-route"
    assert root.attributes["http.response.status_code"] == 200
    for one in made:
        if one.parent.span_id in by_id:
            parent = by_id[one.parent.span_id]
            assert one.start_time <= one.end_time
            if one.name in ("queue", "prefill", "decode", "load"):
                assert parent.start_time <= one.start_time
                assert one.end_time <= parent.end_time + 10  # rounded to nanoseconds
    (first, *_) = (one for one in made if one.name == "llm_request")
    assert first.resource.attributes["service.name"] == "manylora"
    wanted = {
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m",
        "gen_ai.request.n": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.usage.completion_tokens": 3,
        "gen_ai.response.finish_reasons": ("length",),
    }
    assert wanted.items() <= dict(first.attributes).items()
    parts = [first.attributes[f"gen_ai.latency.{name}"] for name in ("time_to_first_token", "time_in_model_decode")]
    assert sum(parts) == pytest.approx(first.attributes["gen_ai.latency.e2e"])
    assert not any("say" in json.dumps(dict(one.attributes), default=str) for one in made)


def path_of(span: Any, by_id: dict[int, Any]) -> str:
    parent = by_id.get(span.parent.span_id)
    return span.name if parent is None else f"{path_of(parent, by_id)}/{span.name}"


def test_traces_need_a_url_and_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="http://collector:4317"):
        TraceConfig(otlp_traces_endpoint="collector:4317")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"manylora\[otel\]"):
        traces.sent_traces(TraceConfig(otlp_traces_endpoint="http://127.0.0.1:1/v1/traces"), "x")
