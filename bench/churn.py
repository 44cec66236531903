"""The cost of churn for requests that decode: every request another adapter, and a pool too small for all of them.

    python bench/churn.py [--quick] [--also wait,idle] [--threads 1]

The engine's real core and loop on the wall clock, with the torch executor on the CPU; no HTTP. Four engines of the
same model take turns on the same arrivals, round after round, in one process:

* *resident*: the pool holds every adapter, and all are on the device before the first request;
* *churn*: the pool holds a fifth of them, the rest waits in host memory, so every request brings a copy to the device
  and an eviction with it (a prefetch may have brought it before the request is looked at);
* *from disk*: the same, and host memory holds a quarter of them, so that most copies begin with an image that is read
  from disk (``--image-cache``), where it was written when it left host memory;
* *from files*: the same without images on disk, so that most copies begin with a file that is read, checked and packed
  again.

With `--also`, engines as *from files* take turns with them, to find out what its figures come from: in *wait* requests
wait for their whole adapter (`--cold-start wait`), so no step waits for a layer; in *idle* the processes that read
files take the time that no other thread wants (Linux' `SCHED_IDLE`), but for reads that a step waits for. With
`--threads 1` steps leave processors to the others.

Requests arrive by a Poisson process at a share of what the resident engine can do, measured first, and go round all
adapters in turn: the worst order for a cache. Times are taken where tokens leave the loop. After the rounds every
adapter is unloaded and every page must be free. Writes `results/churn.json` and `.md`, with `--also`
or `--threads` `results/churn_also` or `results/churn_threads` instead.
"""

from __future__ import annotations

import os
import resource
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from live import LiveEngine
from publishing import Others, arguments, publish, reason_to_refuse, table
from ratios import Ratio, ratio_by_round
from rich.progress import Progress

from manylora.core.adapters.shape import BaseShape
from manylora.core.clock import WallClock
from manylora.core.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.core.types import Request, SamplingParams, Tier
from manylora.demo import demo_model_path
from manylora.execution.build import build_parts
from manylora.execution.device import describe_machine
from manylora.lab.bench.rounds import in_turns
from manylora.lab.bench.sweep import write_synthetic_adapter

RANKS = (8, 16, 32, 64)
NUM_SEATS = 16
NUM_IN, NUM_OUT = 24, 48
MIB = 2**20

GAP_P99 = "between tokens, P99, ms"
ALSO_MEANT = (
    " *Wait* and *idle* are as *from files*. In *wait* requests wait for their whole adapter, so that no step waits "
    "for a layer. In *idle* the processes that read files take the time that no other thread wants, but for reads "
    "that a step waits for."
)
Round = dict[str, float]
"""The figures of one engine in one round, by the title that they are shown under."""


