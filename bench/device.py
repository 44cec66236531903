"""What this device reaches, as a profile for the cost model; and whether the model then says what live steps take.

    python bench/device.py [--like h100] [--profile ours.toml] [--compare] [--workers]

Four rates are measured, none of them by running a model: large products, weights read for one row, a chain of the
shortest kernels, a large copy to the device. ``--like`` names the profile that gives what cannot be measured here (the
peak, memory, network); ``--profile`` writes the result as a file that `find_hardware` reads.

``--compare`` holds the roofline with just these rates, nothing fitted, against steps of the live engine: the
82M-parameter model of `throughput.py`, alone and in batches, with and without adapters. On a CPU both sides use one
thread and are counted in processor time, which others on the machine disturb least, and they take turns. It writes
`results/device.json` and `.md`.

``--workers`` measures instead what a core takes for rows of an adapter that a device has handed over, as
`[setup.workers]` of a simulation wants it: with the kernels of `execution/assist`, and with weights that no cache
holds, each call reading its own. Shapes are those of Llama-2-7B in bfloat16. It writes `results/workers.json` and
`.md`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
from publishing import LEAST_ROUNDS, Others, arguments, middle_of_rounds, publish, reason_to_refuse, table

from manylora.core.config import GIB, MIB
from manylora.core.costs.features import StepFeatures
from manylora.core.costs.step_log import LoadRecord, StepRecord
from manylora.execution.assist.shares import PROBE_ROWS, time_rows
from manylora.execution.device import describe_machine
from manylora.lab.catalog.dims import ModelDims
from manylora.lab.catalog.hardware import HARDWARE, Hardware, find_hardware
from manylora.lab.catalog.models import dims_from_config
from manylora.lab.costs.roofline import RooflineCost
from manylora.lab.costs.workers import CpuWorkers

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BATCHES = (1, 4, 16)
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 9

WORKER_SHAPES = {
    "q, k, v, rank 16": (4096, 4096, 48),
    "q, k, v, rank 64": (4096, 4096, 192),
    "q, k, v, rank 128": (4096, 4096, 384),
    "o, rank 64": (4096, 4096, 64),
    "gate, up, rank 64": (4096, 11008, 128),
    "down, rank 64": (11008, 4096, 64),
}
"""Inputs, outputs and rank of one module with the work of the group."""

WORKER_ROWS, CALLS = (1, 4, 8, *PROBE_ROWS, 256), 5


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return what time is counted in: the processor's own on a CPU."""
    return perf_counter if device.type == "cuda" else process_time


