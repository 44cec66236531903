"""Time to first token when every measured request is cold: wait, assist, layers, the choice between them, all resident.

    python bench/cold_start.py [--quick]

The engine's real core and loop on the wall clock, with the torch executor on the CPU; no HTTP. Requests arrive by a
Poisson process. Every second one goes to an adapter that is not on the device (*cold*): idle adapters are dropped at
once, and cold requests go round many. The others go to pinned adapters: they are the *warm neighbours*, whose tokens
must not come later for it. Engines of one model take turns on the same arrivals, in an order that rotates:

* *all resident*: the pool holds every adapter, and all are on the device before the first request;
* *wait*, *assist*, *layers*: the mode of that name (`--cold-start`), for every cold request;
* *auto*: the mode that the model predicts to be best, request by request.

A mode that the executor cannot do is left out, with a line that says so.

The link is paced, so that a copy lasts for a stated number of steps of a decoding batch, measured first:

    bytes per second = bytes of an adapter / (steps x seconds of a step)

An A10 with Llama-2-7B and rank 64 has half a step: 4 projections of 32 layers x 2 x 64 x 4096 weights x 2 bytes are
134 MB, which take 11 ms at 12 GB/s (pageable memory, or two engines on a PCIe 4 link); a step reads 13.5 GB of weights
at 600 GB/s in 22 ms. Four steps are eight times that: all linears, and a link that others share. In a third setting the
copy takes half a step, and host memory holds half of the cold adapters: each is read from its file (which may be in the
page cache).

Every running request has a seat: one that waits for a seat measures the queue, and not the way of its adapter. The heap
is frozen before the first round, as a server freezes its own.

Statistics, chosen before any run: in each round the P99 over the requests (or gaps), and its ratio to that of the
resident engine in the same round, on the same arrivals (`bench/ratios.py`). Of 600 requests half are cold.
Modes that are not the engine's choice, and reads from disk, serve the first sixth of the round's requests, and are
compared with the same requests of the resident engine. Percentiles in milliseconds are over all rounds together. Goals,
for *auto* with images in host memory: 1.10 at the P99 of the first token of cold requests, and 1.05 at the P99 between
tokens of warm ones. Writes `results/cold_start.json` and `.md`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from churn import percentile_ms
from live import LiveEngine
from publishing import Others, Steps, arguments, publish, reason_to_refuse, table
from ratios import Ratio, ratio_by_round

from manylora.core.clock import WallClock
from manylora.core.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.core.engine.adapters.cold_starts import possible_modes
from manylora.core.types import ColdStart, Request, SamplingParams
from manylora.demo import demo_model_path
from manylora.execution.build import build_parts
from manylora.execution.device import describe_machine
from manylora.lab.bench.rounds import in_turns
from manylora.lab.bench.sweep import write_synthetic_adapter
from manylora.serving.hosting.engine.startup import freeze_start_up_heap

RANK = 64
NUM_WARM, NUM_COLD = 4, 32
NUM_SEATS = 32
NUM_IN, NUM_OUT = 24, 24
FEWER = 6
"""Sides without a goal serve so many times fewer requests."""

COPY_STEPS = (0.5, 4.0)
FROM_DISK = "from disk"
RESIDENT = "all resident"
MODES = (*(mode.value for mode in ColdStart), "auto")
COLD_TTFT, WARM_TTFT = "first token of cold requests", "first token of warm requests"
WARM_GAPS, ALL_GAPS = "between tokens of warm requests", "between tokens of all requests"


GOALS = {COLD_TTFT: 1.10, WARM_GAPS: 1.05}
"""Most that the P99 may be of the resident engine's, where the engine chooses."""


@dataclass(frozen=True)
class Side:
    """An engine of the comparison, by the mode of cold requests and the setting of its link."""

    name: str
    mode: str
    setting: str
    copy_steps: float

    @property
    def has_goal(self) -> bool:
        """Whether the goals are for this one."""
        return self.mode == "auto" and self.setting != FROM_DISK


