"""What churn costs those who decode: every request another adapter, and a pool too small for all of them.

    python bench/churn.py [--quick]

The engine's real core and loop on the wall clock, with the torch executor on the CPU; no HTTP. Three engines of the
same model take turns on the same arrivals, round after round, in one process:

* *resident*: the pool holds every adapter, and all are on the device before the first request;
* *churn*: the pool holds a fifth of them, the rest waits in host memory, so every request brings a copy to the device
  and an eviction with it (a prefetch may have brought it before the request is looked at);
* *from disk*: the same, and host memory holds a quarter of them, so that most copies begin with a file that is read,
  checked and packed again.

Requests arrive by a Poisson process at a share of what the resident engine can do, measured first, and go round all
adapters in turn: the worst order for a cache. Times are taken where tokens leave the loop. After the rounds every
adapter is unloaded and every page must be free. Writes `results/churn.json` and `.md`.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from rich.progress import Progress
from safetensors.numpy import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from manylora.adapters.shape import BaseShape
from manylora.clock import WallClock
from manylora.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.demo import demo_model_path
from manylora.engine.core import EngineCore
from manylora.engine.loop import EngineLoop
from manylora.events import AdapterLoaded, Event, RequestAdmitted, StepFinished
from manylora.execution.build import build_parts
from manylora.types import AdapterVersion, Output, Request, SamplingParams, Tier

RESULTS = Path(__file__).resolve().parent / "results"
RANKS = (8, 16, 32, 64)
NUM_SEATS = 16
NUM_IN, NUM_OUT = 24, 48
MIB = 2**20

Samples = list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one engine did in one round; times in milliseconds."""

    gap_p50: float
    gap_p90: float
    gap_p99: float
    step_p99: float
    ttft_p50: float
    ttft_p99: float
    longest_wait: float
    load_p50: float
    loads: int
    reads: int
    evictions: int
    preemptions: int
    hits: float


class Watch:
    """Takes events and outputs of one round."""

    def __init__(self, clock: WallClock) -> None:
        self._clock = clock
        self._last_at: dict[str, float] = {}
        self.gaps: Samples = []
        self.ttfts: Samples = []
        self.steps: Samples = []
        self.waits: Samples = []
        self.copies: Samples = []
        self.arrived_at: dict[str, float] = {}
        self.num_tokens: Counter[str] = Counter()

    def take_event(self, event: Event) -> None:
        match event:
            case StepFinished(took_s=took_s):
                self.steps.append(took_s)
            case RequestAdmitted(waited_s=waited_s):
                self.waits.append(waited_s)
            case AdapterLoaded(tier=Tier.DEVICE, took_s=took_s):
                self.copies.append(took_s)

    def take_outputs(self, outputs: list[Output], _now: float) -> None:
        now = self._clock.now()
        for output in outputs:
            assert output.error is None, output.error
            if not output.tokens:
                continue
            last_at = self._last_at.get(output.request_id)
            if last_at is None:
                self.ttfts.append(now - self.arrived_at[output.request_id])
            else:
                self.gaps.append(now - last_at)
            self._last_at[output.request_id] = now
            self.num_tokens[output.request_id] += len(output.tokens)


