"""What adapters add to a decoding step on a CPU: against their rank, how many differ, and the largest among them.

    python bench/adapter_cost.py [--processor-time]

32 rows decode through all layers of the model of `throughput.py`; only the adapters' arithmetic is timed (the base's
is the same in every case, and is given beside it). Three questions:

* every row its own adapter, all of one rank: does cost follow the rank?
* adapters of rank 32, shared by more or fewer rows: does cost follow how many differ?
* one adapter of rank 128 among 31 of rank 8: does only its own row pay for its rank, or every row?

Cases take turns, so all of them are in memory (10 GB); a time is the median over rounds.

Writes `bench/results/adapter_cost.json` and `.md`.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import torch
from cpu_systems import LAYERS, RANKS
from kernels_cpu import NUM_ROWS, Case, bench_shape, lora_case, product_cases
from publishing import arguments, clock_of, publish, table

from manylora.execution.device import describe_machine

SHARED_RANK = 32
DTYPES = ("float32", "bfloat16")
NUMBERS = (1, 2, 4, 8, 16, NUM_ROWS)


def main() -> None:
    parser = arguments(__doc__, processor_time=True)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    clock = clock_of(options, time.thread_time)
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
    publish("adapter_cost", report, page(report))


def make_cases() -> dict[str, Case]:
    base = bench_shape()
    cases = {"base products": product_cases()[f"base products, {NUM_ROWS} rows"]}
    for dtype in DTYPES:
        for rank in RANKS:
            cases[f"{dtype} rank {rank}"] = lora_case(base, dtype, [rank] * NUM_ROWS, 1, 0)
        for num_adapters in NUMBERS:
            ranks = [SHARED_RANK] * num_adapters
            cases[f"{dtype} distinct {num_adapters}"] = lora_case(base, dtype, ranks, NUM_ROWS // num_adapters, 0)
        cases[f"{dtype} one of 128"] = lora_case(base, dtype, [128] + [8] * (NUM_ROWS - 1), 1, 0)
    return cases


def page(report: dict[str, Any]) -> str:
    took = report["milliseconds"]
    one, mean = 128 + 8 * (NUM_ROWS - 1), (128 + 8 * (NUM_ROWS - 1)) / NUM_ROWS
    lines = [
        "# What adapters add to a decoding step on a CPU",
        "",
        f"`{report['command']}` on {report['machine']}: {NUM_ROWS} rows through {LAYERS} layers, milliseconds of the "
        f"adapters' arithmetic alone; the base's products take {took['base products']:.1f}. The load average of the "
        f"machine was {report['load_average']:.1f}.",
        "",
        *of_each("every row its own adapter, of rank", {rank: f"rank {rank}" for rank in RANKS}, took),
        "",
        *of_each(
            f"distinct adapters of rank {SHARED_RANK} over {NUM_ROWS} rows", {n: f"distinct {n}" for n in NUMBERS}, took
        ),
        "",
        *of_each(
            f"one of rank 128 among {NUM_ROWS - 1} of rank 8",
            {"took": "one of 128", "all of rank 8": "rank 8", "its ranks' share of all at 128": "share"},
            took | {f"{d} share": took[f"{d} rank 128"] * one / (128 * NUM_ROWS) for d in DTYPES},
        ),
        "",
        f"The last table's mean rank is {mean:.1f}: cost follows the sum of ranks, not the largest.",
    ]
    return "\n".join(lines)


def of_each(title: str, columns: dict[Any, str], took: dict[str, float]) -> list[str]:
    rows = ([dtype, *(f"{took[f'{dtype} {name}']:.1f}" for name in columns.values())] for dtype in DTYPES)
    return table([title, *columns], rows)


if __name__ == "__main__":
    main()
