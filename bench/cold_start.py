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

Statistics, chosen before any run: per engine the P50 and P99 over the requests (or gaps) of all rounds together; as a
ratio, that of the engine's P99 and the resident engine's by round (`manylora.bench.rounds`).
Goals: *auto* within 1.10 at the P99 of the first token of cold requests, and within 1.05 at the P99 between tokens of
warm ones. Writes `results/cold_start.json` and `.md`.
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
from publishing import Steps, arguments, publish, table

from manylora.bench.rounds import Others, Ratio, in_turns, ratio_by_round, reason_to_refuse
from manylora.bench.synthetic import write_synthetic_adapter
from manylora.clock import WallClock
from manylora.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.demo import demo_model_path
from manylora.engine.adapters.cold_starts import possible_modes
from manylora.engine.core import EngineCore
from manylora.engine.loop import EngineLoop
from manylora.execution.build import build_parts
from manylora.execution.device import describe_machine
from manylora.measure import Recorder
from manylora.types import AdapterVersion, ColdStart, Request, SamplingParams

RANK = 64
NUM_WARM, NUM_COLD = 4, 32
NUM_SEATS = 16
NUM_IN, NUM_OUT = 24, 32
COPY_STEPS = (0.5, 4.0)
FROM_DISK = "from disk"
SETTINGS = (*(f"{steps:g} steps" for steps in COPY_STEPS), FROM_DISK)
RESIDENT = "all resident"
MODES = (*(mode.value for mode in ColdStart), "auto")
COLD_TTFT, WARM_TTFT = "first token of cold requests", "first token of warm requests"
WARM_GAPS, ALL_GAPS = "between tokens of warm requests", "between tokens of all requests"


@dataclass
class Round:
    """The figures of one engine in one round; times in seconds."""

    samples: dict[str, list[float]]
    seconds: float
    step_s: float
    num_copies: int


@dataclass
class Outcome:
    """One engine over all rounds."""

    rounds: list[Round] = field(default_factory=list)
    cold_starts: list[dict[str, Any]] = field(default_factory=list)

    def pooled(self, title: str) -> list[float]:
        """Return the samples of all rounds."""
        return [sample for one in self.rounds for sample in one.samples[title]]


class System:
    """One engine, kept from round to round."""

    def __init__(self, config: EngineConfig, folders: Sequence[Path]) -> None:
        self._clock = WallClock()
        self._parts = build_parts(config, self._clock)
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
        return Round(
            samples={
                COLD_TTFT: [one.ttft_s or 0.0 for one in cold],
                WARM_TTFT: [one.ttft_s or 0.0 for one in warm],
                WARM_GAPS: [gap for one in warm for gap in one.gaps_s],
                ALL_GAPS: [gap for one in recorder.records for gap in one.gaps_s],
            },
            seconds=self._clock.now() - start,
            step_s=float(np.median(recorder.timeline.steps.took_s)),
            num_copies=self._core.stats().num_loads - num_loads,
        )

    def cold_starts(self) -> list[dict[str, Any]]:
        """Return the counters of cold starts by mode."""
        return [asdict(one) for one in self._core.stats().cold_starts]

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
    with tempfile.TemporaryDirectory() as path:
        probe = build_parts(config, WallClock())
        base = probe.base
        possible = possible_modes(reads_host=probe.reads_host, waits_by_layer=probe.waits_by_layer)
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
        systems = {RESIDENT: resident}
        resident.pin(names)
        at_once = [(0.0, request) for request in make_requests(num_requests, base.vocab_size, "all")]
        capacity = num_requests / min(resident.run(at_once).seconds for _ in range(2))
        times = np.cumsum(rng.exponential(1 / (load * capacity), num_requests)).tolist()
        step_s = resident.run(list(zip(times, make_requests(num_requests, base.vocab_size, "p"), strict=True))).step_s
        for setting, steps in zip(SETTINGS, (*COPY_STEPS, COPY_STEPS[0]), strict=True):
            for mode in modes:
                adapters = AdapterConfig(
                    link_bytes_per_s=round(version.host_bytes / (steps * step_s)),
                    eviction="none",
                    look_ahead=0,  # else a request that waits for a seat is not cold any more
                    cold_start=mode,
                    max_cpu_loras=NUM_COLD // 2 if setting == FROM_DISK else None,
                )
                systems[f"{mode}, {setting}"] = system = System(replace(config, adapters=adapters), folders)
                system.pin(warm)

        progress = Steps(len(systems) * (num_rounds + 1))
        outcomes = {name: Outcome() for name in systems}
        drawn = rng.exponential(1 / (load * capacity), (num_rounds + 1, num_requests)).cumsum(axis=1)
        others = Others()
        for number, name in in_turns(list(systems), num_rounds):
            requests = make_requests(num_requests, base.vocab_size, f"{name}-{number}")
            found = systems[name].run(list(zip(drawn[number].tolist(), requests, strict=True)))
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
        "engines": {name: figures_of(one, outcomes[RESIDENT]) for name, one in outcomes.items()},
    }