class System:
    """One engine, kept from round to round."""

    def __init__(self, config: EngineConfig, folders: Sequence[Path]) -> None:
        self._clock = WallClock()
        self._parts = build_parts(config, self._clock)
        self._watch = Watch(self._clock)
        self._core = EngineCore.from_parts(self._parts, config, sinks=[lambda event: self._watch.take_event(event)])
        self.versions: list[AdapterVersion] = []
        for folder in folders:
            version = self._parts.reader.read(folder.name, str(folder))
            self._core.adapters.register(folder.name, version, self._clock.now())
            self.versions.append(version)

    def warm_all(self) -> None:
        """Bring every adapter to the device."""
        for status in self._core.adapters.statuses(self._clock.now()):
            self._core.adapters.warm(status.name, self._clock.now())
        self._settle()
        assert self._core.stats().num_resident == len(self.versions)

    def run(self, requests: Sequence[tuple[float, Request]]) -> Round:
        """Serve requests that arrive at their times, counted from now; return when all have ended."""
        watch = self._watch = Watch(self._clock)
        before = self._core.stats()
        start = self._clock.now()
        arrivals = [(start + after_s, request) for after_s, request in requests]
        watch.arrived_at = {request.request_id: at for at, request in arrivals}
        EngineLoop(self._core, self._clock, on_outputs=watch.take_outputs, arrivals=arrivals).run()
        self._settle()
        assert all(watch.num_tokens[request.request_id] == NUM_OUT for _, request in requests), "a request fell short"
        after = self._core.stats()
        assert not (after.num_kv_pages or after.num_prefix_pages), "pages outlive their requests"
        self._core.check_integrity()
        gap_p50, gap_p90, gap_p99 = (1e3 * float(p) for p in np.percentile(watch.gaps, (50, 90, 99)))
        return Round(
            gap_p50=gap_p50,
            gap_p90=gap_p90,
            gap_p99=gap_p99,
            step_p99=1e3 * float(np.percentile(watch.steps, 99)),
            ttft_p50=1e3 * float(np.percentile(watch.ttfts, 50)),
            ttft_p99=1e3 * float(np.percentile(watch.ttfts, 99)),
            longest_wait=1e3 * max(watch.waits),
            load_p50=1e3 * statistics.median(watch.copies) if watch.copies else 0.0,
            loads=after.num_loads - before.num_loads,
            reads=after.num_disk_loads - before.num_disk_loads,
            evictions=after.num_evictions - before.num_evictions,
            preemptions=after.num_preemptions - before.num_preemptions,
            hits=(after.num_adapter_hits - before.num_adapter_hits) / len(requests),
        )

    def seconds(self, requests: Sequence[Request]) -> float:
        """Return how long the requests take when all arrive at once."""
        began = self._clock.now()
        self.run([(0.0, request) for request in requests])
        return self._clock.now() - began

    def close(self) -> int:
        """Unload everything; return the pages that are still held."""
        for status in self._core.adapters.statuses(self._clock.now()):
            self._core.adapters.unregister(status.name, self._clock.now())
        self._settle()
        self._core.check_integrity()
        stats = self._core.stats()
        assert stats.host_bytes == stats.num_host == 0, "the host tier keeps what was unloaded"
        self._parts.close()
        return stats.num_pages - stats.num_free_pages

    def _settle(self) -> None:
        while self._core.has_pending_work:
            self._clock.wait_until(self._clock.now() + 0.01)
            self._core.collect(self._clock.now())


def model_path(folder: Path) -> Path:
    """Return the demo model, or a random one of its size where its files are not at hand."""
    demo = demo_model_path()
    if (demo / "model.safetensors").exists():
        return demo
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=115,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    return folder / "base"


def write_adapters(folder: Path, base: BaseShape, count: int) -> list[Path]:
    """Write adapters on all linears with random weights, in PEFT's format."""
    rng = np.random.default_rng(0)
    folders = []
    for index in range(count):
        rank = RANKS[index % len(RANKS)]
        place = folder / f"adapter-{index}"
        place.mkdir()
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear", "bias": "none"}
        (place / "adapter_config.json").write_text(json.dumps(config))
        tensors: dict[str, np.ndarray[Any, Any]] = {}
        for module in base.modules:
            if module.name in base.all_linear:
                key = f"base_model.model.{module.name}"
                a = rng.standard_normal((rank, module.in_features), dtype=np.float32)
                b = rng.standard_normal((module.out_features, rank), dtype=np.float32)
                tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"] = a / 16, b / 16
        save_file(tensors, place / "adapter_model.safetensors")
        folders.append(place)
    return folders


def make_requests(count: int, folders: Sequence[Path], vocab_size: int, label: str) -> list[Request]:
    """Make requests that go round the adapters in turn."""
    rng = np.random.default_rng(1)
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_OUT, ignore_eos=True)
    return [
        Request(
            request_id=f"{label}-{index}",
            prompt=tuple(rng.integers(4, vocab_size, NUM_IN).tolist()),
            sampling=sampling,
            model=folders[index % len(folders)].name,
        )
        for index in range(count)
    ]


