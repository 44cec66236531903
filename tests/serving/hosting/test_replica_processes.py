"""Several engine processes behind one API: streams outlive them, and every engine is shown by itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from disturbed import answers, leave_alone, replicas_of
from reciter import engine_config

from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig, ServerConfig
from manylora.core.errors import ConfigError
from manylora.core.server_config import FleetConfig
from manylora.demo import demo_adapters
from manylora.serving.server import BackgroundServer, LoraModule


def test_streams_outlive_a_killed_engine_and_one_that_hangs() -> None:
    """Of the demo model on three engines: greedy and seeded, over adapters and the base, to the same text."""
    # KV in 16 bits rounds the last bits in which a step differs from a longer one, and 600 draws then do as well.
    engine = EngineConfig(model=ModelConfig(model="demo"), memory=MemoryConfig(num_pages=600, kv_cache_dtype="float32"))
    modules = [LoraModule(name, str(path)) for name, path in list(demo_adapters().items())[:4]]
    models = ["demo", *(module.name for module in modules)]
    bodies = []
    for index in range(20):
        sampling = {"temperature": 0.0} if index % 2 else {"temperature": 0.9, "top_p": 0.95, "seed": index}
        penalties = {"frequency_penalty": 0.5, "repetition_penalty": 1.1} if index % 3 == 0 else {}
        body = {"model": models[index % len(models)], "prompt": f"the {index} birds", "max_tokens": 120}
        schema = {"type": "object", "properties": {"note": {"type": "string"}}, "required": ["note"]}
        grammar = {"response_format": {"type": "json_schema", "json_schema": {"name": "note", "schema": schema}}}
        shape = grammar if index % 7 == 0 else {"ignore_eos": True}
        bodies.append({**body, **shape, **sampling, **penalties})

    async def kill_and_stop(begun: Sequence[asyncio.Event]) -> None:
        await asyncio.gather(*(one.wait() for one in begun))
        os.kill(pids[0], signal.SIGKILL)
        os.kill(pids[1], signal.SIGSTOP)

    config = ServerConfig(port=0, hang_timeout_s=3.0, fleet=FleetConfig(replicas=3))
    with BackgroundServer(engine, config, modules) as server:
        calm = asyncio.run(answers(server.url, bodies, leave_alone))
        pids = [row["pid"] for row in replicas_of(server)]  # asked for before: the answers take half a second
        assert asyncio.run(answers(server.url, bodies, kill_and_stop)) == calm
        resumes = httpx.get(f"{server.url}/status", timeout=60).json()["resumes"]
        assert resumes["num_resumed"] > 0
        assert (resumes["num_ended"], resumes["num_waiting"]) == (0, 0)
        shared = [f"/proc/{row['pid']}/maps" for row in replicas_of(server) if row["state"] == "serving"]
        assert all("manylora-weights" in Path(maps).read_text() for maps in shared)


def test_each_replica_is_shown_and_can_be_drained(tokenizer: Path, lora_dir: Path) -> None:
    config = ServerConfig(port=0, fleet=FleetConfig(replicas=3, router="least-loaded"))
    modules = [LoraModule("m", str(lora_dir / "m"))]
    body = {"model": "m", "prompt": "say", "max_tokens": 20, "temperature": 0.0}

    async def drain(begun: Sequence[asyncio.Event]) -> None:
        await asyncio.gather(*(one.wait() for one in begun))
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            answer = await http.post("/replicas/1/drain?timeout=0")
            assert answer.json() == {"replica": 1, "state": "stopped"}

    with (
        BackgroundServer(engine_config(tokenizer), config, modules, builder="reciter:slow_reciter_parts") as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        assert http.post("/adapters/m/pin").status_code == 200
        rows = replicas_of(server)
        assert [(row["index"], row["state"], row["pinned"]) for row in rows] == [
            (index, "serving", ["m"]) for index in range(3)
        ]
        assert len({row["pid"] for row in rows}) == 3
        texts = asyncio.run(answers(server.url, [body] * 9, drain))
        assert texts == ["mnopqrstuvwxyzabcdef"] * 9
        rows = replicas_of(server)
        assert [row["state"] for row in rows] == ["serving", "stopped", "serving"]
        resumes = http.get("/status").json()["resumes"]
        assert (resumes["num_resumed"], resumes["num_ended"], resumes["num_poison"]) == (3, 0, 0)
        metrics = http.get("/metrics").text
        assert 'manylora_engine_up{replica="1"}' not in metrics
        assert 'manylora_engine_up{replica="2"} 1.0' in metrics
        assert 'vllm:num_requests_running{model_name="base",replica="2"} 0.0' in metrics
        assert 'replica="1"' not in "".join(line for line in metrics.splitlines() if line.startswith("vllm:"))
        assert "manylora_resumed_requests_total 3.0" in metrics
        for wrong in ("1", "7", "-1", "9" * 5000):
            assert http.post(f"/replicas/{wrong}/drain").status_code == 400
        assert http.post("/replicas/0/drain").status_code == 200
        assert http.post("/replicas/2/drain").json()["error"]["param"] == "replica"
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize("is_unloaded", [False, True])
def test_an_answer_goes_on_after_a_replacement_but_not_after_an_unload(
    tokenizer: Path, lora_dir: Path, is_unloaded: bool
) -> None:
    """The other engine holds the replaced version for the answer; that of a name that is gone it does not."""
    config = ServerConfig(port=0, lora_dirs=(str(lora_dir),), fleet=FleetConfig(replicas=2))
    modules = [LoraModule("x", str(lora_dir / "m"))]
    with BackgroundServer(engine_config(tokenizer), config, modules, builder="reciter:slow_reciter_parts") as server:
        body = {"model": "x", "prompt": "say", "max_tokens": 60, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            new = {"lora_name": "x", "lora_path": str(lora_dir / "n"), "load_inplace": True}
            route = "unload_lora_adapter" if is_unloaded else "load_lora_adapter"
            assert httpx.post(f"{server.url}/v1/{route}", json=new, timeout=60).status_code == 200
            (own,) = (row for row in replicas_of(server) if row["num_in_flight"])
            os.kill(own["pid"], signal.SIGKILL)
            events = [line[6:] for line in lines if line.startswith("data: {")]
        if is_unloaded:
            error = json.loads(events[-1])["error"]
            assert error["code"] == 409
            assert "adapter 'x': it was unloaded" in error["message"]
        else:
            text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
            assert text == ("mnopqrstuvwxyzabcdefghijkl" * 3)[60 - len(text) : 60]


def test_a_stream_waits_so_long_for_an_engine(tokenizer: Path) -> None:
    config = ServerConfig(port=0, fleet=FleetConfig(resume_timeout_s=0.1))  # an engine process takes longer to start
    body = {"model": "base", "prompt": "say", "max_tokens": 40, "stream": True}
    with (
        BackgroundServer(engine_config(tokenizer), config, builder="reciter:slow_reciter_parts") as server,
        httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        assert server.engine_pid is not None
        os.kill(server.engine_pid, signal.SIGKILL)
        events = [line[6:] for line in lines if line.startswith("data: {")]
    error = json.loads(events[-1])["error"]
    assert error["code"] == 500
    assert "no other served within 0.1 s" in error["message"]


def test_a_stream_waits_for_its_engine_longer_than_a_drain_for_streams(tokenizer: Path) -> None:
    config = ServerConfig(port=0, drain_timeout_s=0.0)
    body = {"model": "base", "prompt": "say", "max_tokens": 12, "temperature": 0.0}

    async def kill(begun: Sequence[asyncio.Event]) -> None:
        await asyncio.gather(*(one.wait() for one in begun))
        assert server.engine_pid is not None
        os.kill(server.engine_pid, signal.SIGKILL)

    with BackgroundServer(engine_config(tokenizer), config, builder="reciter:slow_reciter_parts") as server:
        assert asyncio.run(answers(server.url, [body], kill)) == ["abcdefghijkl"]


def test_a_router_that_is_not_there_is_an_error_at_start(tokenizer: Path) -> None:
    config = ServerConfig(port=0, fleet=FleetConfig(replicas=2, router="no-such-router"))
    with (
        pytest.raises(ConfigError, match="expected one of affinity"),
        BackgroundServer(engine_config(tokenizer), config, builder="reciter:reciter_parts"),
    ):
        pytest.fail("it started")
