"""Every scheduling policy with every eviction policy at low, medium and high load, simulated on the virtual clock.

The core, the loop and the cache are the ones that serve; only the device is made up: a step takes so long and so
much more per token, a copy takes its bytes over the link. The workload is the one of the Chameleon evaluation as far as
it is published: Llama-7B on a 48 GB card, 100 adapters of rank 8 to 128 in equal number on q, k, v and o, ranks
equally popular, a power law inside each rank, lengths of the Azure conversation trace scaled down so that the
pool is full at the loads named, Poisson arrivals.

Run it: `python bench/policies.py [--lengths AzureLLMInferenceTrace_conv.csv]` (`--quick` for a smoke test). Without
the trace lengths are drawn from gamma distributions fitted to it. It writes `results/policies.json` and `.md`.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import sys
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, product
from pathlib import Path
from time import perf_counter

from manylora.catalog.models import base_shape
from manylora.config import AdapterConfig, SchedulerConfig
from manylora.costs.model import FixedCost
from manylora.measure import RequestRecord
from manylora.memory import EVICTION_POLICIES
from manylora.scheduling import POLICIES
from manylora.scheduling.clustering import cluster, cut_offs
from manylora.scheduling.request_size import Demand, RequestSizer
from manylora.sim.run.adapters import adapter_versions
from manylora.sim.run.simulation import Run, SimulationConfig, simulate
from manylora.workloads import AdapterSpec, RequestSpec, Workload

RESULTS = Path(__file__).parent / "results"
GIB = 2**30
LLAMA_7B = base_shape("llama-2-7b")
# The card has 28 GiB left beside the weights; the published evaluation scales its trace down until KV and adapters fill
# them at the peak. Lengths are scaled here as well, but compute would run out first: so the pool is scaled as well.
NUM_PAGES = 16 * GIB // LLAMA_7B.page.num_bytes
# A40: 13.5 GB of weights at 696 GB/s is 19 ms a step, 14 GFLOP a token at 60 % of 150 TFLOP/s is 0.16 ms; PCIe 4.0.
COST = FixedCost(step_s=0.021, token_s=0.00016, copy_bytes_per_s=16e9)
RANKS = (8, 16, 32, 64, 128)
LOADS = {"low": 6.0, "medium": 8.0, "high": 9.0}
CLASSES = ("small", "medium", "large")
INPUT_GAMMA, OUTPUT_GAMMA = (1.338, 863.0), (1.646, 128.0)
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 256, 512
MAX_TOKENS = 1024
LOOK_AHEAD = AdapterConfig().look_ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one run showed; times in seconds, shares in [0, 1].

    Args:
        queueing: Mean share of a request's time spent waiting for admission, by class of size.
    """

    policy: str
    eviction: str
    load: str
    rate: float
    requests: int
    ttft_p50: float
    ttft_p99: float
    tbt_p99: float
    hit_rate: float
    loads_per_s: float
    squashed: float
    preempted: float
    queueing: dict[str, float]
    ttft_p99_of: dict[str, float]
    within_slo: float
    wall_s: float


def adapters(num_adapters: int) -> tuple[AdapterSpec, ...]:
    """Return adapters of every rank in equal number."""
    return tuple(AdapterSpec(name=f"a{index}", rank=RANKS[index % len(RANKS)]) for index in range(num_adapters))


def read_lengths(path: str | None, scale: float, rng: random.Random, count: int) -> list[tuple[int, int]]:
    """Return pairs of prompt and answer lengths, drawn from the trace or from what was fitted to it."""
    if path is None:
        pairs = [(rng.gammavariate(*INPUT_GAMMA), rng.gammavariate(*OUTPUT_GAMMA)) for _ in range(count)]
    else:
        with open(path, newline="") as file:
            rows = [(float(row["ContextTokens"]), float(row["GeneratedTokens"])) for row in csv.DictReader(file)]
        pairs = [rng.choice(rows) for _ in range(count)]
    limit = LLAMA_7B.max_model_len // 2
    return [(min(limit, max(4, round(a * scale))), min(MAX_TOKENS, max(1, round(b * scale)))) for a, b in pairs]