def figures_of(outcome: Outcome, resident: Outcome) -> dict[str, Any]:
    """Return percentiles over all rounds, ratios to the resident engine, and the counters of cold starts."""
    percentiles, ratios = {}, {}
    for title in resident.rounds[0].samples:
        ours = outcome.pooled(title)
        percentiles[title] = {f"P{rank}": percentile_ms(ours, rank) for rank in (50, 99)}
        by_round = [[percentile_ms(one.samples[title], 99) for one in each.rounds] for each in (outcome, resident)]
        ratios[title] = asdict(ratio_by_round(*by_round))
    return {
        "ms": percentiles,
        "p99_over_resident": ratios,
        "cold_starts": outcome.cold_starts,
        "copies": sum(one.num_copies for one in outcome.rounds),
        "seconds": sum(one.seconds for one in outcome.rounds),
        "rounds": [asdict(one) for one in outcome.rounds],
    }


def page(figures: dict[str, Any]) -> str:
    """Return the report."""
    engines = figures["engines"]

    def row(name: str) -> tuple[object, ...]:
        ms, over = engines[name]["ms"], engines[name]["p99_over_resident"]
        cells = [f"{ms[title][rank]:.3g}" for title in (COLD_TTFT, WARM_GAPS, ALL_GAPS) for rank in ("P50", "P99")]
        return (name, *cells, Ratio(**over[COLD_TTFT]), Ratio(**over[WARM_GAPS]))

    heads = ("", *(f"{what} {rank}" for what in ("first token", "gap, warm", "gap, all") for rank in ("P50", "P99")))
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
        f"{figures['requests']} requests a round of {NUM_IN} tokens in and {NUM_OUT} out, half of them cold, arriving "
        f"by a Poisson process at {figures['load']:.0%} of what the resident engine can do "
        f"({figures['requests_per_s']:.1f} a second). A copy is paced to last "
        f"{' or '.join(f'{steps:g}' for steps in COPY_STEPS)} steps of {1e3 * figures['step_s']:.1f} ms; {FROM_DISK}, "
        f"it lasts {COPY_STEPS[0]:g}, and the adapter is read first. All engines "
        f"take turns on the same arrivals, {figures['num_rounds']} rounds. Core and loop in process, no HTTP."
        f"{left_out}",
        "",
        "Percentiles in ms over the requests and gaps of all rounds; first tokens are those of cold requests. The last "
        "two columns: P99 over that of the resident engine by round, the median and its 95 % interval.",
        "",
        *table((*heads, "first token, over resident", "gap of warm, over resident"), map(row, engines)),
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
    parser.add_argument("--load", type=float, default=0.5, help="share of what the resident engine can do")
    options = parser.parse_args()
    num_rounds, num_requests = (1, 24) if options.quick else (options.rounds, 120)
    figures = measure(num_rounds, num_requests, options.load)
    refused = reason_to_refuse(num_rounds, figures["busy_share"])
    publish("cold_start", figures, page(figures), is_kept=not options.quick, refused=refused)


if __name__ == "__main__":
    main()
