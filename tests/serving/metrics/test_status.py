"""`GET /status`: one call that shows everything, to those who may see it, whatever state the server is in."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from reciter import engine_config
from serving import PATIENCE_S, Gate, wait_for

from manylora.core.config import ServerConfig
from manylora.core.costs.rank_fit import LEAST_STEPS
from manylora.core.engine.adapters.catalog import AdapterCatalog
from manylora.core.engine.core import EngineCore
from manylora.core.engine.status import EngineStats
from manylora.serving.metrics.status_report import StatusReport
from manylora.serving.server import BackgroundServer, LoraModule


def report(http: httpx.Client, **params: int) -> StatusReport:
    answer = http.get("/status", params=params)
    assert answer.status_code == 200, answer.text
    return msgspec.json.decode(answer.content, type=StatusReport)


def complete(http: httpx.Client, model: str, num_tokens: int) -> None:
    answer = http.post("/v1/completions", json={"model": model, "prompt": "four", "max_tokens": num_tokens})
    assert answer.status_code == 200, answer.text


def test_a_report_that_cannot_be_made_is_an_error_of_its_own(
    tokenizer: Path, lora_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is wrong with a read, the engine goes on with its requests."""

    def raise_error(*_: object) -> None:
        raise KeyError("a name that is gone")

    with (
        BackgroundServer(
            engine_config(tokenizer), ServerConfig(port=0, in_process=True), builder="reciter:reciter_parts"
        ) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        for broken in (AdapterCatalog, "in_use"), (AdapterCatalog, "busiest"), (EngineCore, "stats"):
            with monkeypatch.context() as patch:
                patch.setattr(*broken, raise_error)
                answers = [http.get(path) for path in ("/metrics", "/status")]
                assert 500 in (codes := [answer.status_code for answer in answers]) and set(codes) <= {200, 500}
                assert any("a name that is gone" in answer.text for answer in answers)
                complete(http, "base", 3)
        assert caplog.text.count("snapshot_failed") >= 3
        assert report(http).num_restarts == 0
        assert http.get("/metrics").status_code == http.get("/health").status_code == 200


def test_the_numbers_are_those_of_the_requests(tokenizer: Path, lora_dir: Path) -> None:
    config = ServerConfig(port=0, in_process=True)
    modules = [LoraModule(letter, str(lora_dir / letter)) for letter in "mnpq"]
    with (
        BackgroundServer(engine_config(tokenizer), config, modules, builder="reciter:reciter_parts") as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        for model, num_tokens in (("n", 5), ("m", 5), ("base:n", 7), ("base", 3)):
            complete(http, model, num_tokens)
        found = report(http)
        assert (found.state, found.model, found.num_restarts, found.num_in_flight) == ("serving", "base", 0, 0)
        assert abs(found.time - time.time()) < 60
        assert found.started_at <= found.time
        stats = found.engine
        assert isinstance(stats, EngineStats)
        assert (stats.num_generated_tokens, stats.num_loads, stats.num_evictions, stats.num_preemptions) == (
            20,
            2,
            0,
            0,
        )
        owned = stats.num_free_pages + stats.num_kv_pages + stats.num_prefix_pages + stats.num_adapter_pages
        assert owned == stats.num_pages == 512
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert [queue.num_waiting for queue in stats.queues] == [0]
        assert found.page_bytes == 16 * 2 * 2 * 8 * 4

        assert found.latency.ttft_s is not None
        assert found.latency.inter_token_s is not None
        assert found.latency.e2e_s is not None
        assert found.latency.queue_s is not None
        assert (found.latency.ttft_s.count, found.latency.inter_token_s.count, found.latency.e2e_s.count) == (4, 16, 4)
        assert 0.0009 < found.latency.inter_token_s.p50 <= found.latency.inter_token_s.p99 < 10
        assert found.base.inter_token_s is not None
        assert found.base.inter_token_s.count == 2

        # On the device first, and of those the one that was asked for most.
        assert [(row.name, row.tier, row.num_requests, row.num_hits) for row in found.adapters[:2]] == [
            ("n", "device", 2, 1),
            ("m", "device", 1, 0),
        ]
        others = {(row.name, row.tier, row.num_requests) for row in found.adapters[2:]}
        assert others == {("p", "host", 0), ("q", "host", 0)}
        first = found.adapters[0]
        assert (first.rank, first.num_pages, first.state, first.pinned) == (8, 2, "idle", False)
        assert first.latency.inter_token_s is not None
        assert first.latency.inter_token_s.count == 10
        assert found.adapters[2].latency.e2e_s is None
        assert [row.name for row in report(http, adapters=1).adapters] == ["n"]
        assert report(http, adapters=0).adapters == ()


@pytest.mark.parametrize("wrong", ["-1", "many", "1e3", "", "٣", "9" * 5000])
def test_a_wrong_number_of_adapters_is_the_callers_fault(http: httpx.Client, wrong: str) -> None:
    answer = http.get("/status", params={"adapters": wrong})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "adapters"


def test_each_engine_shows_what_it_learnt_of_its_steps(tokenizer: Path) -> None:
    config = ServerConfig(port=0, in_process=True)
    with (
        BackgroundServer(engine_config(tokenizer), config, builder="reciter:reciter_parts") as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        assert report(http).replicas[0].fits == ()  # too few steps
        for _ in range(LEAST_STEPS):  # it learns from some steps alone
            complete(http, "base", 40)
            found = report(http)
            (row,) = found.replicas
            if row.fits:
                break
        assert [(fit.phase, fit.family) for fit in row.fits] == [("decode", "padded"), ("decode", "unpadded")]
        assert all(fit.num_steps >= LEAST_STEPS and fit.error_s >= 0.0 and fit.error_out_s >= 0.0 for fit in row.fits)
        assert found.engine is not None
        assert found.engine.fits == row.fits


def test_who_may_not_see_it(tokenizer: Path) -> None:
    config = ServerConfig(port=0, in_process=True, api_keys=("user",), admin_key="root")
    with (
        BackgroundServer(engine_config(tokenizer), config, builder="reciter:reciter_parts") as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        for key, code in (("wrong", 401), ("user", 403), ("root", 200)):
            assert http.get("/status", headers={"Authorization": f"Bearer {key}"}).status_code == code
        assert http.get("/status").status_code == 401


def test_it_shows_what_is_running_and_answers_while_draining(tokenizer: Path, gate: Gate) -> None:
    config = ServerConfig(port=0, in_process=True, drain_timeout_s=PATIENCE_S)
    with (
        BackgroundServer(engine_config(tokenizer), config, builder="reciter:held_parts") as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        body = {"model": "base", "prompt": "say", "max_tokens": 8, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            with httpx.Client(base_url=server.url, timeout=60) as other:
                found = report(other)
                assert found.engine is not None
                assert (found.num_in_flight, found.engine.num_running) == (1, 1)
                server.drain()
                wait_for(lambda: report(other).state != "serving")
                found = report(other)
            gate.open()
            assert (found.state, found.num_in_flight, found.engine) == ("draining", 1, None)
            assert "data: [DONE]" in list(lines)


def test_a_server_that_drains_can_be_stopped_at_once(tokenizer: Path, gate: Gate) -> None:
    config = ServerConfig(port=0, in_process=True, drain_timeout_s=2 * PATIENCE_S)
    with (
        BackgroundServer(engine_config(tokenizer), config, builder="reciter:held_parts") as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        body = {"model": "base", "prompt": "say", "max_tokens": 8, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()  # kept: it closes the stream
            next(lines)
            server.drain()
            wait_for(lambda: report(http).state != "serving")
            threading.Thread(target=server.stop, daemon=True).start()
            server.wait(PATIENCE_S)


def test_metrics_by_adapter(tokenizer: Path, lora_dir: Path) -> None:
    modules = [LoraModule(letter, str(lora_dir / letter)) for letter in "mn"]
    for has_histograms in (False, True):
        config = ServerConfig(port=0, in_process=True, adapter_histograms=has_histograms)
        with (
            BackgroundServer(engine_config(tokenizer), config, modules, builder="reciter:reciter_parts") as server,
            httpx.Client(base_url=server.url, timeout=60) as http,
        ):
            for model, num_tokens in (("m", 5), ("m", 7), ("base", 3)):
                complete(http, model, num_tokens)
            samples = {
                (sample.name, sample.labels.get("adapter_name")): sample.value
                for family in text_string_to_metric_families(http.get("/metrics").text)
                for sample in family.samples
            }
            assert samples["manylora_adapter_prompt_tokens_total", "m"] == 8
            assert samples["manylora_adapter_generation_tokens_total", "m"] == 12
            assert ("manylora_adapter_generation_tokens_total", "") not in samples
            counts = [
                samples.get((f"manylora_adapter_{name}_seconds_count", "m"))
                for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
            ]
            assert counts == ([2, 10, 2] if has_histograms else [None, None, None])
            http.post("/v1/unload_lora_adapter", json={"lora_name": "m"})
            assert 'adapter_name="m"' not in http.get("/metrics").text
