"""Does anything beat Chameleon, on the workload it was published with and on the locality of a production service?

Both sides run on the same engine, device, kernels and copies, and on the same requests, seed by seed; what differs is
who goes first, how long steps are, and what is dropped. Chameleon is taken at its best: on our steps (prompts cut and
mixed with decoding) and under S-LoRA's discipline, as it was published. Loads are shares of what Chameleon, on our
steps, can serve with a P99 of five seconds to the first token; those capacities and every constant of ours were found
on seeds 101 to 103, and seeds 1 to 5 were not looked at before.

Run it: `python bench/beyond.py --traces DIR` (`--quick` for a smoke test). It writes `results/beyond.json`, `.md` and
`.png`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from itertools import pairwise
from pathlib import Path

from manylora.experiments import Case, Result, Runner
from manylora.experiments.spec import Table, merge
from manylora.measure import interval_of_runs

RESULTS = Path(__file__).parent / "results"
SCALE, SLO_S, TARGET_S = 0.173, 5.0, 0.16
DEVICE: Table = {"model": "llama-7b", "hardware": "a40", "lora_kernel": "s-lora-mbgmm", "copies": "s-lora"}
SCHEDULER: Table = {
    "max_num_seqs": 256,
    "max_waiting": 1_000_000,
    "predictor": "noisy",
    "policy_options": {"slo_s": SLO_S},
}
OURS: Table = {"policy": "boost", "step_target_s": TARGET_S, "max_num_batched_tokens": 1024}
S_LORA: Table = {
    "policy": "chameleon",
    "step_composition": "s-lora-each-step",
    "reserve_output": True,
    "max_num_batched_tokens": 8192,
}


def _setup(scheduler: Table, *, eviction: str, **others: object) -> Table:
    adapters = {"eviction": eviction, "host_bytes": 10**12}
    return {**DEVICE, **others, "scheduler": {**SCHEDULER, **scheduler}, "adapters": adapters}


CHAMPION, OPPONENT, AS_PUBLISHED = "ours", "chameleon", "chameleon, S-LoRA's steps"
SETUPS: dict[str, Table] = {
    OPPONENT: _setup({"policy": "chameleon", "max_num_batched_tokens": 512}, eviction="chameleon"),
    CHAMPION: _setup(OURS, eviction="price"),
    AS_PUBLISHED: _setup(S_LORA, eviction="chameleon", exact_caps=True),
    "ours, order of arrival": _setup({**OURS, "policy": "fifo"}, eviction="price"),
    "ours, Chameleon's order": _setup({**OURS, "policy": "chameleon"}, eviction="price"),
    "ours, 512 tokens a step": _setup({"policy": "boost", "max_num_batched_tokens": 512}, eviction="price"),
    "ours, Chameleon's eviction": _setup(OURS, eviction="chameleon"),
    "ours, default predictor": _setup({**OURS, "predictor": "quantile"}, eviction="price"),
}
ABLATIONS = tuple(name for name in SETUPS if name.startswith("ours,"))
BOTH = (OPPONENT, CHAMPION)
LENGTHS: Table = {"kind": "trace", "file": "AzureLLMInferenceTrace_conv.csv", "scale": SCALE}
PUBLISHED: Table = {
    "lengths": LENGTHS,
    "adapters": {"count": 100},
    "popularity": {
        "kind": "rank",
        "ranks": {"kind": "uniform"},
        "adapters": {"kind": "zipf", "s": 1.0, "q": 0.0},
    },
}
PRODUCTION: Table = {
    "lengths": LENGTHS,
    "adapters": {"count": 874},
    "popularity": {"kind": "stack", "file": "gentd26_lora_lru_stack_distance.csv"},
}
SMALL_POOL: Table = {"num_pages": 875}  # 14,000 tokens: what S-LoRA's launch scripts set for a card of 24 GB
# Requests per second at which Chameleon's P99 is five seconds, on our steps.
CAPACITY = {"published": 17.5, "production": 15.5}
SCENES: dict[str, tuple[Table, Table]] = {"published": (PUBLISHED, {}), "production": (PRODUCTION, SMALL_POOL)}
ABOUT = {
    "published": "(a) the published workload: 100 adapters, ranks equally popular, a power law inside each, all of the "
    "A40's memory",
    "production": "(b) production locality: 874 adapters at the stack distances of a production service, a pool of 875 "
    "pages (14,000 tokens for KV and adapters)",
}
LOADS: dict[str, tuple[float, ...]] = {"published": (9.0, 14.0, 15.75, 17.5, 18.25), "production": (12.4, 13.95, 15.5)}
AS_PUBLISHED_AT = {("published", 9.0), ("published", 14.0), ("production", 12.4)}
FIGURES = {
    "P50": "ttft_p50",
    "P99": "ttft_p99",
    "mean": "ttft_mean",
    "small": "ttft_p99_small",
    "medium": "ttft_p99_medium",
    "large": "ttft_p99_large",
    **{f"rank {rank}": f"ttft_p99_rank_{rank}" for rank in (8, 16, 32, 64, 128)},
    "between tokens, P99": "tbt_p99",
    "in all, P50": "e2e_p50",
    "in all, P99": "e2e_p99",
}
Place = tuple[str, float]
Found = dict[tuple[Place, str], list[Result]]


def plan(traces: Path, seeds: Seq[int], duration_s: float, *, quick: bool) -> dict[tuple[Place, str, int], Case]:
    """Return every run by scene and load, setup, and seed."""
    cases = {}
    for scene, (workload, setting) in SCENES.items():
        for rate in LOADS[scene]:
            names = [*BOTH, *([AS_PUBLISHED] if (scene, rate) in AS_PUBLISHED_AT else [])]
            names += ABLATIONS if rate == CAPACITY[scene] and not quick else ()
            for name in names:
                for seed in seeds:
                    asked = {"duration_s": duration_s, "arrivals": {"kind": "poisson", "rate": rate}}
                    cases[(scene, rate), name, seed] = Case(
                        setup=merge(SETUPS[name], setting),
                        workload=merge(workload, asked),
                        seed=seed,
                        warm_up_s=duration_s / 5,
                        slo_s=SLO_S,
                        traces=traces,
                    )
    return cases


def change(found: Found, place: Place, name: str, figure: str, versus: str = OPPONENT) -> tuple[float, float, float]:
    """Return by how much a figure differs, seed by seed: the geometric mean less 1, and its 95 % interval."""
    logs = [
        math.log(one.figures[figure] / other.figures[figure])
        for one, other in zip(found[place, name], found[place, versus], strict=True)
    ]
    mean = interval_of_runs(logs)
    return math.expm1(mean.middle), math.expm1(mean.low), math.expm1(mean.high)


def mean(found: Found, place: Place, name: str, figure: str) -> float:
    return math.fsum(one.figures[figure] for one in found[place, name]) / len(found[place, name])


def capacities(found: Found, scene: str, name: str) -> float | None:
    """Return the load at which the mean P99 over seeds crosses the service level, between the loads that were run."""
    points = [(rate, mean(found, (scene, rate), name, "ttft_p99")) for rate in LOADS[scene]]
    for (rate, p99), (higher, worse) in pairwise(points):
        if p99 <= SLO_S < worse:
            return rate + (higher - rate) * math.log(SLO_S / p99) / math.log(worse / p99)
    return None


def percent(value: tuple[float, float, float]) -> str:
    return f"{value[0]:+.0%} ({value[1]:+.0%} to {value[2]:+.0%})"


def tables(found: Found, scene: str) -> list[str]:
    lines = [f"## {ABOUT[scene]}", ""]
    places: list[Place] = [(scene, rate) for rate in LOADS[scene]]
    lines += [
        "Seconds, means over seeds, Chameleon's / ours:",
        "",
        "| req/s | of Chameleon's capacity | P50 TTFT | P99 TTFT | P99 TBT | P50 in all | "
        "Chameleon, S-LoRA's steps: P99 TTFT |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for place in places:
        cells = [
            " / ".join(f"{mean(found, place, name, figure):.3g}" for name in BOTH)
            for figure in ("ttft_p50", "ttft_p99", "tbt_p99", "e2e_p50")
        ]
        there = f"{mean(found, place, AS_PUBLISHED, 'ttft_p99'):.3g}" if (place, AS_PUBLISHED) in found else ""
        lines.append(f"| {place[1]:g} | {place[1] / CAPACITY[scene]:.0%} | {' | '.join(cells)} | {there} |")
    lines += ["", "Ours against Chameleon's, time to first token, seed by seed (95 % interval of the change):", ""]
    lines += [f"| | {' | '.join(f'{rate:g} req/s' for _, rate in places)} |", "|---|" + "---:|" * len(places)]
    for label, figure in FIGURES.items():
        of_what = f"P99, {label}" if figure.startswith("ttft_p99_") else label
        cells = [percent(change(found, place, CHAMPION, figure)) for place in places]
        lines.append(f"| {of_what} | {' | '.join(cells)} |")
    return lines


def ablations(found: Found) -> list[str]:
    lines = ["## What contributes, at Chameleon's capacity", ""]
    columns = ("P50", "P99", "small", "medium", "large", "rank 8", "rank 128", "between tokens, P99", "in all, P50")
    lines += [
        "Change against Chameleon's, seed by seed; TTFT but for the last two, classes and ranks by their P99:",
        "",
    ]
    lines += [f"| | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    for scene in SCENES:
        place = (scene, CAPACITY[scene])
        for name in (CHAMPION, *ABLATIONS):
            if (place, name) in found:
                cells = [f"{change(found, place, name, FIGURES[one])[0]:+.0%}" for one in columns]
                lines.append(f"| {ABOUT[scene][:3]} {name} | {' | '.join(cells)} |")
    return lines


def report(found: Found, seeds: Seq[int], duration_s: float) -> str:
    lines = [
        "# Beyond Chameleon",
        "",
        f"`python bench/beyond.py --traces DIR`: Llama-7B on one A40 with S-LoRA's kernels and copies on both sides, "
        f"lengths of the Azure conversation trace times {SCALE:g}, Poisson arrivals for {duration_s:g} s of which the "
        f"first fifth is not counted, seeds {seeds[0]} to {seeds[-1]}; virtual time, the same digits on any machine. "
        f"*Chameleon* is policy and eviction `chameleon` on our steps of 512 tokens, *ours* policy `boost`, steps of "
        f"{TARGET_S * 1e3:g} ms and eviction `price`; both predict answers 20 % off. Classes are Chameleon's weighted "
        "size, of the truth.",
    ]
    for scene in SCENES:
        lines += ["", *tables(found, scene)]
        theirs, own = (capacities(found, scene, name) for name in BOTH)
        if theirs and own:
            lines += [
                "",
                f"Load with a P99 of {SLO_S:g} s: {theirs:.2f} and {own:.2f} req/s ({own / theirs - 1:+.1%}).",
            ]
    return "\n".join([*lines, "", *ablations(found), ""])


def picture(found: Found, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(SCENES), figsize=(10, 3.6))
    for axis, scene in zip(axes, SCENES, strict=True):
        for name, colour in ((OPPONENT, "tab:green"), (CHAMPION, "tab:blue")):
            for part, style in (("ttft_p99", "-o"), ("ttft_p50", "--o")):
                values = [mean(found, (scene, rate), name, part) for rate in LOADS[scene]]
                label = f"{name}, {part[-3:].upper()}"
                axis.plot(LOADS[scene], values, style, color=colour, label=label, markersize=4)
        axis.axhline(SLO_S, color="grey", linewidth=0.8)
        axis.set(yscale="log", title=scene, xlabel="requests per second", ylabel="time to first token, s")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def as_data(found: Found) -> Mapping[str, object]:
    return {
        f"{scene} {rate:g} {name}": {
            label: [round(run.figures[key], 5) for run in runs] for label, key in FIGURES.items()
        }
        for ((scene, rate), name), runs in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder of traces")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each case: seeds 1, 2, ...")
    parser.add_argument("--duration", type=float, default=200.0, help="seconds of arrivals")
    parser.add_argument("--processes", type=int, default=1, help="runs at once")
    parser.add_argument("--keep", type=Path, help="folder that keeps finished runs")
    parser.add_argument("--quick", action="store_true", help="half a minute of arrivals, one seed, nothing written")
    options = parser.parse_args()
    seeds = range(1, 2 if options.quick else options.seeds + 1)
    duration_s = 30.0 if options.quick else options.duration
    cases = plan(options.traces, seeds, duration_s, quick=options.quick)
    runner = Runner(options.keep, num_processes=options.processes)
    results = runner.run(
        cases.values(), lambda done, of: print(f"\r{done}/{of} runs", end="", file=sys.stderr, flush=True)
    )
    found: Found = {}
    for (place, name, _), case in cases.items():
        found.setdefault((place, name), []).append(results[case.key])
    text = report(found, seeds, duration_s)
    print(f"\n{text}")
    if options.quick:
        return
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "beyond.md").write_text(text)
    (RESULTS / "beyond.json").write_text(json.dumps(as_data(found), indent=1) + "\n")
    picture(found, RESULTS / "beyond.png")


if __name__ == "__main__":
    main()