@dataclass(frozen=True)
class Served:
    """A request that was served, by its number in the round; times in seconds."""

    number: int
    is_cold: bool
    first_token_s: float
    gaps_s: tuple[float, ...]


@dataclass(frozen=True)
class Round:
    """One engine in one round; times in seconds."""

    served: list[Served]
    seconds: float
    step_s: float
    num_copies: int

    def samples(self, title: str, num_requests: int) -> list[float]:
        """Return the samples of the first requests."""
        taken = [one for one in self.served if one.number < num_requests]
        if title in (COLD_TTFT, WARM_TTFT):
            return [one.first_token_s for one in taken if one.is_cold == (title == COLD_TTFT)]
        return [gap for one in taken if title == ALL_GAPS or not one.is_cold for gap in one.gaps_s]


@dataclass
class Outcome:
    """One engine over all rounds."""

    num_requests: int
    rounds: list[Round] = field(default_factory=list)
    cold_starts: list[dict[str, Any]] = field(default_factory=list)

    def by_round(self, title: str, num_requests: int) -> list[list[float]]:
        """Return the samples of each round, of its first requests."""
        return [one.samples(title, num_requests) for one in self.rounds]


class System(LiveEngine):
    """One engine, kept from round to round."""

    def close(self) -> None:
        """End the engine."""
        self.parts.close()

    def pin(self, names: Sequence[str]) -> None:
        """Bring adapters to the device, to stay."""
        for name in names:
            self.core.adapters.pin(name, True, self.clock.now())
        self.settle()

    def run(self, requests: Sequence[tuple[float, Request]]) -> Round:
        """Serve requests that arrive at their times, counted from now; return when all have ended."""
        num_loads, start = self.core.stats().num_loads, self.clock.now()
        recorder = self.serve(requests)
        assert [one.num_output_tokens for one in recorder.records] == [NUM_OUT] * len(requests), "a request fell short"
        return Round(
            served=[
                Served(
                    number=int(one.request_id.rpartition("-")[2]),
                    is_cold=one.adapter.startswith("cold"),
                    first_token_s=one.ttft_s or 0.0,
                    gaps_s=tuple(one.gaps_s),
                )
                for one in recorder.records
            ],
            seconds=self.clock.now() - start,
            step_s=float(np.median(recorder.timeline.steps.took_s)),
            num_copies=self.core.stats().num_loads - num_loads,
        )

    def cold_starts(self) -> list[dict[str, Any]]:
        """Return the counters of cold starts by mode."""
        return [asdict(one) for one in self.core.stats().cold_starts]


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


def sides_of(modes: Sequence[str]) -> list[Side]:
    """Return the engines beside the resident one."""
    settings = [(f"{steps:g} steps", steps) for steps in COPY_STEPS]
    sides = [Side(f"{mode}, {name}", mode, name, steps) for name, steps in settings for mode in modes]
    return [*sides, Side(f"auto, {FROM_DISK}", "auto", FROM_DISK, COPY_STEPS[0])]


