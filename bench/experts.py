"""How far LoRA of a mixture's experts is from the least time physics allows, and how much it adds to a layer's experts.

    python bench/experts.py [--threads N] [--rounds N]

The floor first, as in `kernels_cpu.py`: what memory gives when it is only read, and what a plain product reaches. The
floor of LoRA is the larger of its bytes (A and B of each expert and adapter that any row chose, each once, and the
rows) over the one and its operations over the other; of a layer it is that of the base's products besides. Rows choose
experts evenly at random, so a step of several rows chooses most of them: 32 experts of width 512, 4 for a row, on 4
layers of width 1024, and adapters of rank 8 on both weights. Calls go round the layers, so that no weight is in a cache
when it is read; everything takes turns; a time is the best tenth of the calls.

Writes `bench/results/experts.json` and `.md`.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from kernels_cpu import Case, against_floor, floor_cases, summarise, time_calls
from publishing import arguments, publish, table
from transformers import AutoModelForCausalLM, MixtralConfig

from manylora.core.adapters.layout import lay_out
from manylora.execution.lora.batch import LoraBatch, LoraSegment, StepContext
from manylora.execution.lora.kernels import LORA_KERNELS
from manylora.execution.model.experts import AdaptedExperts
from manylora.execution.storage.page_tensor import PageTensor
from manylora.execution.storage.resident import make_resident
from manylora.lab.catalog.dims import ModelDims
from manylora.lab.catalog.models import base_shape

LAYERS, HIDDEN, INNER, EXPERTS, CHOSEN, RANK = 4, 1024, 512, 32, 4, 8
STEPS = {"16 adapters, a row each": (16, 1), "8 adapters, 64 rows each": (8, 64)}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    cases = floor_cases()
    experts = make_experts()
    for dtype, (name, (num_adapters, rows_each)) in itertools.product(("float32", "bfloat16"), STEPS.items()):
        cases |= step_cases(experts, dtype, f"{name}, {dtype}", num_adapters, rows_each)
    report = summarise(cases, time_calls(cases, options.rounds, LAYERS), "python bench/experts.py")
    publish("experts", report, page(report))


def make_experts() -> list[torch.nn.Module]:
    """Return the experts of some layers of a model of transformers."""
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
    )
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    return [layer.mlp.experts for layer in model.model.layers]


class Recorded:
    """The LoRA kernel, which keeps its inputs so that it can be run again by itself."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *inputs: Any) -> None:
        self.calls.append(inputs)
        LORA_KERNELS["grouped"](*inputs)


def step_cases(
    experts: list[torch.nn.Module], dtype: str, name: str, num_adapters: int, rows_each: int
) -> dict[str, Case]:
    """Return the layer without adapters, with them, and their LoRA alone."""
    dims = ModelDims(
        name="experts",
        hidden_size=HIDDEN,
        num_layers=LAYERS,
        num_heads=8,
        num_kv_heads=8,
        head_dim=HIDDEN // 8,
        intermediate_size=INNER,
        vocab_size=64,
        max_model_len=2048,
        num_experts=EXPERTS,
        experts_per_token=CHOSEN,
        dtype="float32",
    )
    base = base_shape(dims)
    ranks = {one.name: RANK * one.num_experts for one in base.modules if one.num_experts > 1}
    layout = lay_out(ranks, base, dtype)
    storage = PageTensor(base.page, num_adapters * layout.num_pages, torch.device("cpu"))
    flat = storage.flat_as(dtype)
    flat.copy_((0.1 * torch.randn(flat.shape[1])).to(flat.dtype))
    segments = []
    for number in range(num_adapters):
        pages = range(number * layout.num_pages, (number + 1) * layout.num_pages)
        first = number * rows_each
        resident = make_resident(layout, pages, storage)
        segments.append(LoraSegment(resident, first, first + rows_each, number, number + 1))
    num_rows = num_adapters * rows_each
    hidden, weights = torch.randn(num_rows, HIDDEN), torch.full((num_rows, CHOSEN), 1 / CHOSEN)
    chosen = torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(num_rows)])
    kernel = Recorded()
    step = StepContext(kernel)
    batch = LoraBatch(tuple(segments))
    adapted = [
        AdaptedExperts(one, (f"{path}.gate_up_proj", f"{path}.down_proj"), step)
        for layer, one in enumerate(experts)
        for path in [f"model.layers.{layer}.mlp.experts"]
    ]
    own = [one.forward for one in experts]
    step.lora = batch
    for one in adapted:
        one(hidden, chosen, weights)
    recorded = [kernel.calls[2 * layer : 2 * layer + 2] for layer in range(LAYERS)]
    step.kernel = LORA_KERNELS["grouped"]

    def lora(layer: int) -> None:
        for inputs in recorded[layer]:
            LORA_KERNELS["grouped"](*inputs)

    pairs = len({(row // rows_each, expert) for row, own in enumerate(chosen.tolist()) for expert in own})
    widths = 2 * HIDDEN + 3 * INNER  # inputs and outputs of both weights
    choices = num_rows * CHOSEN
    size = 4 if dtype == "float32" else 2
    lora_bytes = size * pairs * RANK * widths + 4.0 * choices * (widths + HIDDEN + 2 * INNER)
    lora_operations = 2.0 * choices * RANK * widths
    base_bytes = 4.0 * 3 * HIDDEN * INNER * len(chosen.unique())
    base_operations = 2.0 * 3 * HIDDEN * INNER * choices
    cases = {f"LoRA, {name}": Case(lora, lora_bytes, lora_operations, pairs)}
    cases[f"experts with LoRA, {name}"] = Case(
        lambda layer: adapted[layer](hidden, chosen, weights),
        base_bytes + lora_bytes,
        base_operations + lora_operations,
        0,
    )
    if dtype == "float32":
        cases[f"experts by transformers, without LoRA, {name.removesuffix(', float32')}"] = Case(
            lambda layer: own[layer](hidden, chosen, weights), base_bytes, base_operations, 0
        )
    return cases


def page(report: dict[str, Any]) -> str:
    lines = [
        "# LoRA of experts on a CPU against its floor",
        "",
        f"`{report['command']}` on {report['machine']}: memory is read at {report['bytes_per_s'] / 1e9:.1f} GB/s and a "
        f"large product reaches {report['operations_per_s'] / 1e9:.0f} GFLOP/s. A floor is bytes over the one or "
        "operations over the other, whichever is longer. Per layer, in microseconds: "
        f"{EXPERTS} experts of width {INNER}, {CHOSEN} for a row, on width {HIDDEN}, rank {RANK}. "
        f"The load average of the machine was {report['load_average']:.1f}.",
        "",
        *table(
            ("what", "pairs of expert and adapter", "time", "floor", "floor / time"),
            ((name, row["count"] or "", *against_floor(row, 1e6, 0)) for name, row in report["kernels"].items()),
        ),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
