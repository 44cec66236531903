"""Time to first token of an adapter that a request names and no one has loaded: from a hub, from a disk, from memory.

    python bench/registries.py [--quick]

A server with `--lora-on-demand` and a random model of 12 layers, and a hub on loopback that answers each request after
20 ms and sends 100 MB/s to each connection. Eight adapters of some 20 MB; a turn asks each for one token:

* *from the hub*: nothing is here; the first layers are computed on while the last are sent;
* *from the cache on disk*: another server, to which the names are new, with the folder that the first has left;
* *registered, on disk*: as `--lora-dir` registers a folder at the start, its weights unread;
* *loaded*: asked for again.

Files are in the page cache. Writes `results/registries.json` and `.md`.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from cold_disk import make_model
from publishing import Others, arguments, publish, reason_if_busy, table

from manylora.cli.commands.check import describe_base
from manylora.core.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, ServerConfig
from manylora.demo import demo_model_path
from manylora.execution.device import describe_machine
from manylora.lab.bench.sweep import write_synthetic_adapter
from manylora.serving.server import BackgroundServer, LoraModule

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from registry_server import serving_folder
from registry_stubs import HUB_TOKEN, HubHandler, HubServer

NUM_ADAPTERS, RANK = 8, 48
ROUND_TRIP_S, BYTES_PER_S = 0.02, 100e6
HUB, CACHE, DISK, LOADED = "from the hub", "from the cache on disk", "registered, on disk", "loaded"


class _FarHandler(HubHandler):
    """A hub that is some way off."""

    def parse_request(self) -> bool:
        parsed = super().parse_request()
        time.sleep(ROUND_TRIP_S)
        return parsed

    def _send(self, file: str, content: bytes, first: int, end: int) -> None:
        begun, step = time.perf_counter(), 1 << 18
        for at in range(first, end, step):
            self.wfile.write(content[at : min(at + step, end)])
            time.sleep(max(0.0, begun + (at + step - first) / BYTES_PER_S - time.perf_counter()))


def first_token_s(http: httpx.Client, name: str) -> float:
    """Return the time of one token."""
    body = {"model": name, "prompt": "hello " * 20, "max_tokens": 1, "temperature": 0}
    begun = time.perf_counter()
    http.post("/v1/completions", json=body).raise_for_status()
    return time.perf_counter() - begun


def readers_s() -> float:
    """Return the processor time of readers that run: they outlive their engine's end, and count as strangers then."""
    import psutil

    total = 0.0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if any("reader_service" in word or "registry_process" in word for word in child.cmdline()):
                total += sum(child.cpu_times()[:2])
    return total


def measure(web: Path, model: Path, work: Path, names: list[str]) -> tuple[dict[str, list[float]], float]:
    """Return the times of each way, one for each adapter, and the processor time of readers that ended."""
    times: dict[str, list[float]] = {}
    ended_s = 0.0
    engine = EngineConfig(
        model=ModelConfig(model=str(model), tokenizer=str(demo_model_path()), served_model_name="base", device="cpu"),
        memory=MemoryConfig(memory_bytes=1 << 30),
        adapters=AdapterConfig(registries=("hf://org",), background_reads=False),
        cache_dir=str(work / "cache"),
    )
    without_hashes = replace(engine, cache_dir=str(work / "other"))
    on_disk = [LoraModule(name, str(web / "org" / name)) for name in names]
    for way, config, modules in ((HUB, engine, []), (CACHE, engine, []), (DISK, without_hashes, on_disk)):
        server = ServerConfig(port=0, lora_on_demand=True)
        with BackgroundServer(config, server, modules) as serving, httpx.Client(base_url=serving.url) as http:
            http.timeout = httpx.Timeout(60)
            first_token_s(http, "base")
            times[way] = [first_token_s(http, name) for name in names]
            if way is DISK:
                times[LOADED] = [first_token_s(http, name) for name in names]
            ended_s += readers_s()
    return times, ended_s


def page(figures: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    rows = []
    for way, seconds in figures["times_s"].items():
        rows.append([way, *(f"{1000 * one(seconds):.0f}" for one in (statistics.median, min, max))])
    lines = [
        "# First token of an adapter that no one has loaded",
        "",
        f"`{figures['command']}` on {figures['machine']}, other processes took {figures['others']:.0%} of it. "
        f"{figures['num_adapters']} adapters of {figures['adapter_bytes'] / 1e6:.0f} MB on 12 layers, one request at a "
        f"time, for one token. The hub is on loopback, answers after {1000 * ROUND_TRIP_S:.0f} ms, and sends "
        f"{BYTES_PER_S / 1e6:.0f} MB/s: all bytes take {1000 * figures['adapter_bytes'] / BYTES_PER_S:.0f} ms.",
        "",
        *table(["time to first token, ms", "median", "least", "most"], rows),
    ]
    return "\n".join(lines)


def main() -> None:
    options = arguments(__doc__, quick="two small adapters").parse_args()
    num_adapters, rank = (2, 8) if options.quick else (NUM_ADAPTERS, RANK)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = make_model(work / "model", is_quick=options.quick)
        base, rng = describe_base(str(model)), np.random.default_rng(0)
        names = [f"adapter-{number}" for number in range(num_adapters)]
        for name in names:
            write_synthetic_adapter(work / "web" / "org" / name, base, rank, rng)
        with serving_folder(work / "web", lambda root: HubServer(root, _FarHandler)) as hub:
            os.environ |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": HUB_TOKEN}
            others, began = Others(), time.perf_counter()
            times, ended_s = measure(work / "web", model, work, names)
            elapsed_s = (time.perf_counter() - began) * (os.cpu_count() or 1)
            busy = max(0.0, others.share() - ended_s / elapsed_s)
        figures = {
            "command": "python bench/registries.py",
            "machine": describe_machine(torch.device("cpu")),
            "others": busy,
            "num_adapters": num_adapters,
            "adapter_bytes": (work / "web" / "org" / names[0] / "adapter_model.safetensors").stat().st_size,
            "times_s": times,
        }
    publish("registries", figures, page(figures), is_kept=not options.quick, refused=reason_if_busy(busy))


if __name__ == "__main__":
    main()
