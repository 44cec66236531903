"""What adapters add to a decoding step on a CPU: against their rank, how many differ, and the largest among them.

    python bench/adapter_cost.py [--processor-time]

32 rows decode through all layers of the model of `throughput.py`; only the adapters' arithmetic is timed (the base's
is the same in every case, and is given beside it). Three questions:

* every row its own adapter, all of one rank: does cost follow the rank?
* adapters of rank 32, shared by more or fewer rows: does cost follow how many differ?
* one adapter of rank 128 among 31 of rank 8: does only its own row pay for its rank, or every row?

Cases take turns, so all of them are in memory (10 GB). A figure is a case's time over that of the base's products in
the same round (`manylora.lab.bench.rounds`), so that a machine that changes its speed changes both.

Writes `bench/results/adapter_cost.json` and `.md`.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict
from typing import Any

import torch
from cpu_systems import LAYERS, RANKS
from kernels_cpu import NUM_ROWS, Case, bench_shape, lora_case, product_cases
from publishing import Others, arguments, clock_of, publish, reason_to_refuse, table

from manylora.execution.device import describe_machine
from manylora.lab.bench.rounds import Ratio, in_turns, ratio_by_round

SHARED_RANK = 32
DTYPES = ("float32", "bfloat16")
NUMBERS = (1, 2, 4, 8, 16, NUM_ROWS)
BASE = "base products"


def main() -> None:
    parser = arguments(__doc__, processor_time=True)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    clock = clock_of(options, time.thread_time)
    torch.manual_seed(0)
    cases = make_cases()
    times: dict[str, list[float]] = {name: [] for name in cases}
    others = Others()
    with torch.inference_mode():
        for number, name in in_turns(list(cases), options.rounds):
            began = clock()
            for layer in range(LAYERS):
                cases[name].run(layer)
            if number >= 0:
                times[name].append(clock() - began)
    report = {
        "command": "python bench/adapter_cost.py" + " --processor-time" * options.processor_time,
        "machine": describe_machine(torch.device("cpu")),
        "busy_share": others.share(),
        "milliseconds": {name: 1e3 * statistics.median(samples) for name, samples in times.items()},
        "over_base": {name: asdict(ratio_by_round(samples, times[BASE])) for name, samples in times.items()},
        "of_all_at_128": {
            dtype: asdict(ratio_by_round(times[f"{dtype} one of 128"], times[f"{dtype} rank 128"])) for dtype in DTYPES
        },
    }
    refused = reason_to_refuse(options.rounds, report["busy_share"])
    publish("adapter_cost", report, page(report, options.rounds), refused=refused)


def make_cases() -> dict[str, Case]:
    base = bench_shape()
    cases = {BASE: product_cases()[f"base products, {NUM_ROWS} rows"]}
    for dtype in DTYPES:
        for rank in RANKS:
            cases[f"{dtype} rank {rank}"] = lora_case(base, dtype, [rank] * NUM_ROWS, 1, 0)
        for num_adapters in NUMBERS:
            ranks = [SHARED_RANK] * num_adapters
            cases[f"{dtype} distinct {num_adapters}"] = lora_case(base, dtype, ranks, NUM_ROWS // num_adapters, 0)
        cases[f"{dtype} one of 128"] = lora_case(base, dtype, [128] + [8] * (NUM_ROWS - 1), 1, 0)
    return cases


def page(report: dict[str, Any], num_rounds: int) -> str:
    took, over = report["milliseconds"], {name: Ratio(**one) for name, one in report["over_base"].items()}
    of_all = {dtype: Ratio(**one) for dtype, one in report["of_all_at_128"].items()}
    share = (128 + 8 * (NUM_ROWS - 1)) / (128 * NUM_ROWS)
    lines = [
        "# What adapters add to a decoding step on a CPU",
        "",
        f"`{report['command']}` on {report['machine']}: {NUM_ROWS} rows through {LAYERS} layers. The adapters' "
        f"arithmetic over the base's products (here {took[BASE]:.1f} ms) of the same round: the median of "
        f"{num_rounds} rounds and its 95 % interval. Other processes took {report['busy_share']:.1%} of the machine's "
        "processor time.",
        "",
        *of_each("every row its own adapter, of rank", {rank: f"rank {rank}" for rank in RANKS}, over),
        "",
        *of_each(
            f"distinct adapters of rank {SHARED_RANK} over {NUM_ROWS} rows", {n: f"distinct {n}" for n in NUMBERS}, over
        ),
        "",
        *table(
            [
                f"one of rank 128 among {NUM_ROWS - 1} of rank 8",
                "over the base",
                "over all at 128",
                "its share of ranks",
            ],
            ([dtype, over[f"{dtype} one of 128"], of_all[dtype], f"{share:.2f}"] for dtype in DTYPES),
        ),
        "",
        "Cost follows the sum of ranks, not the largest, where the last two columns agree.",
    ]
    return "\n".join(lines)


def of_each(title: str, columns: dict[Any, str], over: dict[str, Ratio]) -> list[str]:
    return table(
        [title, *columns], ([dtype, *(over[f"{dtype} {name}"] for name in columns.values())] for dtype in DTYPES)
    )


if __name__ == "__main__":
    main()
