"""What routers scrape is there, under the names they look for."""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import httpx
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from reciter import MAX_MODEL_LEN, engine_config, write_reciter
from serving import Gate

from manylora.core.config import ServerConfig
from manylora.serving.metrics.scrape import FunctionCounts
from manylora.serving.metrics.status_report import FunctionState
from manylora.serving.server import BackgroundServer, LoraModule

HISTOGRAMS = (
    "e2e_request_latency_seconds",
    "inter_token_latency_seconds",
    "iteration_tokens_total",
    "request_decode_time_seconds",
    "request_generation_tokens",
    "request_inference_time_seconds",
    "request_max_num_generation_tokens",
    "request_num_preemptions",
    "request_params_max_tokens",
    "request_params_n",
    "request_prefill_kv_computed_tokens",
    "request_prefill_time_seconds",
    "request_prompt_tokens",
    "request_queue_time_seconds",
    "request_time_per_output_token_seconds",
    "time_per_output_token_seconds",
    "time_to_first_token_seconds",
)
VLLM_NAMES = (
    *(f"vllm:{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")),
    "http_requests_total",
    "vllm:admission_rejections_total",
    "vllm:cache_config_info",
    "vllm:generation_tokens_total",
    "vllm:gpu_cache_usage_perc",
    "vllm:gpu_prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_queries_total",
    "vllm:kv_cache_usage_perc",
    "vllm:lora_requests_info",
    "vllm:num_preemptions_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_waiting_by_reason",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prompt_tokens_by_source_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:prompt_tokens_total",
    "vllm:request_success_total",
)
"""Names in vLLM's Grafana dashboards and in its test of metrics, if they have a meaning here. Absent: swapping, sleep,
CPU and external KV caches, multi-modal inputs, speculative decoding, FLOPs."""


def scrape(http: httpx.Client) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample)
    return samples


def test_every_name(http: httpx.Client) -> None:
    http.post("/v1/completions", json={"model": "m", "prompt": "say", "max_tokens": 3})
    samples = scrape(http)
    for name in VLLM_NAMES:
        assert name in samples, name
    for name in (
        "vllm:lora_adapter_loaded",
        "vllm:num_gpu_loaded_lora_adapters",
        "vllm:num_cpu_loaded_lora_adapters",
        "vllm:max_gpu_lora_adapters",
        "vllm:lora_adapter_load_seconds_bucket",
        "process_resident_memory_bytes",
        "process_start_time_seconds",
        "manylora_pages",
        "manylora_adapters",
        "manylora_adapters_registered",
        "manylora_adapters_resident",
        "manylora_adapters_active",
        "manylora_adapter_loads_total",
        "manylora_adapter_evictions_total",
        "manylora_adapter_load_failures_total",
        "manylora_lora_requests_total",
        "manylora_lora_hits_total",
        "manylora_engine_up",
        "manylora_engine_restarts_total",
    ):
        assert name in samples, name
    pages = {sample.labels["owner"]: sample.value for sample in samples["manylora_pages"]}
    assert set(pages) == {"free", "kv", "prefix", "adapter"}
    assert sum(pages.values()) == 512


