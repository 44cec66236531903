"""The LoRA kernels: true ranks, no padding, no copies; and slower ones for comparisons, with the same sums.

``grouped`` serves on the CPU, in float32 by two compiled calls per group at most: for parts with few rows (decoding)
reading the weights is the cost, for parts with many (prompts) the arithmetic. Where nothing can be compiled, and in
other types, every part is plain products: one shrink over the group's A stack, one expand per module, straight from the
pages into slices of the output. Either way an adapter's weights are read once per step for all its rows.

``ragged`` serves on a GPU: all adapters of a step at once, found by table, each at its own rank.

For comparisons, with another order of additions::

    reference   every row and every tile by itself: the definition
    naive       two products for each module of each adapter: forty adapters and seven modules per layer make hundreds
                of small products, and a GPU spends its time launching them
    padded      in Triton, every row by itself, at the batch's largest rank; of experts, as ``ragged``
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch

from manylora.core.errors import ConfigError
from manylora.execution.collectives import LORA, Collectives
from manylora.execution.kernels.cpu.support import CompiledKernels, find_compiled
from manylora.execution.kernels.linear import linear
from manylora.execution.kernels.triton.support import find_triton
from manylora.execution.lora.parts import GroupParts, StepRows
from manylora.execution.lora.tables import PADDED, RAGGED, RowBlocks
from manylora.execution.storage.resident import ResidentGroup

if TYPE_CHECKING:
    from manylora.execution.kernels.cpu.products import GroupTables

__all__ = [
    "LORA_KERNELS",
    "TABLE_KERNELS",
    "LoraKernel",
    "SharedKernel",
    "add_embedding",
    "apply_grouped",
    "apply_naive",
    "choose_kernel",
    "compiled_for",
    "group_tables",
]

LoraKernel = Callable[[torch.Tensor, torch.Tensor, GroupParts], None]
"""``kernel(x [rows, in], out [rows, out], parts)`` adds ``(x A^T) B^T`` of every part into its rows of ``out``."""

# From this many rows on, a batch of one adapter is a plain product, for the library that is best at those.
MIN_PRODUCT_ROWS = 64


def apply_grouped(x: torch.Tensor, out: torch.Tensor, parts: GroupParts) -> None:
    """Add LoRA by compiled kernels or plain products; see ``LoraKernel``."""
    kernels = compiled_for(x)
    if kernels is None:
        for part in parts.parts:
            shrunk = _shrink(x[part.start : part.stop], part.weights)
            _expand(shrunk, out[part.start : part.stop], part.weights)
        return
    kernels.add_lora(x.contiguous(), out, group_tables(kernels, parts))


def compiled_for(x: torch.Tensor) -> CompiledKernels | None:
    """Return the compiled kernels if they can run on ``x``."""
    return find_compiled() if x.dtype is torch.float32 and x.device.type == "cpu" else None


def group_tables(kernels: CompiledKernels, parts: GroupParts) -> GroupTables:
    """Return the tables of a group; the first group of a batch makes the tables of all."""
    step = parts.step or StepRows.of(parts.parts)
    if "grouped" not in step.prepared:
        step.prepared["grouped"] = kernels.lora_tables(step.rows, step.groups, step.experts)
    tables = cast("dict[str, GroupTables]", step.prepared["grouped"])
    return tables[parts.parts[0].weights.layout.group]


def apply_padded(x: torch.Tensor, out: torch.Tensor, parts: GroupParts) -> None:
    """Add LoRA by table, in row blocks of one row (``lora.tables.PADDED``); see ``LoraKernel``."""
    assert parts.tables is not None and parts.span is not None, "the step was made without tables"
    parts.tables().apply(x, out, parts.span)


def apply_ragged(x: torch.Tensor, out: torch.Tensor, parts: GroupParts) -> None:
    """Add LoRA by table; an adapter with many rows is added by plain products (``LoraKernel``)."""
    is_product = len(parts.parts) == 1 and parts.parts[0].stop - parts.parts[0].start >= MIN_PRODUCT_ROWS
    (apply_grouped if is_product else apply_padded)(x, out, parts)


class SharedKernel:
    """A ``LoraKernel`` for workers that share adapters: each has 1/N of the columns of A and of the rows of B.

    ::

        columns of x here -> A -> sum over the workers, [rows, rank] -> B -> columns of the output here

    The input of a linear that is divided by inputs has these columns alone; of others they are taken.

    Args:
        workers: The workers.
        is_by_table: Whether the kernel finds weights by table.
    """

    def __init__(self, workers: Collectives, *, is_by_table: bool) -> None:
        self._workers = workers
        self._is_by_table = is_by_table

    def __call__(self, x: torch.Tensor, out: torch.Tensor, parts: GroupParts) -> None:
        """Add the LoRA of every part."""
        if self._is_by_table and parts.tables is not None and parts.span is not None:
            own = self._own(x, parts.span.in_features)
            parts.tables().apply(own, out, parts.span, lambda partials: self._workers.sum(partials, LORA))
            return
        x = self._own(x, parts.parts[0].weights.layout.in_features)
        shrunk = _sum_over(self._workers, [_shrink(x[part.start : part.stop], part.weights) for part in parts.parts])
        for part, sums in zip(parts.parts, shrunk, strict=True):
            _expand(sums, out[part.start : part.stop], part.weights)

    def _own(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """Return the columns of ``x`` ``[rows, in]`` that A has here."""
        return x if x.shape[1] == width else x.narrow(1, self._workers.rank * width, width)


def _sum_over(workers: Collectives, shrunk: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return each part's ``x A^T`` ``[rows, rank]`` of all workers, added up in one call."""
    flat = workers.sum(torch.cat([sums.flatten() for sums in shrunk]), LORA)
    parts = flat.split([sums.numel() for sums in shrunk])
    return [part.view_as(sums) for part, sums in zip(parts, shrunk, strict=True)]