def make_workload(
    rate: float, duration_s: float, *, lengths: str | None, scale: float, num_adapters: int, seed: int
) -> Workload:
    """Draw a workload; the lengths and adapters of the n-th request are the same at every rate."""
    rng, times = random.Random(seed), random.Random(seed + 1)
    pairs = read_lengths(lengths, scale, rng, int(rate * duration_s))
    per_rank = num_adapters // len(RANKS)
    weights = list(accumulate(1.0 / (place + 1) for place in range(per_rank)))
    requests, at = [], 0.0
    for prompt, output in pairs:
        at += times.expovariate(rate)
        place = rng.choices(range(per_rank), cum_weights=weights)[0]
        adapter = f"a{place * len(RANKS) + rng.randrange(len(RANKS))}"
        requests.append(RequestSpec(arrival_s=at, num_prompt_tokens=prompt, num_output_tokens=output, adapter=adapter))
    return Workload(name=f"{rate:g} requests a second", requests=tuple(requests), adapters=adapters(num_adapters))


def serve(workload: Workload, scheduler: SchedulerConfig, cache: AdapterConfig) -> Run:
    """Run a workload to its end; requests end by themselves, far below their cap."""
    config = SimulationConfig(
        base=LLAMA_7B, cost=COST, num_pages=NUM_PAGES, scheduler=scheduler, adapters=cache, max_tokens=MAX_TOKENS
    )
    return simulate(workload, config)