def test_the_numbers_are_those_of_the_requests(tokenizer: Path, lora_dir: Path) -> None:
    config = ServerConfig(port=0, in_process=True, lora_dirs=(str(lora_dir),))
    modules = [LoraModule("m", str(lora_dir / "m")), LoraModule("n", str(lora_dir / "n"))]
    with (
        BackgroundServer(engine_config(tokenizer), config, modules, builder="reciter:reciter_parts") as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        for model, num_tokens in (("m", 5), ("m", 7), ("base", 3)):
            http.post("/v1/completions", json={"model": model, "prompt": "four", "max_tokens": num_tokens})
        samples = scrape(http)

        def value(name: str, **labels: str) -> float:
            found = [one.value for one in samples[name] if labels.items() <= one.labels.items()]
            assert len(found) == 1, (name, labels, samples[name])
            return float(found[0])

        assert value("vllm:prompt_tokens_total") == 12
        assert value("vllm:generation_tokens_total") == 15
        assert value("vllm:time_to_first_token_seconds_count") == 3
        assert value("vllm:inter_token_latency_seconds_count") == 12
        assert value("vllm:e2e_request_latency_seconds_count") == 3
        assert value("vllm:request_success_total", finished_reason="length") == 3
        for name in ("inference", "prefill", "decode", "queue"):
            assert value(f"vllm:request_{name}_time_seconds_count") == 3
        inference, prefill, decode = (
            value(f"vllm:request_{name}_time_seconds_sum") for name in ("inference", "prefill", "decode")
        )
        assert abs(inference - prefill - decode) < 1e-9
        assert value("vllm:request_params_max_tokens_sum") == 15
        assert value("vllm:request_prefill_kv_computed_tokens_sum") == 12
        assert value("vllm:prompt_tokens_by_source_total", source="local_compute") == 12
        assert value("vllm:iteration_tokens_total_sum") == 12 + 15
        assert value("vllm:iteration_tokens_total_count") == 15
        assert (value("vllm:request_num_preemptions_count"), value("vllm:request_num_preemptions_sum")) == (3, 0)
        (cache,) = samples["vllm:cache_config_info"]
        assert cache.labels["kv_cache_size_tokens"] == str(512 * 16)
        assert cache.labels["kv_cache_max_concurrency"] == str(512 * 16 / MAX_MODEL_LEN)
        assert value("vllm:lora_adapter_load_seconds_count", level="gpu") == 1
        assert value("vllm:lora_adapter_load_seconds_count", level="cpu") == 2
        assert value("manylora_lora_requests_total") == 2
        assert value("manylora_lora_hits_total") == 1
        assert value("manylora_adapter_requests_total", adapter_name="m") == 2
        assert value("manylora_adapters", tier="device") == 1
        assert value("manylora_adapters", tier="host") == 1
        assert value("vllm:lora_adapter_loaded", adapter_name="m", level="gpu", pinned="false", rank="8") == 1
        assert not [one for family in samples.values() for one in family if one.labels.get("adapter_name") == "n"]
        lora = samples["vllm:lora_requests_info"][0]
        assert lora.labels["running_lora_adapters"] == "m"
        assert lora.labels["waiting_lora_adapters"] == ""
        assert abs(lora.value - time.time()) < 60


def test_scrapers_that_take_openmetrics_get_the_same_names(http: httpx.Client) -> None:
    accept = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=0.0.4;q=0.2"
    answer = http.get("/metrics", headers={"accept": accept})
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    names = {sample.name for family in parse_openmetrics(answer.text) for sample in family.samples}
    assert names >= set(VLLM_NAMES)
    assert http.get("/metrics").headers["content-type"].startswith("text/plain")


def test_labels_of_adapters_that_are_gone_vanish(http: httpx.Client, lora_dir: Path) -> None:
    source = write_reciter(lora_dir / "passing-by", "v")
    for number in range(5):
        name = f"passing-{number}"
        http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(source)})
        http.post("/v1/completions", json={"model": name, "prompt": "say", "max_tokens": 1})
        assert name in http.get("/metrics").text
        http.delete(f"/adapters/{name}")
    assert "passing-" not in http.get("/metrics").text


def test_refused_answers_are_counted(tokenizer: Path, gate: Gate) -> None:
    engine = engine_config(tokenizer)
    engine = replace(engine, scheduler=replace(engine.scheduler, max_num_seqs=1, max_waiting=1))
    with (
        BackgroundServer(engine, ServerConfig(port=0), builder="reciter:held_parts") as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
        ThreadPoolExecutor() as pool,
    ):
        asked = {"model": "base", "prompt": "x", "max_tokens": 2}
        under_way = [pool.submit(http.post, "/v1/completions", json=asked) for _ in range(4)]
        done, _ = wait(under_way, return_when=FIRST_COMPLETED, timeout=60)
        assert {one.result().status_code for one in done} == {429}
        gate.open()
        statuses = [one.result().status_code for one in under_way]
        rejected = {one.labels["reason"]: one.value for one in scrape(http)["vllm:admission_rejections_total"]}
        assert rejected == {"max_num_queued_reqs": statuses.count(429), "caller_limit": 0}
        assert statuses.count(429) > 0


def test_counts_of_functions_do_not_go_back_as_they_are_removed() -> None:
    def state(name: str, num_starts: int, num_deaths: int) -> FunctionState:
        return FunctionState(name=name, state="awake", num_starts=num_starts, num_deaths=num_deaths)

    counts = FunctionCounts()
    assert counts.sums([state("a", 5, 1), state("b", 2, 0)]) == (7, 1)
    assert counts.sums([state("a", 6, 1)]) == (8, 1)  # without b
    assert counts.sums([state("a", 1, 0), state("b", 1, 0)]) == (10, 1)  # replaced, and registered anew
    assert counts.sums([state("a", 2, 1)]) == (11, 2)
