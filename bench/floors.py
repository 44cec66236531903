"""The least time that physics allows a decode step of Llama-3-8B on a GPU, with and without adapters.

    python bench/floors.py

A step reads every weight once (but the embedding's table), the KV of every sequence once, and every weight of each
adapter in the batch once, at the memory's data-sheet bandwidth; its operations take less at these batches (shown).
What kernels reach of a copy's bandwidth, and what launches add, is measured by `gpu.sh`, not assumed here. Exact,
no seed. Writes `bench/results/floors.json` and `.md`.
"""

from __future__ import annotations

from typing import Any

from publishing import publish, table

from manylora.core.adapters.shape import BaseShape, ModuleKind
from manylora.lab.catalog.hardware import Hardware, find_hardware
from manylora.lab.catalog.models import base_shape

TARGETS = {
    "q, v": ("q_proj", "v_proj"),
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "all linears": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}
RANKS = (8, 16, 32, 64, 128)
CONTEXT, NUM_ADAPTERS = 512, 64
GOAL = 0.10


def weights(base: BaseShape) -> int:
    """Elements that a step multiplies with."""
    return sum(m.in_features * m.out_features for m in base.modules if m.kind is ModuleKind.LINEAR)


def adapter_elements(base: BaseShape, rank: int, targets: tuple[str, ...]) -> int:
    chosen = [m for m in base.modules if m.name.rpartition(".")[2] in targets]
    return sum(rank * (m.in_features + m.out_features) for m in chosen)


def base_rows(base: BaseShape, hardware: Hardware) -> list[dict[str, Any]]:
    rows = []
    for batch in (1, 32, 64, 128):
        num_bytes = weights(base) * 2 + batch * CONTEXT * base.page.num_bytes // base.page.block_size
        operations = 2 * batch * weights(base)
        floor_s = num_bytes / hardware.memory_bytes_per_s
        rows.append(
            {
                "device": hardware.name,
                "batch": batch,
                "GB": num_bytes / 1e9,
                "ms by bytes": floor_s * 1e3,
                "ms by operations": operations / hardware.flops_per_s * 1e3,
                "tokens/s at most": batch / floor_s,
            }
        )
    return rows


def adapter_rows(base: BaseShape, hardware: Hardware) -> list[dict[str, Any]]:
    step = {row["batch"]: row["ms by bytes"] for row in base_rows(base, hardware)}
    rows = []
    for name, targets in TARGETS.items():
        for rank in RANKS:
            added_ms = NUM_ADAPTERS * adapter_elements(base, rank, targets) * 2 / hardware.memory_bytes_per_s * 1e3
            shares = {f"added at batch {batch}": added_ms / step[batch] for batch in (64, 128)}
            rows.append(
                {
                    "device": hardware.name,
                    "targets": name,
                    "rank": rank,
                    "adapter MB": adapter_elements(base, rank, targets) * 2 / 1e6,
                    "added ms": added_ms,
                    **shares,
                    "can 10 % be reached": "yes" if max(shares.values()) <= GOAL else "no",
                }
            )
    return rows


def cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def shown(rows: list[dict[str, Any]]) -> str:
    return "\n".join(table(list(rows[0]), (list(map(cell, row.values())) for row in rows)))


def main() -> None:
    base = base_shape("llama-3-8b")
    devices = [find_hardware(name) for name in ("h200", "a100-80")]
    report: dict[str, Any] = {
        "command": "python bench/floors.py",
        "context": CONTEXT,
        "adapters": NUM_ADAPTERS,
        "base": [row for device in devices for row in base_rows(base, device)],
        "with adapters": [row for device in devices for row in adapter_rows(base, device)],
    }
    text = (
        f"# Floors of a decode step\n\nLlama-3-8B in 16 bits, {CONTEXT} tokens of context, data-sheet bandwidth; "
        f"`{report['command']}`.\n\n{shown(report['base'])}\n\n{NUM_ADAPTERS} distinct adapters in the batch:\n\n"
        f"{shown(report['with adapters'])}"
    )
    publish("floors", report, text)


if __name__ == "__main__":
    main()
