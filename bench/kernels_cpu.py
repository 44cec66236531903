"""How far each kernel of a CPU step is from the least time physics allows, and a whole step from the sum of those.

    python bench/kernels_cpu.py [--threads N] [--processor-time]

The floor first: what memory gives when it is only read (sums over ten times 64 MB), and what a plain product reaches
(2048 rows, weights packed). A kernel's floor is then the larger of its bytes over the one and its operations over the
other. Shapes are those of `throughput.py`: 32 sequences at 160 tokens that decode, with 32 adapters of rank 8 to 128
on all linears, and 2048 rows of prompts with 16 of them. Calls go round the layers, so that no weight is in a cache
when it is read. Everything takes turns; a time is the best tenth of
the calls (other work only ever adds to them).

Writes `bench/results/kernels_cpu.json` and `.md`.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cpu_systems import HEADS, HIDDEN, INTERMEDIATE, LAYERS, RANKS, VOCAB
from publishing import arguments, clock_of, publish, table

from manylora.core.adapters.layout import lay_out
from manylora.core.adapters.shape import BaseShape
from manylora.execution.device import describe_machine
from manylora.execution.kernels.cpu.support import find_compiled
from manylora.execution.kernels.linear import linear, pack
from manylora.execution.lora.batch import LoraBatch, LoraSegment
from manylora.execution.lora.kernels import LORA_KERNELS
from manylora.execution.storage.page_tensor import PageTensor
from manylora.execution.storage.resident import make_resident
from manylora.lab.catalog.dims import ModelDims
from manylora.lab.catalog.models import base_shape

NUM_ROWS, NUM_PROMPT_ROWS, CONTEXT, BLOCK = 32, 2048, 160, 16
HEAD_DIM = HIDDEN // HEADS
PRODUCTS = ((HIDDEN, 3 * HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 2 * INTERMEDIATE), (INTERMEDIATE, HIDDEN))
GROUPS = ("self_attn.qkv", "self_attn.o_proj", "mlp.gate_up", "mlp.down_proj")


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel over one layer.

    Args:
        run: Does it for a layer.
        num_bytes: Read and written at least.
        num_operations: Multiplications and additions.
        count: Calls in a decoding step, 0 for a call of prompts; of experts, their pairs with adapters.
    """

    run: Callable[[int], object]
    num_bytes: float
    num_operations: float
    count: int


def main() -> None:
    parser = arguments(__doc__, processor_time=True)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = clock_of(options, time.thread_time)
    torch.manual_seed(0)
    cases = {**floor_cases(), **product_cases(), **attention_cases(), **lora_cases()}
    best = time_calls(cases, options.rounds, LAYERS, clock)
    report = summarise(cases, best, "python bench/kernels_cpu.py" + " --processor-time" * options.processor_time)
    report["steps"] = add_up(report["kernels"])
    publish("kernels_cpu", report, page(report))