def percentile(values: Seq[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def size_classes(workload: Workload) -> list[str]:
    """Sort requests into three classes by their true size, cut where three clusters of sizes meet."""
    block = LLAMA_7B.page.block_size
    pages = {name: version.num_pages for name, version in adapter_versions(workload.adapters, LLAMA_7B).items()}
    demands = [
        Demand(one.num_prompt_tokens, one.num_output_tokens, pages[one.adapter or ""] * block)
        for one in workload.requests
    ]
    sizer = RequestSizer("degree-2")
    sizer.fit(demands)
    sizes = [sizer.size(demand) for demand in demands]
    low, high = cut_offs(cluster(sizes, 3)[-1])
    return ["small" if size < low else "medium" if size < high else "large" for size in sizes]


def run(
    label: tuple[str, str, str],
    workload: Workload,
    scheduler: SchedulerConfig,
    cache: AdapterConfig,
    *,
    warm_up_s: float,
    slo_s: float,
) -> Row:
    """Simulate one combination and reduce it to a row; requests of the warm-up are served and not counted."""
    began = perf_counter()
    done = serve(workload, scheduler, cache)
    classes = size_classes(workload)
    counted = [(one, name) for one, name in zip(done.records, classes, strict=True) if one.arrived_at >= warm_up_s]
    of_class = {name: [one for one, its in counted if its == name] for name in CLASSES}

    def ttft(records: Iterable[RequestRecord]) -> list[float]:
        return [one.ttft_s for one in records if one.ttft_s is not None]

    def queueing(one: RequestRecord) -> float:
        assert one.queueing_s is not None
        return one.queueing_s / one.e2e_s

    first = ttft(one for one, _ in counted)
    (stats,) = done.stats
    policy, shown_eviction, load = label
    return Row(
        policy=policy,
        eviction=shown_eviction,
        load=load,
        rate=workload.rate,
        requests=len(counted),
        ttft_p50=percentile(first, 0.5),
        ttft_p99=percentile(first, 0.99),
        tbt_p99=percentile([gap_s for one, _ in counted for gap_s in one.gaps_s], 0.99),
        hit_rate=stats.num_adapter_hits / stats.num_adapter_requests,
        loads_per_s=stats.num_loads / max(one.finished_at for one in done.records),
        squashed=stats.num_squashes / len(classes),
        preempted=stats.num_preemptions / len(classes),
        queueing={name: sum(map(queueing, ones)) / max(1, len(ones)) for name, ones in of_class.items()},
        ttft_p99_of={name: percentile(ttft(ones), 0.99) for name, ones in of_class.items()},
        within_slo=sum(one <= slo_s for one in first) / len(first),
        wall_s=perf_counter() - began,
    )


def unloaded_mean_s(workload: Workload) -> float:
    """Return the mean time of a request that runs alone, in seconds."""
    alone = tuple(replace(one, arrival_s=60.0 * index) for index, one in enumerate(workload.requests[:200]))
    records = serve(replace(workload, requests=alone), SchedulerConfig(), AdapterConfig(host_bytes=1 << 50)).records
    return sum(one.e2e_s for one in records) / len(alone)


POLICY_ROWS: dict[str, dict[str, object]] = {
    **{name: {"policy": name} for name in sorted(POLICIES)},
    "fifo, whole prompts": {"policy": "fifo", "step_composition": "whole-prompts"},
}
VARIANTS: dict[str, dict[str, object]] = {
    "chameleon, accuracy 100 %": {"policy": "chameleon", "predictor": "oracle"},
    "chameleon, accuracy 80 %": {"policy": "chameleon"},
    "chameleon, accuracy 60 %": {"policy": "chameleon", "predictor_options": {"accuracy": 0.6}},
    "chameleon, quantile predictor": {"policy": "chameleon", "predictor": "quantile"},
    "chameleon, degree-1": {"policy": "chameleon", "policy_options": {"request_size": "degree-1"}},
    "chameleon, output only": {"policy": "chameleon", "policy_options": {"request_size": "output"}},
    "chameleon, output only, accuracy 60 %": {
        "policy": "chameleon",
        "policy_options": {"request_size": "output"},
        "predictor_options": {"accuracy": 0.6},
    },
    "chameleon, least WCSS": {"policy": "chameleon", "policy_options": {"queue_criterion": "wcss"}},
    "sjf, accuracy 100 %": {"policy": "sjf", "predictor": "oracle"},
    "sjf, quantile predictor": {"policy": "sjf", "predictor": "quantile"},
}


def table(rows: Seq[Row], first: str) -> list[str]:
    lines = [
        f"| {first} | eviction | TTFT P50 | TTFT P99 | TBT P99 | within SLO | hit rate | loads/s "
        "| squashed | pre-empted | queueing share S / M / L | TTFT P99 S / M / L |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        shares = " / ".join(f"{row.queueing[name]:.1%}" for name in CLASSES)
        tails = " / ".join(f"{row.ttft_p99_of[name]:.2f}" for name in CLASSES)
        lines.append(
            f"| {row.policy} | {row.eviction} | {row.ttft_p50:.3f} | {row.ttft_p99:.2f} | {row.tbt_p99:.3f} "
            f"| {row.within_slo:.1%} | {row.hit_rate:.1%} | {row.loads_per_s:.2f} | {row.squashed:.2%} "
            f"| {row.preempted:.2%} | {shares} | {tails} |"
        )
    return lines


def report(rows: Seq[Row], variants: Seq[Row], bare: Seq[Row], settings: str) -> str:
    lines = ["# Policies under load, simulated", "", settings, ""]
    for load, rate in LOADS.items():
        lines += [
            f"## {load.capitalize()} load: {rate:g} requests a second",
            "",
            *table([r for r in rows if r.load == load], "policy"),
            "",
        ]
    if variants:
        lines += ["## Variants at high load", "", *table(variants, "variant"), ""]
    if bare:
        lines += ["## Medium load without prefetching", "", *table(bare, "policy"), ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", metavar="CSV", help="AzureLLMInferenceTrace_conv.csv")
    parser.add_argument(
        "--quick", action="store_true", help="a minute of arrivals, fewer combinations, nothing written"
    )
    parser.add_argument("--duration", type=float, default=500.0, help="seconds of arrivals")
    parser.add_argument("--scale", type=float, default=0.36, help="what lengths are multiplied by")
    parser.add_argument("--adapters", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", action="append", choices=sorted(POLICY_ROWS))
    parser.add_argument("--eviction", action="append", choices=sorted(EVICTION_POLICIES))
    parser.add_argument("--load", action="append", choices=sorted(LOADS))
    options = parser.parse_args()
    duration_s = 60.0 if options.quick else options.duration
    warm_up_s = duration_s / 5
    workload_of = {
        load: make_workload(
            rate,
            duration_s,
            lengths=options.lengths,
            scale=options.scale,
            num_adapters=options.adapters,
            seed=options.seed,
        )
        for load, rate in LOADS.items()
    }
    slo_s = 5 * unloaded_mean_s(workload_of["low"])
    evictions = options.eviction or (["lru"] if options.quick else sorted(EVICTION_POLICIES))
    combinations = list(product(options.load or LOADS, options.policy or POLICY_ROWS, evictions))
    variants = [] if options.quick or options.policy or options.load else list(VARIANTS)
    bare = list(product(("fifo", "chameleon"), evictions)) if variants else []
    num_runs, began = len(combinations) + len(variants) + len(bare), perf_counter()

    def one(load: str, name: str, eviction: str, settings: dict[str, object], look_ahead: int = LOOK_AHEAD) -> Row:
        config = {"predictor": "noisy", "predictor_options": {"accuracy": 0.8}, **settings}
        config["policy_options"] = {"slo_s": slo_s, **settings.get("policy_options", {})}  # type: ignore[dict-item]
        scheduler = SchedulerConfig(
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            max_waiting=1_000_000,
            **config,  # type: ignore[arg-type]
        )
        cache = AdapterConfig(eviction=eviction, host_bytes=1 << 50, look_ahead=look_ahead)
        row = run((name, eviction, load), workload_of[load], scheduler, cache, warm_up_s=warm_up_s, slo_s=slo_s)
        done.append(row)
        shares, tails = ("/".join(f"{of[k]:.2f}" for k in CLASSES) for of in (row.queueing, row.ttft_p99_of))
        print(
            f"[{len(done):3}/{num_runs}, {perf_counter() - began:4.0f} s] {load:6} {name:37} {eviction:10} "
            f"TTFT {row.ttft_p50:6.3f} P99 {row.ttft_p99:6.2f} ({tails})  TBT P99 {row.tbt_p99:.3f}  "
            f"SLO {row.within_slo:.3f}  hit {row.hit_rate:.2f}  loads/s {row.loads_per_s:5.2f}  "
            f"squashed {row.squashed:.3f}  pre-empted {row.preempted:.3f}  queueing {shares}",
            file=sys.stderr,
            flush=True,
        )
        return row

    done: list[Row] = []
    rows = [one(load, name, eviction, POLICY_ROWS[name]) for load, name, eviction in combinations]
    variant_eviction = "chameleon" if "chameleon" in EVICTION_POLICIES else AdapterConfig().eviction
    variant_rows = [one("high", name, variant_eviction, VARIANTS[name]) for name in variants]
    bare_rows = [one("medium", name, eviction, POLICY_ROWS[name], look_ahead=0) for name, eviction in bare]
    lengths = "lengths of" if options.lengths else "gamma lengths fitted to"
    settings = (
        f"`python bench/policies.py{' --lengths CSV' if options.lengths else ''}`: {LLAMA_7B.name}, {NUM_PAGES} pages "
        f"of {LLAMA_7B.page.num_bytes // 2**20} MiB, {options.adapters} adapters of rank "
        f"{', '.join(map(str, RANKS))}; a step takes {COST.step_s * 1e3:g} ms and {COST.token_s * 1e3:g} ms a token, "
        f"holds {MAX_NUM_BATCHED_TOKENS} tokens, and the link copies {COST.copy_bytes_per_s / 1e9:g} GB/s; {lengths} "
        f"the Azure conversation trace times {options.scale:g}, Poisson arrivals for {duration_s:g} s of which the "
        f"first {warm_up_s:g} s are not counted; predictions off by 20 % on average; SLO of the first token "
        f"{slo_s:.2f} s, five times the mean of a request alone. Times in seconds of virtual time: the same on any "
        "machine. S / M / L are classes of true size."
    )
    if options.quick:
        return
    RESULTS.mkdir(exist_ok=True)
    content = {
        "slo_s": slo_s,
        "settings": settings,
        "rows": [asdict(row) for row in rows],
        "variants": [asdict(row) for row in variant_rows],
        "no_prefetch": [asdict(row) for row in bare_rows],
    }
    (RESULTS / "policies.json").write_text(json.dumps(content, indent=1) + "\n")
    (RESULTS / "policies.md").write_text(report(rows, variant_rows, bare_rows, settings))


if __name__ == "__main__":
    main()
