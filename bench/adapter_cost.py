"""What adapters add to a decoding step on a CPU: against their rank, how many differ, and the largest among them.

    python bench/adapter_cost.py [--processor-time]

32 rows decode through all layers of the model of `throughput.py`; only the adapters' arithmetic is timed (the base's
is the same in every case, and is given beside it). Three questions:

* every row its own adapter, all of one rank: does cost follow the rank?
* adapters of rank 32, shared by more or fewer rows: does cost follow how many differ?
* one adapter of rank 128 among 31 of rank 8: does it cost its own rank, or everybody's?

Cases take turns, so all of them are in memory (10 GB); a time is the median over rounds.

Writes `bench/results/adapter_cost.json`, `.md` and `.png`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from cpu_systems import LAYERS, RANKS
from kernels_cpu import NUM_ROWS, Case, bench_shape, lora_case, product_cases

from manylora.execution.machine import describe_machine

RESULTS = Path(__file__).resolve().parent / "results"
SHARED_RANK = 32
DTYPES = ("float32", "bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--processor-time", action="store_true", help="one thread, and its processor time")
    options = parser.parse_args()
    clock = time.thread_time if options.processor_time else time.perf_counter
    if options.processor_time:
        torch.set_num_threads(1)
    torch.manual_seed(0)
    cases = make_cases()
    times: dict[str, list[float]] = {name: [] for name in cases}
    with torch.inference_mode():
        for number in range(-1, options.rounds):
            for name, case in cases.items():
                began = clock()
                for layer in range(LAYERS):
                    case.run(layer)
                if number >= 0:
                    times[name].append(clock() - began)
    report = {
        "command": "python bench/adapter_cost.py" + " --processor-time" * options.processor_time,
        "machine": describe_machine(torch.device("cpu")),
        "load_average": os.getloadavg()[1],
        "milliseconds": {name: 1e3 * statistics.median(samples) for name, samples in times.items()},
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "adapter_cost.json").write_text(json.dumps(report, indent=2) + "\n")
    (RESULTS / "adapter_cost.md").write_text(table(report))
    plot(report["milliseconds"], RESULTS / "adapter_cost.png")
    print(table(report))


def make_cases() -> dict[str, Case]:
    base = bench_shape()
    cases = {"base products": product_cases()[f"base products, {NUM_ROWS} rows"]}
    for dtype in DTYPES:
        for rank in RANKS:
            cases[f"{dtype} rank {rank}"] = lora_case(base, dtype, [rank] * NUM_ROWS, 1, 0)
        for num_adapters in (1, 2, 4, 8, 16, NUM_ROWS):
            ranks = [SHARED_RANK] * num_adapters
            cases[f"{dtype} distinct {num_adapters}"] = lora_case(base, dtype, ranks, NUM_ROWS // num_adapters, 0)
        cases[f"{dtype} one of 128"] = lora_case(base, dtype, [128] + [8] * (NUM_ROWS - 1), 1, 0)
    return cases


def table(report: dict[str, Any]) -> str:
    took = report["milliseconds"]
    one, mean = 128 + 8 * (NUM_ROWS - 1), (128 + 8 * (NUM_ROWS - 1)) / NUM_ROWS
    lines = [
        "# What adapters add to a decoding step on a CPU",
        "",
        f"`{report['command']}` on {report['machine']}: {NUM_ROWS} rows through {LAYERS} layers, milliseconds of the "
        f"adapters' arithmetic alone; the base's products take {took['base products']:.1f}. The load average of the "
        f"machine was {report['load_average']:.1f}.",
        "",
        f"| every row its own adapter, of rank | {' | '.join(map(str, RANKS))} |",
        f"|---|{'---:|' * len(RANKS)}",
        *(f"| {d} | {' | '.join(format(took[f'{d} rank {rank}'], '.1f') for rank in RANKS)} |" for d in DTYPES),
        "",
        f"| distinct adapters of rank {SHARED_RANK} over {NUM_ROWS} rows | 1 | 2 | 4 | 8 | 16 | 32 |",
        f"|---|{'---:|' * 6}",
        *(
            f"| {d} | {' | '.join(format(took[f'{d} distinct {n}'], '.1f') for n in (1, 2, 4, 8, 16, 32))} |"
            for d in DTYPES
        ),
        "",
        f"| one of rank 128 among {NUM_ROWS - 1} of rank 8 | took | all of rank 8 | its ranks' share of all at 128 |",
        "|---|---:|---:|---:|",
        *(
            f"| {d} | {took[f'{d} one of 128']:.1f} | {took[f'{d} rank 8']:.1f} | "
            f"{took[f'{d} rank 128'] * one / (128 * NUM_ROWS):.1f} |"
            for d in DTYPES
        ),
        "",
        f"The last table's mean rank is {mean:.1f}: cost follows the sum of ranks, not the largest.",
        "",
        "![The same, drawn](adapter_cost.png)",
        "",
    ]
    return "\n".join(lines)


def plot(took: dict[str, float], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    by_rank, by_number = figure.subplots(1, 2)
    for dtype in DTYPES:
        by_rank.plot(RANKS, [took[f"{dtype} rank {rank}"] for rank in RANKS], "o-", label=dtype)
        mean = (128 + 8 * (NUM_ROWS - 1)) / NUM_ROWS
        by_rank.plot([mean], [took[f"{dtype} one of 128"]], "k*")
        numbers = (1, 2, 4, 8, 16, NUM_ROWS)
        by_number.plot(numbers, [took[f"{dtype} distinct {n}"] for n in numbers], "o-", label=dtype)
    by_rank.set(xlabel="mean rank of 32 adapters (star: one of 128 among 8s)", ylabel="milliseconds a step")
    by_number.set(xlabel=f"distinct adapters of rank {SHARED_RANK} over {NUM_ROWS} rows")
    for axes in (by_rank, by_number):
        axes.set_ylim(bottom=0)
        axes.axhline(took["base products"], color="grey", linestyle="--", label="the base's products")
        axes.legend()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