def time_calls(
    cases: dict[str, Case], num_rounds: int, num_layers: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Return the best tenth of the calls of each case, in seconds; they take turns, and go round the layers."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    with torch.inference_mode():
        for number, (name, case) in itertools.product(range(-1, num_rounds), cases.items()):
            for layer in range(num_layers):
                began = clock()
                case.run(layer)
                if number >= 0:
                    times[name].append(clock() - began)
    return {name: float(np.quantile(samples, 0.1)) for name, samples in times.items()}


FLOORS = ("read", "product")


def floor_cases() -> dict[str, Case]:
    memory = torch.ones(LAYERS, 16 * 2**20)
    x, weight = torch.randn(NUM_PROMPT_ROWS, HIDDEN), pack(torch.randn(3 * HIDDEN, HIDDEN))
    return {
        "read": Case(lambda layer: memory[layer].sum(), memory[0].nbytes, 0, 0),
        "product": Case(lambda _: linear(x, weight), 0, 2.0 * x.numel() * 3 * HIDDEN, 0),
    }


def product_cases() -> dict[str, Case]:
    weights = [[pack(torch.randn(out, width)) for width, out in PRODUCTS] for _ in range(LAYERS)]
    head = pack(torch.randn(VOCAB, HIDDEN))
    num_weights = sum(width * out for width, out in PRODUCTS)

    def multiply(num_rows: int) -> Callable[[int], object]:
        inputs = {width: torch.randn(num_rows, width) for width, _ in PRODUCTS}
        return lambda layer: [
            linear(inputs[width], weight) for (width, _), weight in zip(PRODUCTS, weights[layer], strict=True)
        ]

    x = torch.randn(NUM_ROWS, HIDDEN)
    return {
        f"base products, {NUM_ROWS} rows": Case(
            multiply(NUM_ROWS), 4.0 * num_weights, 2.0 * num_weights * NUM_ROWS, LAYERS
        ),
        f"head, {NUM_ROWS} rows": Case(
            lambda _: linear(x, head), 4.0 * VOCAB * HIDDEN, 2.0 * VOCAB * HIDDEN * NUM_ROWS, 1
        ),
        f"base products, {NUM_PROMPT_ROWS} rows": Case(
            multiply(NUM_PROMPT_ROWS), 4.0 * num_weights, 2.0 * num_weights * NUM_PROMPT_ROWS, 0
        ),
    }


def attention_cases() -> dict[str, Case]:
    kernels = find_compiled()
    assert kernels is not None, "the compiled kernels cannot run here (extra: cpu)"
    per_row = -(-CONTEXT // BLOCK)
    shape = bench_shape().page
    pool = torch.randn(NUM_ROWS * per_row, shape.num_elements)
    tables = np.random.default_rng(0).permutation(NUM_ROWS * per_row).reshape(NUM_ROWS, per_row).astype(np.int64)
    bounds = np.tile(np.array([0, CONTEXT], dtype=np.int64), (NUM_ROWS, 1))
    query = torch.randn(NUM_ROWS, HEADS, HEAD_DIM)
    kv = 2.0 * NUM_ROWS * CONTEXT * HIDDEN
    return {
        f"attention, {NUM_ROWS} x {CONTEXT} tokens": Case(
            lambda layer: kernels.attend(query, pool, shape, layer, tables, bounds, scaling=0.125, softcap=None),
            4 * kv,
            2 * kv,
            LAYERS,
        )
    }


def bench_shape() -> BaseShape:
    return base_shape(
        ModelDims(
            name="bench",
            hidden_size=HIDDEN,
            num_layers=LAYERS,
            num_heads=HEADS,
            num_kv_heads=HEADS,
            head_dim=HEAD_DIM,
            intermediate_size=INTERMEDIATE,
            vocab_size=VOCAB,
            max_model_len=2048,
            dtype="float32",
        )
    )


def lora_cases() -> dict[str, Case]:
    base = bench_shape()
    cases: dict[str, Case] = {}
    for dtype in ("float32", "bfloat16"):
        decode = lora_case(base, dtype, mixed_ranks(NUM_ROWS), 1, LAYERS)
        prompts = lora_case(base, dtype, mixed_ranks(16), NUM_PROMPT_ROWS // 16, 0)
        cases[f"LoRA, {NUM_ROWS} adapters, a row each, {dtype}"] = decode
        cases[f"LoRA, 16 adapters, {NUM_PROMPT_ROWS // 16} rows each, {dtype}"] = prompts
    return cases


def mixed_ranks(num_adapters: int) -> list[int]:
    return [RANKS[index % len(RANKS)] for index in range(num_adapters)]


def lora_case(base: BaseShape, dtype: str, ranks: list[int], rows_each: int, per_step: int) -> Case:
    layouts = [lay_out(dict.fromkeys(base.all_linear, rank), base, dtype) for rank in ranks]
    storage = PageTensor(base.page, sum(layout.num_pages for layout in layouts), torch.device("cpu"))
    flat = storage.flat_as(dtype)
    flat.copy_(torch.randn(flat.shape[1]).to(flat.dtype))
    segments: list[LoraSegment] = []
    page = 0
    for index, layout in enumerate(layouts):
        resident = make_resident(layout, range(page, page + layout.num_pages), storage)
        page += layout.num_pages
        first = index * rows_each
        segments.append(LoraSegment(resident, first, first + rows_each, index, index + 1))
    batch = LoraBatch(tuple(segments))
    num_rows = len(ranks) * rows_each
    inputs = [torch.randn(num_rows, width) for width, _ in PRODUCTS]
    outputs = [torch.zeros(num_rows, out) for _, out in PRODUCTS]

    def run(layer: int) -> None:
        for group, x, out in zip(GROUPS, inputs, outputs, strict=True):
            parts = batch.parts(f"model.layers.{layer}.{group}")
            assert parts is not None
            LORA_KERNELS["grouped"](x, out, parts)

    num_weights = sum(layout.used_elements for layout in layouts) / LAYERS
    # Prompts read inputs once, and read and write outputs, beside the weights.
    activations = sum(x.numel() + 2 * out.numel() for x, out in zip(inputs, outputs, strict=True))
    size = 4 if dtype == "float32" else 2
    return Case(run, size * num_weights + 4.0 * activations, 2 * num_weights * rows_each, per_step)


def summarise(cases: dict[str, Case], best: dict[str, float], command: str) -> dict[str, Any]:
    bytes_per_s = cases["read"].num_bytes / best["read"]
    operations_per_s = cases["product"].num_operations / best["product"]
    rows = {
        name: {
            "seconds": best[name],
            "floor_s": max(case.num_bytes / bytes_per_s, case.num_operations / operations_per_s),
            "bytes_per_s": case.num_bytes / best[name],
            "operations_per_s": case.num_operations / best[name],
            "count": case.count,
        }
        for name, case in cases.items()
        if name not in FLOORS
    }
    return {
        "command": command,
        "machine": f"{describe_machine(torch.device('cpu'))}",
        "load_average": os.getloadavg()[1],
        "bytes_per_s": bytes_per_s,
        "operations_per_s": operations_per_s,
        "kernels": rows,
    }


def add_up(rows: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    steps = {}
    for what, unwanted in (("base", "LoRA"), ("float32", "bfloat16"), ("bfloat16", "float32")):
        parts = [row for name, row in rows.items() if unwanted not in name]
        steps[what] = {key: sum(row["count"] * row[key] for row in parts) for key in ("seconds", "floor_s")}
    return steps


def against_floor(row: dict[str, float], unit: float, digits: int) -> tuple[str, str, str]:
    took, floor = row["seconds"], row["floor_s"]
    return f"{unit * took:.{digits}f}", f"{unit * floor:.{digits}f}", f"{floor / took:.0%}"


def page(report: dict[str, Any]) -> str:
    names = {
        "base": "a decoding step, no adapters",
        "float32": "the same with 32 adapters, float32",
        "bfloat16": "the same with 32 adapters, bfloat16",
    }
    lines = [
        "# Kernels of a CPU step against their floors",
        "",
        f"`{report['command']}` on {report['machine']}: memory is read at {report['bytes_per_s'] / 1e9:.1f} GB/s and a "
        f"large product reaches {report['operations_per_s'] / 1e9:.0f} GFLOP/s. A floor is bytes over the one or "
        "operations over the other, whichever is longer. Per layer, in microseconds; shapes as in the script. The load "
        f"average of the machine was {report['load_average']:.1f}.",
        "",
        *table(
            ("kernel", "time", "floor", "floor / time", "GB/s", "GFLOP/s"),
            (
                (
                    name,
                    *against_floor(row, 1e6, 0),
                    f"{row['bytes_per_s'] / 1e9:.1f}",
                    f"{row['operations_per_s'] / 1e9:.0f}",
                )
                for name, row in report["kernels"].items()
            ),
        ),
        "",
        *table(
            ("step: these kernels added up, in milliseconds", "time", "floor", "floor / time"),
            ((names[what], *against_floor(row, 1e3, 1)) for what, row in report["steps"].items()),
        ),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