def seconds(run: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Return the median time of a run on the device, in seconds."""
    now, times = clock_of(device), []
    for _ in range(repeats + 1):
        start = now()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(now() - start)
    return median(times[1:])


def measure(device: torch.device, *, is_small: bool = False) -> dict[str, float]:
    """Return what the device reaches: operations, bytes and copied bytes per second, seconds per kernel.

    Args:
        device: Which.
        is_small: Measure with little, for a test: the rates then say nothing.
    """
    is_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if is_gpu else torch.float32
    size = 256 if is_small else 8192 if is_gpu else 1536
    square = torch.randn(size, size, device=device, dtype=dtype)
    out = torch.empty_like(square)
    product_s = seconds(lambda: torch.mm(square, square, out=out), device)
    # One row through as many weights as no cache holds: how a decode step reads.
    width, count = (256, 2) if is_small else (8192, 16) if is_gpu else (2048, 12)
    weights = [torch.randn(width, width, device=device, dtype=dtype) for _ in range(count)]
    row = torch.randn(1, width, device=device, dtype=dtype)

    def read() -> None:
        for weight in weights:
            torch.nn.functional.linear(row, weight)

    read_s = seconds(read, device)
    host = torch.empty(MIB if is_small else GIB // 4, dtype=torch.uint8, pin_memory=is_gpu)
    target = torch.empty_like(host, device=device)
    copy_s = seconds(lambda: target.copy_(host, non_blocking=is_gpu), device)
    return {
        "flops_per_s": 2 * size**3 / product_s,
        "memory_bytes_per_s": sum(weight.nbytes for weight in weights) / read_s,
        "launch_s": launch_s(device),
        "link_bytes_per_s": host.nbytes / copy_s,
    }


def launch_s(device: torch.device, count: int = 1000) -> float:
    """Return the time from one of the shortest kernels to the next: in a captured graph where there are graphs."""
    number = torch.zeros(1, device=device)

    def chain() -> None:
        for _ in range(count):
            number.add_(1)

    if device.type != "cuda":
        return seconds(chain, device) / count
    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    return seconds(graph.replay, device) / count


def profile(rates: dict[str, float], like: str | None, name: str) -> Hardware:
    """Put measured rates into a profile: as shares of the peak where a data sheet gives one."""
    if like is None:
        return Hardware(
            name=name,
            memory_bytes=8 * GIB,
            flops_per_s=rates["flops_per_s"],
            memory_bytes_per_s=rates["memory_bytes_per_s"],
            link_bytes_per_s=rates["link_bytes_per_s"],
            launch_s=rates["launch_s"],
            flops_share=1.0,
            memory_share=1.0,
        )
    known = find_hardware(like)
    return replace(
        known,
        name=name,
        flops_share=min(1.0, rates["flops_per_s"] / known.flops_per_s),
        memory_share=min(1.0, rates["memory_bytes_per_s"] / known.memory_bytes_per_s),
        launch_s=rates["launch_s"],
        link_bytes_per_s=rates["link_bytes_per_s"],
    )


def as_toml(hardware: Hardware) -> str:
    values = {field.name: getattr(hardware, field.name) for field in fields(hardware)}
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


class Live:
    """The live engine of `throughput.py`, whose steps are logged.

    Args:
        folder: Where the model and its adapters are made.
        device: Where it runs.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        # Imported here: they bring transformers and PEFT, which measuring a profile does without.
        from cpu_systems import RANKS, VOCAB, Ours, make_adapters, make_model
        from peers import PeerRequest

        make_model(folder / "base")
        adapters = make_adapters(
            folder / "base", folder / "adapters", [RANKS[i % len(RANKS)] for i in range(max(BATCHES))]
        )
        self.dims = dims_from_config(json.loads((folder / "base" / "config.json").read_text()))
        self.now = clock_of(device)
        self.records: list[StepRecord | LoadRecord] = []
        self.engine = Ours(folder / "base", {"wide": adapters}, device=device.type, log=self.records.append)
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(3, VOCAB, (max(BATCHES), PROMPT_TOKENS), generator=generator).tolist()
        self.asked = [PeerRequest(tuple(prompt), 1) for prompt in prompts]

    def run(self, batch: int, num_output_tokens: int, *, is_mixed: bool) -> tuple[float, list[StepFeatures]]:
        """Serve a batch of requests; return its time, in seconds, and its steps."""
        self.records.clear()
        asked = [replace(one, num_out=num_output_tokens) for one in self.asked[:batch]]
        began = self.now()
        self.engine.run(asked, [f"wide-{index}" for index in range(batch)] if is_mixed else None)
        took = self.now() - began
        return took, [record.features for record in self.records if isinstance(record, StepRecord)]


def compare(device: torch.device, like: str | None, rounds: int) -> list[dict[str, Any]]:
    """Return live over modelled time by kind of step and batch; rates are measured anew for each round."""
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        live = Live(Path(folder), device)
        for number in range(-1, rounds):  # one to warm up
            cost = make_roofline(live.dims, profile(measure(device), like, "measured"))
            for batch, is_mixed in product(BATCHES, (False, True)):
                prompts_s, prompts = live.run(batch, 1, is_mixed=is_mixed)
                all_s, steps = live.run(batch, OUTPUT_TOKENS, is_mixed=is_mixed)
                if number < 0:
                    continue
                modelled = [sum(sum(cost.price(step)) for step in run) for run in (prompts, steps)]
                adapted = "with adapters" if is_mixed else "base"
                num_decodes = len(steps) - len(prompts)
                found.setdefault((f"prompts, {adapted}", batch), []).append((prompts_s, prompts_s / modelled[0]))
                decode_s = all_s - prompts_s
                ratio = decode_s / (modelled[1] - modelled[0])
                found.setdefault((f"decode, {adapted}", batch), []).append((decode_s / num_decodes, ratio))
        live.engine.close()
    rows = []
    for (step, batch), pairs in sorted(found.items()):
        times, ratios = zip(*pairs, strict=True)
        rows.append({"step": step, "batch": batch, "live_ms": 1e3 * median(times), "ratio": median(ratios)})
    return rows


def make_roofline(dims: ModelDims, hardware: Hardware) -> RooflineCost:
    return RooflineCost(dims, hardware, lora_kernel="ragged", targets=TARGETS)


def report(machine: str, hardware: Hardware, rows: list[dict[str, Any]], rounds: int) -> str:
    reached = {
        "large products, Gop/s": hardware.flops_per_s * hardware.flops_share / 1e9,
        "weights read for one row, GB/s": hardware.memory_bytes_per_s * hardware.memory_share / 1e9,
        "shortest kernel, us": hardware.launch_s * 1e6,
        "copy to the device, GB/s": hardware.link_bytes_per_s / 1e9,
    }
    lines = [
        "# The roofline on this machine",
        "",
        f"`python bench/device.py --compare` on {machine}.",
        "",
        *table(("measured without a model", ""), ((name, f"{value:.1f}") for name, value in reached.items())),
        "",
        f"Live steps of an 82M-parameter model (prompts of {PROMPT_TOKENS} tokens, adapters of rank 8 to 128 on",
        "all linears, one per request) over what the roofline says with these rates and nothing",
        f"fitted. Rates were measured anew in each of {rounds} rounds; medians. On a CPU: processor time, one thread.",
        "",
        *table(
            ("step", "batch", "live, ms", "live / modelled"),
            ((row["step"], row["batch"], f"{row['live_ms']:.1f}", f"{row['ratio']:.2f}") for row in rows),
        ),
    ]
    return "\n".join(lines)


def measure_workers(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return a core's seconds by round, for each shape and number of rows, from memory and (``hot``) from a cache."""
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(-1, rounds):  # one to warm up
        for name, shape in WORKER_SHAPES.items():
            cold = time_rows(*shape, "bfloat16", WORKER_ROWS * CALLS)
            hot = time_rows(*shape, "bfloat16", WORKER_ROWS * CALLS, num_bytes=0)
            for kind, took in (("cold", cold), ("hot", hot)):
                for place, num_rows in enumerate(WORKER_ROWS):
                    if number >= 0:
                        of_calls = median(took[place :: len(WORKER_ROWS)])
                        found.setdefault(f"{name}, {kind}", {}).setdefault(str(num_rows), []).append(of_calls)
    return found


def worker_rates(found: Mapping[str, Mapping[str, Sequence[float]]], kind: str) -> dict[str, list[float]]:
    """Return the rates of `CpuWorkers` by round, each the median over the shapes."""
    rates: dict[str, list[list[float]]] = {
        name: [] for name in ("core_flops_per_s", "core_bytes_per_s", "row_bytes_per_s")
    }
    for name, (inputs, outputs, rank) in WORKER_SHAPES.items():
        one, few, many = (found[f"{name}, {kind}"][str(rows)] for rows in (1, *PROBE_ROWS))
        num_weights = rank * (inputs + outputs)
        row_s = [(b - a) / (PROBE_ROWS[1] - PROBE_ROWS[0]) for a, b in zip(few, many, strict=True)]
        fixed_s = [max(1e-9, a - PROBE_ROWS[0] * row) for a, row in zip(few, row_s, strict=True)]
        rates["core_flops_per_s"].append([2 * num_weights / row for row in row_s])
        rates["core_bytes_per_s"].append([2 * num_weights / fixed for fixed in fixed_s])
        rates["row_bytes_per_s"].append([2 * num_weights / took for took in one])
    return {name: [median(of_round) for of_round in zip(*shapes, strict=True)] for name, shapes in rates.items()}


def worker_report(found: Mapping[str, Mapping[str, Sequence[float]]], machine: str, rounds: int) -> str:
    """Return the page of a core's rates, and of what they say of each shape."""
    rates = {kind: worker_rates(found, kind) for kind in ("cold", "hot")}
    units = {"core_flops_per_s": "Gop/s", "core_bytes_per_s": "GB/s", "row_bytes_per_s": "GB/s"}
    profile = {name: median(values) for name, values in rates["cold"].items()}
    workers = CpuWorkers(
        core_flops_per_s=profile["core_flops_per_s"],
        core_bytes_per_s=profile["core_bytes_per_s"],
        row_bytes_per_s=profile["row_bytes_per_s"],
    )
    rows = []
    for name, (inputs, outputs, rank) in WORKER_SHAPES.items():
        cells = []
        for num_rows in WORKER_ROWS:
            took = median(found[f"{name}, cold"][str(num_rows)])
            priced = workers.run_s(num_rows, rank * (inputs + outputs), 2)
            cells.append(f"{1e6 * took:.0f} / {priced / took:.2f}")
        rows.append((name, *cells))
    return "\n".join(
        [
            "# A core that computes adapters",
            "",
            f"`python bench/device.py --workers` on {machine}: the kernels of `execution/assist`, one core,",
            f"bfloat16, shapes of Llama-2-7B; medians of {rounds} rounds with 95 % intervals. Cold: each call reads",
            "weights that no cache holds, as a step does. Hot: all calls read the same weights. The former profile",
            "of the simulator was hot: 92.5 Gop/s, and all cores together read weights at 100 GB/s.",
            "",
            *table(
                ("rate of a core", "cold", "hot"),
                (
                    (
                        f"{name}, {unit}",
                        *(middle_of_rounds([value / 1e9 for value in rates[kind][name]]) for kind in ("cold", "hot")),
                    )
                    for name, unit in units.items()
                ),
            ),
            "",
            "Microseconds by rows, cold, and the time that the profile says over it:",
            "",
            *table(("shape", *WORKER_ROWS), rows),
        ]
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--like", choices=HARDWARE, help="a profile for what is not measured")
    parser.add_argument("--profile", type=Path, help="write the measured profile here, as TOML")
    parser.add_argument("--compare", action="store_true", help="hold the roofline against live steps; writes results")
    parser.add_argument("--workers", action="store_true", help="measure a core that computes adapters; writes results")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.workers:
        torch.set_num_threads(1)
        others, found = Others(), measure_workers(max(LEAST_ROUNDS, args.rounds))
        machine, rounds = describe_machine(torch.device("cpu")), max(LEAST_ROUNDS, args.rounds)
        refused = reason_to_refuse(rounds, others.share())
        publish(
            "workers", {"machine": machine, "seconds": found}, worker_report(found, machine, rounds), refused=refused
        )
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    hardware = profile(measure(device), args.like, f"measured {args.like or device.type}")
    print(as_toml(hardware))
    if args.profile is not None:
        args.profile.write_text(as_toml(hardware))
    if args.compare:
        rows = compare(device, args.like, args.rounds)
        text = report(describe_machine(device), hardware, rows, args.rounds)
        publish("device", {"machine": describe_machine(device), "profile": as_toml(hardware), "steps": rows}, text)


if __name__ == "__main__":
    main()
