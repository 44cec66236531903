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
from manylora.execution.lora.parts import GroupParts, StepRows
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
    prepared = _prepare(parts, kernels)
    x = x.contiguous()
    if prepared.many is not None:
        kernels.products(x, out, prepared.many)
    if prepared.few is not None:
        kernels.lora(x, out, prepared.few)


def prepare_grouped(adapter: ResidentAdapter) -> None:
    """Make what the compiled kernels keep with an adapter's weights, on a thread that no step waits for.

    Else the first step of the adapter does it, and all sequences of that step wait.
    """
    if (kernels := find_compiled()) is not None:
        kernels.prepare(adapter.memory)


def apply_ragged(x: torch.Tensor, out: torch.Tensor, parts: GroupParts) -> None:
    """Add LoRA by table; see ``lora.batch.LoraKernel``."""
    if len(parts.parts) == 1 and parts.parts[0].stop - parts.parts[0].start >= MIN_PRODUCT_ROWS:
        apply_grouped(x, out, parts)
        return
    assert parts.tables is not None and parts.span is not None, "the step was made without tables"
    parts.tables().apply(x, out, parts.span)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A group's tables: of the adapters with many rows, and of those with few."""

    many: ProductTables | None
    few: LoraTables | None


def _prepare(parts: GroupParts, kernels: CompiledKernels) -> _Prepared:
    """Return the tables of a group; the first group of a batch makes those of all."""
    step = parts.step or StepRows.of(parts.parts)
    if "grouped" not in step.prepared:
        step.prepared["grouped"] = _prepare_all(step, kernels)
    of_each = cast(dict[str, _Prepared], step.prepared["grouped"])
    return of_each[parts.parts[0].weights.layout.group]


def _prepare_all(step: StepRows, kernels: CompiledKernels) -> dict[str, _Prepared]:
    many = [(start, stop, weights) for start, stop, weights in step.rows if stop - start > MAX_READ_ROWS]
    few = [(start, stop, weights) for start, stop, weights in step.rows if stop - start <= MAX_READ_ROWS]
    products = kernels.product_tables(many, step.groups) if many else {}
    loras = kernels.tables(few, step.groups) if few else {}
    return {group: _Prepared(products.get(group), loras.get(group)) for group in step.groups}


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
