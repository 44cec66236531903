"""The LoRA kernels in use: true ranks, no padding, no copies.

``grouped`` serves on the CPU, in float32 by two compiled calls per group at most: for parts with few rows (decoding)
reading the weights is the cost, for parts with many (prompts) the arithmetic. Where nothing can be compiled, and in
other types, every part is plain products: one shrink over the group's A stack, one expand per module, straight from the
pages into slices of the output. Either way an adapter's weights are read once per step for all its rows.

``ragged`` serves on a GPU: all adapters of a step at once, found by table, each at its own rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from manylora.execution.kernels.cpu.support import CompiledKernels, find_compiled
from manylora.execution.kernels.linear import linear
from manylora.execution.lora.parts import GroupParts
from manylora.execution.storage.resident import ResidentAdapter, ResidentGroup

if TYPE_CHECKING:
    from manylora.execution.kernels.cpu.lora import LoraTables
    from manylora.execution.kernels.cpu.products import ProductTables

__all__ = ["MAX_READ_ROWS", "apply_grouped", "apply_ragged", "prepare_grouped"]

# Up to this many rows, reading the weights row by row is faster than tiles of a product.
MAX_READ_ROWS = 8

# From this many rows on, a batch of one adapter is a plain product, for the library that is best at those.
MIN_PRODUCT_ROWS = 64


def apply_grouped(x: torch.Tensor, out: torch.Tensor, parts: GroupParts) -> None:
    """Add LoRA by compiled kernels or plain products; see ``lora.batch.LoraKernel``."""
    kernels = find_compiled() if x.dtype is torch.float32 and x.device.type == "cpu" else None
    if kernels is None:
        for part in parts.parts:
            _apply(x[part.start : part.stop], out[part.start : part.stop], part.weights)
        return
    step = _prepare(parts, kernels)
    x = x.contiguous()
    if step.many is not None:
        kernels.products(x, out, step.many)
    if step.few is not None:
        kernels.lora(x, out, step.few)


def prepare_grouped(adapter: ResidentAdapter) -> None:
    """Make what the compiled kernels keep with an adapter's weights, on a thread that no step waits for.

    Else the first step of the adapter does it, and all sequences of that step wait: 0.25 ms for a model of four layers.
    """
    if (kernels := find_compiled()) is not None:
        for weights in adapter.groups.values():
            kernels.prepare(weights)


def apply_ragged(x: torch.Tensor, out: torch.Tensor, parts: GroupParts) -> None:
    """Add LoRA by table; see ``lora.batch.LoraKernel``."""
    if len(parts.parts) == 1 and parts.parts[0].stop - parts.parts[0].start >= MIN_PRODUCT_ROWS:
        apply_grouped(x, out, parts)
        return
    assert parts.tables is not None and parts.span is not None, "the step was made without tables"
    parts.tables().apply(x, out, parts.span)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Tables of the parts with many rows and of those with few."""

    many: ProductTables | None
    few: LoraTables | None


def _prepare(parts: GroupParts, kernels: CompiledKernels) -> _Prepared:
    if "grouped" not in parts.prepared:
        many = [(p.start, p.stop, p.weights) for p in parts.parts if p.stop - p.start > MAX_READ_ROWS]
        few = [(p.start, p.stop, p.weights) for p in parts.parts if p.stop - p.start <= MAX_READ_ROWS]
        parts.prepared["grouped"] = _Prepared(
            kernels.product_tables(many) if many else None, kernels.tables(few) if few else None
        )
    return cast(_Prepared, parts.prepared["grouped"])


def _apply(x: torch.Tensor, out: torch.Tensor, weights: ResidentGroup) -> None:
    shrunk = _shrink(x, weights)
    for module in weights.modules:
        for piece in module.b:
            num_rows, num_cols = piece.weight.shape
            first = module.row + piece.row
            target = out[:, module.offset + piece.col : module.offset + piece.col + num_cols]
            target.addmm_(shrunk[:, first : first + num_rows], piece.weight.to(x.dtype))


def _shrink(x: torch.Tensor, weights: ResidentGroup) -> torch.Tensor:
    if len(weights.a) == 1:
        return linear(x, weights.a[0].weight.to(x.dtype))
    shrunk = x.new_zeros(x.shape[0], weights.rank)
    for piece in weights.a:
        num_rows, num_cols = piece.weight.shape
        product = linear(x[:, piece.col : piece.col + num_cols], piece.weight.to(x.dtype))
        shrunk[:, piece.row : piece.row + num_rows] += product
    return shrunk