class System(LiveEngine):
    """One engine, kept from round to round.

    Args:
        config: The engine.
        folders: Its adapters.
        is_idle: Whether its processes that read files take the time that no other thread wants.
    """

    def __init__(self, config: EngineConfig, folders: Sequence[Path], *, is_idle: bool = False) -> None:
        before = readers()
        super().__init__(config, folders)
        self._readers = readers() - before
        self._is_idle = is_idle

    def warm_all(self) -> None:
        """Bring every adapter to the device."""
        for status in self.core.adapters.statuses(self.clock.now()):
            self.core.adapters.warm(status.name, self.clock.now())
        self.settle()
        assert self.core.stats().num_resident == len(self.versions)

    def run(self, requests: Sequence[tuple[float, Request]]) -> Round:
        """Serve requests that arrive at their times, counted from now; return when all have ended."""
        if self._is_idle:
            for pid in self._readers:
                make_idle(pid)
        others = readers() - self._readers
        before, interrupted, read_s = self.core.stats(), interruptions(), self._reading_s()
        recorder = self.serve(requests)
        interrupted = interruptions() - interrupted
        self._readers |= readers() - others  # a second one starts when two files are read at once
        records, loads = recorder.records, recorder.timeline.loads[Tier.DEVICE]
        assert [one.num_output_tokens for one in records] == [NUM_OUT] * len(requests), "a request fell short"
        after = self.core.stats()
        assert not (after.num_kv_pages or after.num_prefix_pages), "pages outlive their requests"
        self.core.check_integrity()
        gaps, ttfts = [gap for one in records for gap in one.gaps_s], [one.ttft_s or 0.0 for one in records]
        return {
            "between tokens, P50, ms": percentile_ms(gaps, 50),
            "between tokens, P90, ms": percentile_ms(gaps, 90),
            GAP_P99: percentile_ms(gaps, 99),
            "a step, P99, ms": percentile_ms(recorder.timeline.steps.took_s, 99),
            "interruptions a step": interrupted / len(recorder.timeline.steps.took_s),
            "first token, P50, ms": percentile_ms(ttfts, 50),
            "first token, P99, ms": percentile_ms(ttfts, 99),
            "longest wait for a seat, ms": 1e3 * max(one.queueing_s or 0.0 for one in records),
            "processor time of readers, ms a request": 1e3 * (self._reading_s() - read_s) / len(requests),
            "copy to the device, P50, ms": percentile_ms(loads.busy_s, 50) if loads.busy_s else 0.0,
            "copies to the device": after.num_loads - before.num_loads,
            "reads from disk": after.num_disk_loads - before.num_disk_loads,
            "evictions": after.num_evictions - before.num_evictions,
            "pre-emptions": after.num_preemptions - before.num_preemptions,
            "share of requests that found their adapter": (after.num_adapter_hits - before.num_adapter_hits)
            / len(requests),
        }

    def _reading_s(self) -> float:
        """Return the processor time of its processes that read files."""
        times = [psutil.Process(pid).cpu_times() for pid in self._readers]
        return float(sum(one.user + one.system for one in times))

    def seconds(self, requests: Sequence[Request]) -> float:
        """Return how long the requests take when all arrive at once."""
        began = self.clock.now()
        self.run([(0.0, request) for request in requests])
        return self.clock.now() - began

    def close(self) -> int:
        """Unload everything; return the pages that are still held."""
        for status in self.core.adapters.statuses(self.clock.now()):
            self.core.adapters.unregister(status.name, self.clock.now())
        self.settle()
        self.core.check_integrity()
        stats = self.core.stats()
        assert stats.host_bytes == stats.num_host == 0, "the host tier keeps what was unloaded"
        self.parts.close()
        return stats.num_pages - stats.num_free_pages


def readers() -> set[int]:
    """Return the processes that read files for the engines of this one."""
    children = psutil.Process().children()
    return {child.pid for child in children if any("reader_service" in word for word in child.cmdline())}