def build_systems(path: Path, num_adapters: int) -> tuple[dict[str, System], list[Path], BaseShape]:
    """Build the three engines, and the adapters they serve."""
    model = model_path(path)
    config = EngineConfig(
        model=ModelConfig(model=str(model), device="cpu", max_model_len=256),
        memory=MemoryConfig(num_pages=64, prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=NUM_SEATS),
    )
    probe = build_parts(config, WallClock())
    base = probe.base
    folders = write_adapters(path, base, num_adapters)
    sizes = [probe.reader.read(folder.name, str(folder)) for folder in folders[: len(RANKS)]]
    probe.close()
    adapter_pages = sum(version.num_pages for version in sizes) * num_adapters // len(RANKS)
    host_bytes = sum(version.host_bytes for version in sizes) * num_adapters // len(RANKS)
    kv_pages = NUM_SEATS * -(-(NUM_IN + NUM_OUT) // base.page.block_size)

    def system(num_pages: int, host_share: float) -> System:
        memory = replace(config.memory, num_pages=num_pages)
        adapters = AdapterConfig(host_bytes=int(host_bytes * host_share))
        return System(replace(config, memory=memory, adapters=adapters), folders)

    few = kv_pages + adapter_pages // 5
    systems = {
        "resident": system(kv_pages + adapter_pages, 1.0),
        "churn": system(few, 1.0),
        "from disk": system(few, 0.25),
    }
    return systems, folders, base


def measure(num_rounds: int, num_requests: int, num_adapters: int, load: float) -> dict[str, Any]:
    """Run everything; return the figures."""
    process = psutil.Process()
    rss: list[int] = []
    rng = np.random.default_rng(2)
    with tempfile.TemporaryDirectory() as folder, Progress(transient=True) as progress:
        task = progress.add_task("rounds", total=3 * (num_rounds + 1) + 1)
        systems, folders, base = build_systems(Path(folder), num_adapters)
        systems["resident"].warm_all()
        saturating = [make_requests(num_requests // 2, folders, base.vocab_size, f"all-{turn}") for turn in range(2)]
        capacity = num_requests // 2 / min(systems["resident"].seconds(requests) for requests in saturating)
        progress.advance(task)
        rounds: dict[str, list[Round]] = {name: [] for name in systems}
        for number in range(-1, num_rounds):  # one round to warm up
            times = np.cumsum(rng.exponential(1 / (load * capacity), num_requests)).tolist()
            for name in rotated(list(systems), number):
                requests = make_requests(num_requests, folders, base.vocab_size, f"{name}-{number}")
                outcome = systems[name].run(list(zip(times, requests, strict=True)))
                if number >= 0:
                    rounds[name].append(outcome)
                progress.advance(task)
            rss.append(process.memory_info().rss)
        held = {name: system.close() for name, system in systems.items()}
    return {
        "machine": {
            "cpu": cpu_name(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "command": "python bench/churn.py",
        "model": "demo" if (demo_model_path() / "model.safetensors").exists() else "random, of the demo's size",
        "adapters": num_adapters,
        "ranks": RANKS,
        "requests": num_requests,
        "tokens_in": NUM_IN,
        "tokens_out": NUM_OUT,
        "load": load,
        "requests_per_s": load * capacity,
        "rounds": {name: [asdict(one) for one in outcomes] for name, outcomes in rounds.items()},
        "medians": {name: medians(outcomes) for name, outcomes in rounds.items()},
        "gap_p99_ratio": {name: ratio(rounds, name) for name in rounds},
        "pages_held": held,
        "rss_bytes": rss,
    }


def rotated(names: list[str], number: int) -> list[str]:
    """Let another one go first in every round."""
    first = number % len(names)
    return names[first:] + names[:first]


def medians(outcomes: Sequence[Round]) -> dict[str, float]:
    return {field: statistics.median(getattr(one, field) for one in outcomes) for field in Round.__slots__}


def spread(outcomes: Sequence[dict[str, float]]) -> str:
    """Say how far the rounds lie apart: on a busy machine too far for any ratio."""
    values = [one["gap_p99"] for one in outcomes]
    return f"{min(values):.1f} to {max(values):.1f} ms"


def ratio(rounds: dict[str, list[Round]], name: str) -> float:
    """Return P99 between tokens over that of the resident engine: the median over rounds of the ratio in each."""
    return statistics.median(
        one.gap_p99 / other.gap_p99 for one, other in zip(rounds[name], rounds["resident"], strict=True)
    )


def table(figures: dict[str, Any]) -> str:
    names = list(figures["medians"])
    machine = figures["machine"]
    rows: list[tuple[str, Callable[[str], str]]] = [
        ("**P99 between tokens, over resident**", lambda name: f"**{figures['gap_p99_ratio'][name]:.2f}**")
    ]
    for title, field, form in (
        ("between tokens, P50", "gap_p50", "{:.2f} ms"),
        ("between tokens, P90", "gap_p90", "{:.2f} ms"),
        ("between tokens, P99", "gap_p99", "{:.2f} ms"),
        ("a step, P99", "step_p99", "{:.2f} ms"),
        ("first token, P50", "ttft_p50", "{:.1f} ms"),
        ("first token, P99", "ttft_p99", "{:.1f} ms"),
        ("longest wait for a seat", "longest_wait", "{:.1f} ms"),
        ("copy to the device, P50", "load_p50", "{:.2f} ms"),
        ("copies to the device", "loads", "{:.0f}"),
        ("reads from disk", "reads", "{:.0f}"),
        ("evictions", "evictions", "{:.0f}"),
        ("pre-emptions", "preemptions", "{:.0f}"),
        ("requests that found their adapter on the device", "hits", "{:.0%}"),
    ):
        rows.append((title, lambda name, field=field, form=form: form.format(figures["medians"][name][field])))  # type: ignore[misc]
    rows.insert(4, ("the same, over the rounds", lambda name: spread(figures["rounds"][name])))
    rows.append(("pages held when all is unloaded", lambda name: str(figures["pages_held"][name])))
    num_rounds = len(figures["rounds"]["resident"])
    rss = figures["rss_bytes"]
    lines = [
        "# Churn: what loading costs those who decode",
        "",
        f"`{figures['command']}` on {machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}: the demo "
        f"model ({figures['model']}) and {figures['adapters']} adapters of rank {RANKS[0]} to {RANKS[-1]} on all "
        f"linears; {figures['requests']} requests a round of {NUM_IN} tokens in and {NUM_OUT} out, each with the next "
        f"adapter, arriving by a Poisson process at {figures['load']:.0%} of what the resident engine can do "
        f"({figures['requests_per_s']:.1f} a second). The three take turns on the same arrivals; medians of "
        f"{num_rounds} rounds, the ratio that of each round's pair. Core and loop in process, no HTTP.",
        "",
        f"| | {' | '.join(names)} |",
        f"|---|{'---:|' * len(names)}",
        *(f"| {title} | {' | '.join(map(show, names))} |" for title, show in rows),
        "",
        f"Memory of the process: {rss[0] / MIB:,.0f} MiB after the round to warm up, {rss[len(rss) // 2] / MIB:,.0f} "
        f"after half of the rounds, {rss[-1] / MIB:,.0f} after all (pages count from their first use on). Every "
        "request ended with all its tokens.",
        "",
    ]
    return "\n".join(lines)


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few requests, one round; writes nothing")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--load", type=float, default=0.5, help="share of what the resident engine can do")
    options = parser.parse_args()
    num_rounds, num_requests = (1, 48) if options.quick else (options.rounds, 64)
    figures = measure(num_rounds, num_requests, num_adapters=48 if options.quick else 96, load=options.load)
    print(table(figures))
    if not options.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "churn.json").write_text(json.dumps(figures, indent=2) + "\n")
        (RESULTS / "churn.md").write_text(table(figures))


if __name__ == "__main__":
    main()