def measure(num_rounds: int, num_requests: int, load: float) -> dict[str, Any]:
    """Run everything; return the figures."""
    rng = np.random.default_rng(2)
    config = EngineConfig(
        model=ModelConfig(model=str(demo_model_path()), device="cpu", max_model_len=256),
        memory=MemoryConfig(num_pages=256, prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=NUM_SEATS),
    )
    warm = [f"warm-{index}" for index in range(NUM_WARM)]
    names = [*warm, *(f"cold-{index}" for index in range(NUM_COLD))]
    with tempfile.TemporaryDirectory() as path:
        probe = build_parts(config, WallClock())
        base = probe.base
        possible = possible_modes(probe)
        modes = [mode for mode in MODES if mode == "auto" or ColdStart(mode) in possible]
        left_out = [mode for mode in MODES if mode not in modes]
        folders = [write_synthetic_adapter(Path(path) / name, base, RANK, rng) for name in names]
        version = probe.reader.read(names[0], str(folders[0]))
        probe.close()
        for mode in left_out:
            print(f"left out: {mode}, which this executor cannot do", flush=True)
        kv_pages = NUM_SEATS * -(-(NUM_IN + NUM_OUT) // base.page.block_size)
        memory = replace(config.memory, num_pages=kv_pages + version.num_pages * len(names))
        config = replace(config, memory=memory)

        resident = System(config, folders)
        systems, outcomes = {RESIDENT: resident}, {RESIDENT: Outcome(num_requests)}
        resident.pin(names)
        few = max(NUM_SEATS, num_requests // FEWER)
        at_once = [(0.0, request) for request in make_requests(few, base.vocab_size, "all")]
        capacity = few / min(resident.run(at_once).seconds for _ in range(2))
        times = np.cumsum(rng.exponential(1 / (load * capacity), few)).tolist()
        step_s = resident.run(list(zip(times, make_requests(few, base.vocab_size, "p"), strict=True))).step_s
        for side in sides_of(modes):
            adapters = AdapterConfig(
                link_bytes_per_s=round(version.host_bytes / (side.copy_steps * step_s)),
                eviction="none",
                look_ahead=0,  # else a request that waits for a seat is not cold any more
                cold_start=side.mode,
                max_cpu_loras=NUM_COLD // 2 if side.setting == FROM_DISK else None,
            )
            systems[side.name] = System(replace(config, adapters=adapters), folders)
            systems[side.name].pin(warm)
            outcomes[side.name] = Outcome(num_requests if side.has_goal else num_requests // FEWER)

        freeze_start_up_heap()
        progress = Steps(len(systems) * (num_rounds + 1))
        drawn = rng.exponential(1 / (load * capacity), (num_rounds + 1, num_requests)).cumsum(axis=1)
        others = Others()
        for number, name in in_turns(list(systems), num_rounds):
            count = outcomes[name].num_requests if number >= 0 else num_requests // FEWER
            requests = make_requests(count, base.vocab_size, f"{name}-{number}")
            found = systems[name].run(list(zip(drawn[number][:count].tolist(), requests, strict=True)))
            if number >= 0:
                outcomes[name].rounds.append(found)
            progress.done(f"round {number}, {name}: {found.seconds:.1f} s")
        busy_share = others.share()
        for name, system in systems.items():
            outcomes[name].cold_starts = system.cold_starts()
            system.close()
    return {
        "machine": describe_machine(torch.device("cpu")),
        "busy_share": busy_share,
        "command": "python bench/cold_start.py",
        "adapter_bytes": version.host_bytes,
        "step_s": step_s,
        "requests": num_requests,
        "num_rounds": num_rounds,
        "load": load,
        "requests_per_s": load * capacity,
        "left_out": left_out,
        "goals": GOALS,
        "with_goal": [side.name for side in sides_of(modes) if side.has_goal],
        "engines": {name: figures_of(one, outcomes[RESIDENT]) for name, one in outcomes.items()},
    }


def figures_of(outcome: Outcome, resident: Outcome) -> dict[str, Any]:
    """Return percentiles over all rounds, ratios to the resident engine, and the counters of cold starts."""
    percentiles, ratios = {}, {}
    for title in (COLD_TTFT, WARM_TTFT, WARM_GAPS, ALL_GAPS):
        ours, theirs = (one.by_round(title, outcome.num_requests) for one in (outcome, resident))
        pooled = [sample for samples in ours for sample in samples]
        percentiles[title] = {f"P{rank}": percentile_ms(pooled, rank) for rank in (50, 99)}
        ratios[title] = asdict(
            ratio_by_round(
                [percentile_ms(samples, 99) for samples in ours], [percentile_ms(samples, 99) for samples in theirs]
            )
        )
    return {
        "num_requests": outcome.num_requests,
        "ms": percentiles,
        "p99_over_resident": ratios,
        "cold_starts": outcome.cold_starts,
        "copies": sum(one.num_copies for one in outcome.rounds),
        "seconds": [one.seconds for one in outcome.rounds],
        "step_ms": [1e3 * one.step_s for one in outcome.rounds],
    }


def page(figures: dict[str, Any]) -> str:
    """Return the report."""
    engines = figures["engines"]

    def row(name: str) -> tuple[object, ...]:
        ms, over = engines[name]["ms"], engines[name]["p99_over_resident"]
        cells = [f"{ms[title][rank]:.3g}" for title in (COLD_TTFT, WARM_GAPS, ALL_GAPS) for rank in ("P50", "P99")]
        ratios = {title: Ratio(**over[title]) for title in GOALS}
        verdicts = [ratios[title].verdict(most) for title, most in GOALS.items()]
        requests = engines[name]["num_requests"]
        return (name, requests, *cells, *ratios.values(), *(verdicts if name in figures["with_goal"] else ("", "")))

    heads = (
        "",
        "requests a round",
        *(f"{what} {rank}" for what in ("first token", "gap, warm", "gap, all") for rank in ("P50", "P99")),
    )
    over = [f"{what}, over resident" for what in ("first token", "gap of warm")]
    over += [f"at most {most:.2f}" for most in GOALS.values()]
    chosen = [
        (name, *(starts(one) for one in engine["cold_starts"]))
        for name, engine in engines.items()
        if name.startswith("auto")
    ]
    modes = [one["mode"] for one in next(engine["cold_starts"] for name, engine in engines.items() if "auto" in name)]
    left_out = "".join(f" The mode `{mode}` is left out: this executor cannot do it." for mode in figures["left_out"])
    lines = [
        "# Cold starts: wait, assist, layers, and the choice between them",
        "",
        f"`{figures['command']}` on {figures['machine']}; other processes took {figures['busy_share']:.0%} of it. "
        f"The demo model; adapters of rank {RANK} on all linears, {figures['adapter_bytes'] / 2**20:.1f} MiB each; "
        f"{figures['requests']} requests a round, or the first sixth of them, of {NUM_IN} tokens in "
        f"and {NUM_OUT} out, half of them cold, arriving "
        f"by a Poisson process at {figures['load']:.0%} of what the resident engine can do "
        f"({figures['requests_per_s']:.1f} a second). A copy is paced to last "
        f"{' or '.join(f'{steps:g}' for steps in COPY_STEPS)} steps of {1e3 * figures['step_s']:.1f} ms; {FROM_DISK}, "
        f"it lasts {COPY_STEPS[0]:g}, and the adapter is read first. All engines "
        f"take turns on the same arrivals, {figures['num_rounds']} rounds. Core and loop in process, no HTTP."
        f"{left_out}",
        "",
        "Percentiles in ms over the requests and gaps of all rounds; first tokens are those of cold requests. Over "
        "resident: P99 over that of the resident engine by round and on the same requests, the median and its 95 % "
        "interval.",
        "",
        *table((*heads, *over), map(row, engines)),
        "",
        "What `auto` chose: requests, with the mean of their times to first token in ms, and of the predictions.",
        "",
        *table(("", *modes), chosen),
    ]
    return "\n".join(lines)


def starts(one: dict[str, Any]) -> str:
    """Return one mode's counters as a cell."""
    num_measured = one["num_measured"]
    if not num_measured:
        return str(one["num_starts"])
    actual, expected = (1e3 * one[key] / num_measured for key in ("actual_s", "expected_s"))
    return f"{one['num_starts']} ({actual:.3g}, predicted {expected:.3g})"


def main() -> None:
    parser = arguments(__doc__, quick="few requests, one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load", type=float, default=0.4, help="share of what the resident engine can do")
    options = parser.parse_args()
    num_rounds, num_requests = (1, 96) if options.quick else (options.rounds, 600)
    figures = measure(num_rounds, num_requests, options.load)
    refused = reason_to_refuse(num_rounds, figures["busy_share"])
    publish("cold_start", figures, page(figures), is_kept=not options.quick, refused=refused)


if __name__ == "__main__":
    main()