def make_idle(pid: int) -> None:
    """Give the threads of a reader that have a low priority the time that no other thread wants; it has read before."""
    threads = [one.id for one in psutil.Process(pid).threads() if os.getpriority(os.PRIO_PROCESS, one.id) > 0]
    assert threads, "readers work at a low priority"
    for thread in threads:
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def interruptions() -> int:
    """Return how often threads of this process have lost a processor that they still wanted."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def percentile_ms(seconds: Sequence[float], share: float) -> float:
    return 1e3 * float(np.percentile(seconds, share))


def write_adapters(folder: Path, base: BaseShape, count: int) -> list[Path]:
    """Write adapters on all linears with random weights."""
    rng = np.random.default_rng(0)
    return [
        write_synthetic_adapter(folder / f"adapter-{index}", base, RANKS[index % len(RANKS)], rng)
        for index in range(count)
    ]


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


def build_systems(
    path: Path, num_adapters: int, also: Sequence[str] = ()
) -> tuple[dict[str, System], list[Path], BaseShape]:
    """Build the engines, and the adapters they serve."""
    config = EngineConfig(
        model=ModelConfig(model=str(demo_model_path()), device="cpu", max_model_len=256),
        memory=MemoryConfig(num_pages=512, prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=NUM_SEATS),
        adapters=AdapterConfig(max_adapter_share=1.0),  # a probe has no room beside the largest adapter
        cache_dir=str(path / "cache"),
    )
    probe = build_parts(config, WallClock())
    base = probe.base
    folders = write_adapters(path, base, num_adapters)
    sizes = [probe.reader.read(folder.name, str(folder)) for folder in folders[: len(RANKS)]]
    probe.close()
    adapter_pages = sum(version.num_pages for version in sizes) * num_adapters // len(RANKS)
    host_bytes = sum(version.host_bytes for version in sizes) * num_adapters // len(RANKS)
    kv_pages = NUM_SEATS * -(-(NUM_IN + NUM_OUT) // base.page.block_size)

    def system(
        num_pages: int, host_share: float, *, images: int = 0, cold_start: str = "auto", is_idle: bool = False
    ) -> System:
        memory = replace(config.memory, num_pages=num_pages)
        adapters = AdapterConfig(
            host_bytes=int(host_bytes * host_share), image_cache_bytes=images, cold_start=cold_start
        )
        return System(replace(config, memory=memory, adapters=adapters), folders, is_idle=is_idle)

    few = kv_pages + adapter_pages // 5
    systems = {
        "resident": system(kv_pages + adapter_pages, 1.0),
        "churn": system(few, 1.0),
        "from disk": system(few, 0.25, images=AdapterConfig().image_cache_bytes),
        "from files": system(few, 0.25),
    }
    if "wait" in also:
        systems["wait"] = system(few, 0.25, cold_start="wait")
    if "idle" in also:
        systems["idle"] = system(few, 0.25, is_idle=True)
    return systems, folders, base


def measure(
    num_rounds: int, num_requests: int, num_adapters: int, load: float, also: Sequence[str], command: str
) -> dict[str, Any]:
    """Run everything; return the figures."""
    process, others = psutil.Process(), Others()
    rss: list[int] = []
    rng = np.random.default_rng(2)
    with tempfile.TemporaryDirectory() as folder, Progress(transient=True) as progress:
        task = progress.add_task("rounds", total=(4 + len(also)) * (num_rounds + 1) + 1)
        systems, folders, base = build_systems(Path(folder), num_adapters, also)
        systems["resident"].warm_all()
        saturating = [make_requests(num_requests // 2, folders, base.vocab_size, f"all-{turn}") for turn in range(2)]
        capacity = num_requests // 2 / min(systems["resident"].seconds(requests) for requests in saturating)
        progress.advance(task)
        rounds: dict[str, list[Round]] = {name: [] for name in systems}
        gaps_s = {number: rng.exponential(1 / (load * capacity), num_requests) for number in range(-1, num_rounds)}
        for number, name in in_turns(list(systems), num_rounds):
            times = np.cumsum(gaps_s[number]).tolist()
            requests = make_requests(num_requests, folders, base.vocab_size, f"{name}-{number}")
            outcome = systems[name].run(list(zip(times, requests, strict=True)))
            if number >= 0:
                rounds[name].append(outcome)
            progress.advance(task)
            rss.append(process.memory_info().rss)
        held = {name: system.close() for name, system in systems.items()}
    return {
        "machine": describe_machine(torch.device("cpu")),
        "command": command,
        "also": list(also),
        "adapters": num_adapters,
        "ranks": RANKS,
        "requests": num_requests,
        "tokens_in": NUM_IN,
        "tokens_out": NUM_OUT,
        "load": load,
        "requests_per_s": load * capacity,
        "rounds": rounds,
        "medians": {name: medians(outcomes) for name, outcomes in rounds.items()},
        "gap_p99_over_resident": {name: asdict(over_resident(rounds, name)) for name in rounds},
        "busy_share": others.share(),
        "pages_held": held,
        "rss_bytes": rss,
    }


def medians(outcomes: Sequence[Round]) -> Round:
    return {title: statistics.median(one[title] for one in outcomes) for title in outcomes[0]}


def spread(outcomes: Sequence[Round]) -> str:
    """Say how far the rounds lie apart: on a busy machine too far for any ratio."""
    values = [one[GAP_P99] for one in outcomes]
    return f"{min(values):.1f} to {max(values):.1f} ms"


def over_resident(rounds: dict[str, list[Round]], name: str) -> Ratio:
    """Return P99 between tokens over that of the resident engine in the same round."""
    return ratio_by_round([one[GAP_P99] for one in rounds[name]], [one[GAP_P99] for one in rounds["resident"]])


def page(figures: dict[str, Any]) -> str:
    names = list(figures["medians"])
    medians = figures["medians"]
    ratios = [Ratio(**one) for one in figures["gap_p99_over_resident"].values()]
    rows = [("**P99 between tokens, over resident**", *(f"**{one}**" for one in ratios))]
    rows += [(title, *(f"{medians[name][title]:.3g}" for name in names)) for title in medians["resident"]]
    rows.insert(4, ("the same, over the rounds", *(spread(figures["rounds"][name]) for name in names)))
    rows.append(("pages held when all is unloaded", *map(str, figures["pages_held"].values())))
    num_rounds = len(figures["rounds"]["resident"])
    rss = figures["rss_bytes"]
    lines = [
        "# Churn: the cost of loading for requests that decode",
        "",
        f"`{figures['command']}` on {figures['machine']}: the demo model and {figures['adapters']} "
        f"adapters of rank {RANKS[0]} to {RANKS[-1]} on all linears; {figures['requests']} requests a round of "
        f"{NUM_IN} tokens in and {NUM_OUT} out, each with the next "
        f"adapter, arriving by a Poisson process at {figures['load']:.0%} of what the resident engine can do "
        f"({figures['requests_per_s']:.1f} a second). They take turns on the same arrivals; medians of "
        f"{num_rounds} rounds; the ratio is taken in each round: its median, and a 95 % interval. Core and loop in "
        "process, no HTTP. An interruption is a processor that a thread of this process loses while it wants it."
        + (ALSO_MEANT if figures["also"] else ""),
        "",
        *table(("", *names), rows),
        "",
        f"Memory of the process: {rss[2] / MIB:,.0f} MiB after the round to warm up, {rss[len(rss) // 2] / MIB:,.0f} "
        f"after half of the rounds, {rss[-1] / MIB:,.0f} after all (pages count from their first use on). Every "
        "request ended with all its tokens.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__, quick="few requests, one round")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--load", type=float, default=0.5, help="share of what the resident engine can do")
    parser.add_argument("--also", type=lambda names: names.split(","), default=[], help="wait, idle, or both")
    parser.add_argument("--threads", type=int, help="of a step; by default as many as torch takes")
    options = parser.parse_args()
    if unknown := set(options.also) - {"wait", "idle"}:
        parser.error(f"Got --also {sorted(unknown)[0]}, expected wait, idle, or both with a comma")
    num_rounds, num_requests = (1, 48) if options.quick else (options.rounds, 64)
    num_adapters = 48 if options.quick else 96
    name, command = "churn", "python bench/churn.py"
    if options.also:
        name, command = "churn_also", f"{command} --also {','.join(options.also)}"
    if options.threads:
        torch.set_num_threads(options.threads)
        name, command = "churn_threads", f"{command} --threads {options.threads}"
    figures = measure(num_rounds, num_requests, num_adapters, options.load, options.also, command)
    refused = reason_to_refuse(num_rounds, figures["busy_share"])
    publish(name, figures, page(figures), is_kept=not options.quick, refused=refused)


if __name__ == "__main__":
    main()
