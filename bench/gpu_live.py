"""The live section of ``bench/gpu.py``: an engine near saturation, and what simulators say of the same requests.

Chameleon and FIFO without a cache serve the same requests in turn, each from a device without adapters, in rounds of
other seeds. *Simulated* is by data sheets. *Fitted* is by step times that a calibration sweep measured in the same
process (`manylora calibrate`), on requests of other sizes than the rounds'. Simulated requests wait for their adapter;
live ones may begin before.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_rig import QV, Engine, Sizes
from live import live_arrivals

from manylora.core.config import AdapterConfig, EngineConfig, ModelConfig, SchedulerConfig
from manylora.core.costs.step_log import LogHeader, LogLine
from manylora.core.engine.core import EngineCore
from manylora.core.engine.loop import EngineLoop
from manylora.core.types import AdapterVersion, Tier
from manylora.execution.step_graphs import NARROW_AFTER
from manylora.lab.bench.sweep import run_sweep
from manylora.lab.catalog.models import base_shape
from manylora.lab.costs.calibrate import fit_profile
from manylora.lab.costs.roofline import RooflineCost
from manylora.lab.measure import Recorder, RequestRecord, summarise
from manylora.lab.sim.run.simulation import SimulationConfig, simulate
from manylora.lab.sim.setup import Setup, make_config
from manylora.lab.workloads import AdapterSet, AdapterSpec, Workload, WorkloadSpec, make_workload
from manylora.lab.workloads.arrivals import PoissonArrivals
from manylora.lab.workloads.lengths import ParametricLengths, UniformTokens
from manylora.lab.workloads.popularity import ZipfShares

SWEPT_ADAPTERS = 40
ENGINES = {
    "Chameleon": ("chameleon", AdapterConfig(eviction="chameleon", host_bytes=1 << 40)),
    "FIFO, no cache": ("fifo", AdapterConfig(eviction="none", look_ahead=0, host_bytes=1 << 40)),
}


def live_rows(engine: Engine, sizes: Sizes, folder: Path) -> list[dict[str, Any]]:
    """Serve rounds near saturation; return each figure of each engine as a list of rounds, live and simulated.

    ``folder`` gets the profile that was fitted.
    """
    is_gpu = engine.device.type == "cuda"
    engine.forget_groups(NARROW_AFTER)  # as a server does: a capture is a pause
    profile = folder / "gpu_profile.json"
    if is_gpu:
        folder.mkdir(parents=True, exist_ok=True)
        fit_profile(_sweep(engine, sizes)).write(profile)
    adapter_set = AdapterSet(count=sizes.live_adapters, ranks=sizes.ranks, targets=QV)
    versions = engine.versions(adapter_set.specs())
    batch = max(sizes.batches)
    num_in, num_out = (256, 64) if is_gpu else (8, 2)
    # Near saturation: what prompts and decoding take of the device when nothing of adapters is in the way.
    step_s = engine.step_s(engine.plan(batch, [], 0))
    token_s = engine.step_s(engine.prompt_plan()) / sizes.context
    rate = 0.85 / (num_out * step_s / batch + 0.75 * num_in * token_s)
    spec = WorkloadSpec(
        name="live",
        num_requests=max(4, int(rate * sizes.live_s)),
        arrivals=PoissonArrivals(rate=rate),
        lengths=ParametricLengths(
            prompt=UniformTokens(low=num_in // 2, high=num_in), output=UniformTokens(low=1, high=2 * num_out)
        ),
        adapters=adapter_set,
        popularity=ZipfShares(s=1.0, q=0.0),
    )
    pages_each = -(-(num_in + 2 * num_out) // engine.base.page.block_size)
    # A quarter of the adapters fit beside the KV of a full batch.
    num_pages = batch * pages_each + sum(version.num_pages for version in versions.values()) // 4 + 8
    num_pages = min(num_pages, engine.parts.num_pages)
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for seed in range(sizes.live_rounds):
        workload = make_workload(spec, seed=seed)
        for name, (policy, adapters) in ENGINES.items():
            scheduler = SchedulerConfig(policy=policy, max_num_seqs=batch)
            records = _serve(engine, workload, versions, scheduler, adapters, num_pages)
            found.setdefault((name, "live"), []).append(_figures(records))
            for how, config in _simulators(profile, scheduler, adapters, num_pages, seed) if is_gpu else ():
                found.setdefault((name, how), []).append(_figures(simulate(workload, config).records))
    return [
        {"engine": name, "how": how, "rate": rate} | {key: [one[key] for one in each] for key in each[0]}
        for (name, how), each in found.items()
    ]


def _sweep(engine: Engine, sizes: Sizes) -> list[LogLine]:
    """Return the log of a calibration sweep, in which no adapter idles on the device."""
    ranks = sizes.ranks
    specs = [AdapterSpec(name=f"s{i}", rank=ranks[i % len(ranks)], targets=QV) for i in range(SWEPT_ADAPTERS)]
    parts = engine.parts
    lines: list[LogLine] = [LogHeader.of(parts, engine.config.model)]
    run_sweep(
        parts,
        # Steps that assist are launched kernel by kernel, and are not simulated.
        replace(engine.config, adapters=AdapterConfig(eviction="none", cold_start="wait", host_bytes=1 << 40)),
        list(engine.versions(specs).values()),
        clock=engine.clock,
        rng=random.Random("sweep"),
        seconds=sizes.sweep_s,
        write=lines.append,
    )
    _clear(engine)
    return lines


def _simulators(
    profile: Path, scheduler: SchedulerConfig, adapters: AdapterConfig, num_pages: int, seed: int
) -> Iterator[tuple[str, SimulationConfig]]:
    """Return the ways to simulate an engine, by name."""
    yield (
        "simulated",
        SimulationConfig(
            base=base_shape("llama-3-8b"),
            cost=RooflineCost("llama-3-8b", _card(), lora_kernel="ragged", targets=QV),
            num_pages=num_pages,
            scheduler=scheduler,
            adapters=adapters,
            exact_caps=True,
        ),
    )
    setup = Setup(
        profile=str(profile),
        num_pages=num_pages,
        scheduler=replace(scheduler, plan_ahead=True),
        adapters=adapters,
        reads_host=False,
        exact_caps=True,
    )
    yield "fitted", make_config(setup, targets=QV, seed=seed)


def _serve(
    engine: Engine,
    workload: Workload,
    versions: dict[str, AdapterVersion],
    scheduler: SchedulerConfig,
    adapters: AdapterConfig,
    num_pages: int,
) -> list[RequestRecord]:
    recorder = Recorder(ranks={spec.name: spec.rank for spec in workload.adapters})
    core = EngineCore(
        replace(engine.parts, num_pages=num_pages),  # plans ahead and starts cold requests as a server does
        EngineConfig(
            model=ModelConfig(model="base"), scheduler=scheduler, memory=engine.config.memory, adapters=adapters
        ),
        served_name="base",
        sinks=(recorder,),
    )
    now = engine.clock.now()
    for name, version in versions.items():
        core.adapters.register(name, version, now)
    start = engine.clock.now() + 0.1
    arrivals = live_arrivals(workload, engine.base.vocab_size, start)
    EngineLoop(core, engine.clock, on_outputs=lambda outputs, now: None, arrivals=arrivals).run()
    _clear(engine)
    return recorder.records


def _clear(engine: Engine) -> None:
    """Let the next core begin without adapters on the device, as it believes."""
    for key in list(engine.executor._resident):
        engine.executor.drop_adapter(key, Tier.DEVICE)


def _card() -> str:
    """Return the cost model's name of this GPU."""
    name = torch.cuda.get_device_name().lower()
    return next((card for card in ("h200", "h100", "a100") if card in name), "h100")


def _figures(records: list[RequestRecord]) -> dict[str, float]:
    summary = summarise(records)
    assert summary.ttft is not None
    return {
        "requests": summary.num_requests,
        "TTFT p50 ms": summary.ttft.p50 * 1e3,
        "TTFT p99 ms": summary.ttft.p99 * 1e3,
        "tokens/s": summary.output_tokens_per_s,
        "hit rate": summary.hit_rate or 0.0,
    }
