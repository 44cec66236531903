"""Time to first token when every second request is cold, over links as slow as other machines': wait, or run at once?

    python bench/cold_start.py [--quick]

The engine's real core and loop on the wall clock, with the torch executor on the CPU; no HTTP. Half of the requests go
to adapters that are pinned to the device (*warm*), the others each to an adapter that is not there (*cold*): idle
adapters are dropped at once, and cold requests go round many. Engines of one model take turns on the same arrivals:

* *all resident*: the pool holds every adapter, and all are on the device before the first request;
* *wait*: a cold request waits for the copy to the device, which is asynchronous and delays no other request;
* *host copy*: a cold request runs from the host copy until the copy to the device has ended.

The link is paced: a copy lasts for so many steps of a decoding batch, measured first. Half a step is the ratio of an
A10 with Llama-2-7B and rank 64 on the attention's modules (134 MB at 12 GB/s, beside 13.5 GB of weights at 600 GB/s);
four steps are that of a link which others share, or of larger adapters. Ratios are of the engines in the same round,
medians over rounds. Writes `results/cold_start.json` and `.md`.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from churn import medians, percentile_ms, rotated
from manylora.execution.machine import describe_machine
from publishing import arguments, publish, table
from rich.progress import Progress

from manylora.bench.synthetic import write_synthetic_adapter
from manylora.clock import WallClock
from manylora.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.demo import demo_model_path
from manylora.engine.core import EngineCore
from manylora.engine.loop import EngineLoop
from manylora.execution.build import build_parts
from manylora.measure import Recorder
from manylora.types import AdapterVersion, Request, SamplingParams

RANK = 64
NUM_WARM, NUM_COLD = 4, 32
NUM_SEATS = 16
NUM_IN, NUM_OUT = 24, 32
COPY_STEPS = (0.5, 4.0)
RESIDENT = "all resident"
STEP, SECONDS = "a step, P50, ms", "seconds"
Round = dict[str, float]
"""The figures of one engine in one round, by the title that they are shown under."""


class System:
    """One engine, kept from round to round."""

    def __init__(self, config: EngineConfig, folders: Sequence[Path], *, reads_host: bool) -> None:
        self._clock = WallClock()
        self._parts = replace(build_parts(config, self._clock), reads_host=reads_host)
        self._recorder = Recorder()
        self._core = EngineCore.from_parts(self._parts, config, sinks=[lambda event: self._recorder(event)])
        self.close = self._parts.close
        self.versions: list[AdapterVersion] = []
        for folder in folders:
            version = self._parts.reader.read(folder.name, str(folder))
            self._core.adapters.register(folder.name, version, self._clock.now())
            self.versions.append(version)

    def pin(self, names: Sequence[str]) -> None:
        """Bring adapters to the device, to stay."""
        for name in names:
            self._core.adapters.pin(name, True, self._clock.now())
            self._core.adapters.warm(name, self._clock.now())
        self._settle()

    def run(self, requests: Sequence[tuple[float, Request]]) -> Round:
        """Serve requests that arrive at their times, counted from now; return when all have ended."""
        recorder = self._recorder = Recorder()
        num_loads, start = self._core.stats().num_loads, self._clock.now()
        arrivals = [(start + after_s, request) for after_s, request in requests]
        EngineLoop(self._core, self._clock, on_outputs=lambda outputs, now: None, arrivals=arrivals).run()
        self._settle()
        assert [one.num_output_tokens for one in recorder.records] == [NUM_OUT] * len(requests), "a request fell short"
        warm = [one for one in recorder.records if one.adapter.startswith("warm")]
        cold = [one for one in recorder.records if not one.adapter.startswith("warm")]
        ttfts = {kind: [one.ttft_s or 0.0 for one in of] for kind, of in (("cold", cold), ("warm", warm))}
        gaps = [gap for one in warm for gap in one.gaps_s]
        return {
            "first token of a cold request, P50, ms": percentile_ms(ttfts["cold"], 50),
            "first token of a cold request, P99, ms": percentile_ms(ttfts["cold"], 99),
            "first token of a warm request, P99, ms": percentile_ms(ttfts["warm"], 99),
            "between tokens of warm requests, P50, ms": percentile_ms(gaps, 50),
            "between tokens of warm requests, P99, ms": percentile_ms(gaps, 99),
            STEP: percentile_ms(recorder.timeline.steps.took_s, 50),
            "waiting for the adapter alone, mean, ms": 1e3 * statistics.mean(one.adapter_wait_s for one in cold),
            "copies to the device": self._core.stats().num_loads - num_loads,
            SECONDS: self._clock.now() - start,
        }

    def _settle(self) -> None:
        while self._core.has_pending_work:
            self._clock.wait_until(self._clock.now() + 0.01)
            self._core.collect(self._clock.now())


def make_requests(count: int, vocab_size: int, label: str) -> list[Request]:
    """Make requests that go round the warm and the cold adapters in turn."""
    rng = np.random.default_rng(1)
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_OUT, ignore_eos=True)
    names = [
        f"cold-{index // 2 % NUM_COLD}" if index % 2 else f"warm-{index // 2 % NUM_WARM}" for index in range(count)
    ]
    return [
        Request(
            request_id=f"{label}-{index}",
            prompt=tuple(rng.integers(4, vocab_size, NUM_IN).tolist()),
            sampling=sampling,
            model=name,
        )
        for index, name in enumerate(names)
    ]


def measure(num_rounds: int, num_requests: int, load: float) -> dict[str, Any]:
    """Run everything; return the figures."""
    rng = np.random.default_rng(2)
    config = EngineConfig(
        model=ModelConfig(model=str(demo_model_path()), device="cpu", max_model_len=256),
        memory=MemoryConfig(num_pages=64, prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=NUM_SEATS),
    )
    warm = [f"warm-{index}" for index in range(NUM_WARM)]
    names = [*warm, *(f"cold-{index}" for index in range(NUM_COLD))]
    with tempfile.TemporaryDirectory() as path, Progress(transient=True) as progress:
        probe = build_parts(config, WallClock())
        base = probe.base
        folders = [write_synthetic_adapter(Path(path) / name, base, RANK, rng) for name in names]
        version = probe.reader.read(names[0], str(folders[0]))
        probe.close()
        kv_pages = NUM_SEATS * -(-(NUM_IN + NUM_OUT) // base.page.block_size)
        memory = replace(config.memory, num_pages=kv_pages + version.num_pages * len(names))
        config = replace(config, memory=memory)

        systems = {RESIDENT: System(config, folders, reads_host=False)}
        systems[RESIDENT].pin(names)
        at_once = [(0.0, request) for request in make_requests(num_requests, base.vocab_size, "all")]
        first, second = systems[RESIDENT].run(at_once), systems[RESIDENT].run(at_once)
        capacity = num_requests / min(first[SECONDS], second[SECONDS])
        times = np.cumsum(rng.exponential(1 / (load * capacity), num_requests)).tolist()
        spread = list(zip(times, make_requests(num_requests, base.vocab_size, "probe"), strict=True))
        step_s = systems[RESIDENT].run(spread)[STEP] / 1e3
        for steps in COPY_STEPS:
            bandwidth = round(version.host_bytes / (steps * step_s))
            adapters = AdapterConfig(link_bytes_per_s=bandwidth, eviction="none")
            for kind, reads_host in (("wait", False), ("host copy", True)):
                name = f"{kind}, {steps:g} steps"
                systems[name] = System(replace(config, adapters=adapters), folders, reads_host=reads_host)
                systems[name].pin(warm)

        task = progress.add_task("rounds", total=len(systems) * (num_rounds + 1))
        rounds: dict[str, list[Round]] = {name: [] for name in systems}
        for number in range(-1, num_rounds):  # one round to warm up
            times = np.cumsum(rng.exponential(1 / (load * capacity), num_requests)).tolist()
            for name in rotated(list(systems), number):
                requests = make_requests(num_requests, base.vocab_size, f"{name}-{number}")
                outcome = systems[name].run(list(zip(times, requests, strict=True)))
                if number >= 0:
                    rounds[name].append(outcome)
                progress.advance(task)
        for system in systems.values():
            system.close()
    return {
        "machine": describe_machine(torch.device("cpu")),
        "load_average": os.getloadavg(),
        "command": "python bench/cold_start.py",
        "adapter_bytes": version.host_bytes,
        "step_s": step_s,
        "requests": num_requests,
        "load": load,
        "requests_per_s": load * capacity,
        "rounds": rounds,
        "medians": {name: medians(outcomes) for name, outcomes in rounds.items()},
        "over_resident": {name: ratios(outcomes, rounds[RESIDENT]) for name, outcomes in rounds.items()},
    }


def ratios(outcomes: Sequence[Round], resident: Sequence[Round]) -> dict[str, tuple[float, float, float]]:
    """Return lowest, median and highest ratio to the resident engine over the rounds, of every time."""
    found = {}
    for title in outcomes[0]:
        if title.endswith("ms") and not title.startswith("waiting"):
            each = [one[title] / other[title] for one, other in zip(outcomes, resident, strict=True)]
            found[title] = min(each), statistics.median(each), max(each)
    return found


def share(found: tuple[float, float, float]) -> str:
    lowest, median, highest = found
    return f"{median:.2f} ({lowest:.2f} to {highest:.2f})"


def page(figures: dict[str, Any]) -> str:
    names = list(figures["medians"])
    over = figures["over_resident"]
    medians = figures["medians"]
    rows = [(title, *(f"{medians[name][title]:.3g}" for name in names)) for title in medians[RESIDENT]]
    shares = [(title, *(share(over[name][title]) for name in names[1:])) for title in over[RESIDENT]]
    lines = [
        "# Cold starts: waiting for the copy, or running from the host copy",
        "",
        f"`{figures['command']}` on {figures['machine']}, which was shared: load average "
        f"{figures['load_average'][0]:.1f} at the end. The demo model; adapters of rank {RANK} on all linears, "
        f"{figures['adapter_bytes'] / 2**20:.1f} MiB each; {figures['requests']} requests a round of {NUM_IN} tokens "
        f"in and {NUM_OUT} out, half of them cold, arriving by a Poisson process at {figures['load']:.0%} of what the "
        f"resident engine can do ({figures['requests_per_s']:.1f} a second). A copy is paced to last "
        f"{' or '.join(f'{steps:g}' for steps in COPY_STEPS)} steps of {1e3 * figures['step_s']:.1f} ms. All engines "
        f"take turns on the same arrivals; medians of {len(figures['rounds'][RESIDENT])} rounds. Core and loop in "
        "process, no HTTP.",
        "",
        *table(("", *names), rows),
        "",
        "Over the resident engine in the same round: median, and range over the rounds.",
        "",
        *table(("", *names[1:]), shares),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__, quick="few requests, one round")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--load", type=float, default=0.5, help="share of what the resident engine can do")
    options = parser.parse_args()
    num_rounds, num_requests = (1, 16) if options.quick else (options.rounds, 64)
    figures = measure(num_rounds, num_requests, options.load)
    publish("cold_start", figures, page(figures), is_kept=not options.quick)


if __name__ == "__main__":
    main()