def _expand(shrunk: torch.Tensor, out: torch.Tensor, weights: ResidentGroup) -> None:
    for module in weights.modules:
        for piece in module.b:
            num_rows, num_cols = piece.weight.shape
            first = module.row + piece.row
            target = out[:, module.offset + piece.col : module.offset + piece.col + num_cols]
            target.addmm_(shrunk[:, first : first + num_rows], piece.weight.to(out.dtype))


def _shrink(x: torch.Tensor, weights: ResidentGroup) -> torch.Tensor:
    if len(weights.a) == 1:
        return linear(x, weights.a[0].weight.to(x.dtype))
    shrunk = x.new_zeros(x.shape[0], weights.rank)
    for piece in weights.a:
        num_rows, num_cols = piece.weight.shape
        product = linear(x[:, piece.col : piece.col + num_cols], piece.weight.to(x.dtype))
        shrunk[:, piece.row : piece.row + num_rows] += product
    return shrunk


def apply_reference(x: torch.Tensor, out: torch.Tensor, parts: GroupParts) -> None:
    """Add LoRA row by row and tile by tile; see ``LoraKernel``."""
    for part in parts.parts:
        weights = part.weights
        for row in range(part.start, part.stop):
            shrunk = x.new_zeros(weights.rank)
            for piece in weights.a:
                num_rows, num_cols = piece.weight.shape
                weight = piece.weight.to(x.dtype)
                shrunk[piece.row : piece.row + num_rows] += weight @ x[row, piece.col : piece.col + num_cols]
            for module in weights.modules:
                for piece in module.b:
                    num_rows, num_cols = piece.weight.shape
                    first = module.row + piece.row
                    column = module.offset + piece.col
                    out[row, column : column + num_cols] += shrunk[first : first + num_rows] @ piece.weight.to(x.dtype)


def apply_naive(x: torch.Tensor, out: torch.Tensor, parts: GroupParts) -> None:
    """Add LoRA module by module; see ``LoraKernel``."""
    for part in parts.parts:
        rows, target = x[part.start : part.stop], out[part.start : part.stop]
        for module in part.weights.modules:
            shrunk = x.new_zeros(rows.shape[0], module.rank)
            for piece in part.weights.a:
                # The module's own rows of the stack that this piece holds.
                first = max(piece.row, module.row)
                last = min(piece.row + piece.weight.shape[0], module.row + module.rank)
                if first < last:
                    weight = piece.weight[first - piece.row : last - piece.row]
                    columns = rows[:, piece.col : piece.col + weight.shape[1]]
                    shrunk[:, first - module.row : last - module.row] += columns @ weight.t().to(x.dtype)
            for piece in module.b:
                num_rows, num_cols = piece.weight.shape
                column = module.offset + piece.col
                weight = piece.weight.to(x.dtype)
                target[:, column : column + num_cols] += shrunk[:, piece.row : piece.row + num_rows] @ weight


def add_embedding(
    parts: GroupParts,
    token_ids: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor | float | None,
    workers: Collectives | None = None,
) -> None:
    """Add an embedding's LoRA: A ``[rank, vocab]`` is gathered at the tokens, then multiplied by B^T.

    ``out`` ``[rows, hidden]`` is added into. ``scale``, the factor of the base embedding's output (Gemma), applies to
    LoRA too, as in PEFT. Workers that share the adapter each gather their own tokens.
    """
    shrunk = []
    for part in parts.parts:
        tokens = token_ids[part.start : part.stop]
        sums = out.new_zeros(part.stop - part.start, part.weights.rank)
        for piece in part.weights.a:
            num_rows, num_cols = piece.weight.shape
            column = tokens - piece.col
            inside = (column >= 0) & (column < num_cols)
            gathered = piece.weight[:, column.clamp(0, num_cols - 1)].t().to(out.dtype)
            sums[:, piece.row : piece.row + num_rows] += torch.where(inside[:, None], gathered, 0)
        shrunk.append(sums if scale is None else sums * scale)
    for part, sums in zip(parts.parts, shrunk if workers is None else _sum_over(workers, shrunk), strict=True):
        _expand(sums, out[part.start : part.stop], part.weights)


LORA_KERNELS: dict[str, LoraKernel] = {
    "grouped": apply_grouped,
    "naive": apply_naive,
    "padded": apply_padded,
    "ragged": apply_ragged,
    "reference": apply_reference,
}
"""Implementations by name; all give the same sums, in another order of additions."""

TABLE_KERNELS: Mapping[str, RowBlocks] = {"padded": PADDED, "ragged": RAGGED}
"""Kernels in Triton, which find weights by table: they need a ``LoraSpace`` with these row blocks."""


def choose_kernel(name: str, device: torch.device) -> str:
    """Return the implementation that ``name`` means on ``device``; refuse one that cannot run there."""
    reason = find_triton(device)
    if name == "auto":
        return "ragged" if device.type == "cuda" and reason is None else "grouped"
    if name in TABLE_KERNELS and reason is not None:
        raise ConfigError(f"Got lora_kernel = {name!r}, which cannot run here: {reason}")
    return name
