"""How long will a step take on a GPU? Written down before one is measured, by the formula of the simulator.

    python bench/predicted_steps.py

The formula is `RooflineCost` with the constants of `docs/cost-model.md`, none of which was set by one of these figures:
bytes at 80 % of the data sheet's bandwidth, operations at 55 to 60 % of its peak, 2 us for each launch in a captured
graph, and for the host 0.3 ms in place of 1. First it is held against what others have published of steps; then it says
what ours should take, and the floor below which no step can fall: the same bytes and operations at the data sheet's
rates, without launches, host and exchanges between devices. It writes `results/predicted_steps.md`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from publishing import arguments, publish, table

from manylora.core.costs.features import step_features
from manylora.core.types import AdapterKey
from manylora.lab.catalog.hardware import Hardware, find_hardware
from manylora.lab.catalog.models import find_dims
from manylora.lab.costs.collectives import CollectiveCost
from manylora.lab.costs.idle import decode_step
from manylora.lab.costs.model import SyntheticSequence, synthetic_plan
from manylora.lab.costs.roofline import DENSE_LAUNCHES, RooflineCost, memory_for_pool

MODEL = "llama-3-8b"
DEVICES = ("a100-80", "h100", "h200")
QV = ("q_proj", "v_proj")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
HOST_S = 0.3e-3

LAYER_LAUNCHES = DENSE_LAUNCHES
"""Launches of a layer that decodes: nine (`tests/execution/fusion/test_triton_fused.py`), one that adds up contexts."""

STEP_LAUNCHES = 6
"""Launches of a step outside its layers: the embedding, its norm, the last rows, the head, its copy, the tokens."""


@dataclass(frozen=True)
class Step:
    """A step of one kind: sequences that decode, the tokens each has, and adapters."""

    batch: int
    context: int
    adapters: int = 0
    rank: int = 16
    targets: tuple[str, ...] = QV
    prompt: int = 0  # tokens of one prompt beside them
    model: str = MODEL
    size: int = 1  # devices that share it

    def sequences(self) -> list[SyntheticSequence]:
        keys = [AdapterKey(str(i * self.adapters // self.batch)) if self.adapters else None for i in range(self.batch)]
        rank = self.rank if self.adapters else 0
        rows = [SyntheticSequence(self.context - 1, 1, key, rank) for key in keys]
        return rows + [SyntheticSequence(0, self.prompt, keys[0], rank)] * bool(self.prompt)


STEPS = (
    *(Step(batch, 512) for batch in (1, 32, 64, 128)),
    *(Step(batch, 512, adapters=min(batch, 64), rank=rank) for batch in (32, 128) for rank in (16, 64)),
    *(Step(64, 512, adapters=64, rank=16, targets=targets) for targets in (QV, ALL)),
    *(Step(batch, context) for batch, context in ((32, 8192), (128, 4096), (1, 32768), (16, 32768))),
    *(Step(64, 512, adapters=adapters, prompt=prompt) for adapters in (0, 64) for prompt in (64, 448)),
)


SHARED = tuple(
    Step(batch, 512, adapters=adapters, targets=targets, prompt=prompt, model=model, size=size)
    for model, sizes in ((MODEL, (2,)), ("llama-3-70b", (2, 4, 8)))
    for size in sizes
    for batch, adapters, targets, prompt in (
        *((batch, 0, QV, 0) for batch in (1, 64, 128)),
        *((64, 64, targets, 0) for targets in (QV, ALL)),
        *((64, 64, ALL, prompt) for prompt in (448, 2048)),
    )
)
"""Steps of models over several H100, linked by NVLink."""


def cost_of(step: Step, hardware: Hardware, host_s: float) -> RooflineCost:
    return RooflineCost(step.model, hardware, targets=step.targets, tensor_parallel_size=step.size, host_s=host_s)


def price(step: Step, device: str, *, is_floor: bool) -> float:
    """Return the duration of a step in seconds, or what no step can fall below."""
    hardware = find_hardware(device)
    if is_floor:
        hardware = replace(hardware, flops_share=1.0, memory_share=1.0, launch_s=1e-12)
    parts = cost_of(step, hardware, 0.0 if is_floor else HOST_S).price(step_features(synthetic_plan(step.sequences())))
    return sum(parts) - (parts.network_s if is_floor else 0.0)


def launches(step: Step) -> int:
    """Return the launches of a step on one device: two for each group that adapters change."""
    dims = find_dims(step.model)
    groups = 0 if not step.adapters else 1 if step.targets is QV else 4
    prompt = bool(step.prompt)  # attention once more, of the prompt's rows
    return dims.num_layers * (LAYER_LAUNCHES + 2 * groups + prompt) + STEP_LAUNCHES + bool(step.adapters)


def published() -> list[dict[str, Any]]:
    """Return the steps that others have published, and what the formula says of them."""

    def article(kernel: str) -> float:
        # Llama-70B with weights of 4 bits on one H100, 128 sequences over 30 GB of KV, 40 adapters of rank 16.
        cost = RooflineCost(replace(find_dims("llama-3-70b"), weight_bits=4), "h100", lora_kernel=kernel)
        context = int(30e9 / cost.dims.kv_bytes_per_token / 128)
        rows = (SyntheticSequence(context - 1, 1, AdapterKey(str(i % 40)), 16) for i in range(128))
        parts = cost.price(step_features(synthetic_plan(rows)))
        return sum(parts) if kernel == "none" else parts.adapters_s

    s_lora = RooflineCost("llama-7b", "a40", lora_kernel="s-lora-mbgmm")
    alone = sum(sum(s_lora.price(decode_step(200, rank))) for rank in (8, 16, 32, 64, 128)) / 5
    rows = [
        (
            "S-LoRA on an A40, Llama-7B, one sequence: time between tokens",
            "Chameleon, figure 12: a fifth of 150 ms",
            30.0,
            alone,
        ),
        ("Llama-70B, batch 128, without adapters", "article on multi-LoRA in vLLM", 28.5, article("none")),
        *(
            (f"40 adapters of rank 16 add to it, {name}", "the same article", value, article(kernel))
            for name, value, kernel in (
                ("a product for each", 48.2, "naive"),
                ("grouped by adapter", 8.6, "grouped"),
                ("one kernel", 3.1, "ragged"),
            )
        ),
    ]
    return [
        {"step": what, "source": source, "published ms": ms, "formula ms": 1e3 * s, "error": 1e3 * s / ms - 1}
        for what, source, ms, s in rows
    ]


def ours() -> list[dict[str, Any]]:
    """Return the predictions of our steps that fit each device."""
    rows = []
    for device in DEVICES:
        pool = memory_for_pool(MODEL, device)
        for step in STEPS:
            if step.batch * step.context * find_dims(MODEL).kv_bytes_per_token > pool:
                continue
            floor_s, own_s = (price(step, device, is_floor=is_floor) for is_floor in (True, False))
            row = {"device": device} | asdict(step) | {"launches": launches(step)}
            rows.append(row | {"floor ms": 1e3 * floor_s, "ours ms": 1e3 * own_s, "floor over ours": floor_s / own_s})
    return rows


def shared() -> list[dict[str, Any]]:
    """Return the predictions of steps of models that several H100 share."""
    hardware, rows = find_hardware("h100"), []
    for step in SHARED:
        dims, pool = find_dims(step.model), memory_for_pool(step.model, hardware, step.size)
        if (step.batch * step.context + step.prompt) * dims.kv_bytes_per_token > pool:
            continue
        cost = CollectiveCost(dims, hardware, step.size, step.targets, is_by_table=True)
        calls = list(cost.calls(step_features(synthetic_plan(step.sequences()))))
        floor_s, own_s = (price(step, "h100", is_floor=is_floor) for is_floor in (True, False))
        rows.append(
            asdict(step)
            | {
                "launches": launches(step),
                "collectives": sum(call.num_calls for call in calls),
                "MB": sum(call.num_calls * call.num_bytes for call in calls) / 1e6,
                "collectives ms": 1e3 * sum(call.num_calls * cost.time_s(call) for call in calls),
                "floor ms": 1e3 * floor_s,
                "ours ms": 1e3 * own_s,
            }
        )
    return rows


def report(others: list[dict[str, Any]], own: list[dict[str, Any]], over_several: list[dict[str, Any]]) -> str:
    def adapters(row: dict[str, Any]) -> str:
        if not row["adapters"]:
            return "none"
        return f"{row['adapters']} of rank {row['rank']} on {'q, v' if row['targets'] == QV else 'all linears'}"

    lines = [
        "# Steps on GPUs, predicted",
        "",
        "`python bench/predicted_steps.py`: dimensions, data sheets and the constants of `docs/cost-model.md`; nothing",
        "was measured, so anyone gets the same digits. They stand here before the first measurement on a device.",
        "",
        "## The formula on what others have published",
        "",
        *table(
            ("step", "source", "published, ms", "formula, ms", "error"),
            (
                (r["step"], r["source"], f"{r['published ms']:.1f}", f"{r['formula ms']:.1f}", f"{r['error']:+.0%}")
                for r in others
            ),
            left=2,
        ),
        "",
        "The base step of the article is missed because its device is not stated: weights of 4 bits and 30 GB of KV",
        "on one H100 take longer than it says, at any share of the peak ([unloaded.md](unloaded.md)). What adapters",
        "add does not depend on it.",
        "",
        "## Ours",
        "",
        f"{MODEL} in 16 bits. The floor is the bytes and operations at the data sheet's rates. Ours adds launches, the",
        "host and the shares of the rates that kernels reach. Launches are counted as in a captured graph.",
        "",
        *table(
            (
                "device",
                "adapters",
                "decoding",
                "tokens each",
                "prompt",
                "launches",
                "floor, ms",
                "ours, ms",
                "floor / ours",
            ),
            (
                (
                    *(r["device"], adapters(r), r["batch"], f"{r['context']:,}", r["prompt"] or "", r["launches"]),
                    *(f"{r['floor ms']:.2f}", f"{r['ours ms']:.2f}", f"{r['floor over ours']:.2f}"),
                )
                for r in own
            ),
            left=2,
        ),
        "",
        "## Several devices",
        "",
        "H100 with NVLink, 512 tokens each, 16 bits. Collectives and the bytes of one device's tensors are those that",
        "execution makes; their time is NCCL's own estimate for one host (`lab/costs/collectives.py`), and nothing",
        "runs beside them. Scratch of adapters has room for three modules of rank 128 in steps of up to 512 tokens.",
        "The floor exchanges nothing.",
        "",
        *table(
            (
                *("model", "adapters", "devices", "decoding", "prompt", "launches", "collectives", "MB"),
                *("collectives, ms", "floor, ms", "ours, ms"),
            ),
            (
                (
                    *(r["model"], adapters(r), r["size"], r["batch"], r["prompt"] or "", r["launches"]),
                    *(r["collectives"], f"{r['MB']:.0f}"),
                    *(f"{r[name]:.2f}" for name in ("collectives ms", "floor ms", "ours ms")),
                )
                for r in over_several
            ),
            left=2,
        ),
    ]
    return "\n".join(lines)


def main() -> None:
    arguments(__doc__).parse_args()
    others, own, over_several = published(), ours(), shared()
    figures = {"published": others, "ours": own, "shared": over_several}
    publish("predicted_steps", figures, report(others, own, over_several))


if __name__ == "__main__":
    main()
