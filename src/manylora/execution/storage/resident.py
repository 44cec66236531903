"""An adapter on the device: views of its tiles in the page tensor, made once when it becomes resident.

Tiles that follow one another in a page become one matrix, because a tile of 16 rows is far too small a product for a
CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from manylora.adapters.layout import AdapterLayout, GroupLayout, Tile
from manylora.execution.storage.page_tensor import PageTensor
from manylora.execution.storage.tile_tables import AdapterTable, TileTemplate

__all__ = ["Piece", "ResidentAdapter", "ResidentGroup", "ResidentModule", "make_resident", "read_in_place"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous part of a matrix: ``weight`` holds its rows ``[row, ...)`` and columns ``[col, ...)``."""

    weight: torch.Tensor
    row: int
    col: int


@dataclass(frozen=True, slots=True)
class ResidentModule:
    """B^T of one module, and its column scale if it has one.

    Args:
        row: Its first row in the group's A stack.
        offset: Its first column in the group's output.
        b: Pieces of B^T ``[rank, out_features]``, with LoRA's scale in them.
        column_scale: Pieces of the column scale ``[1, out_features]``, if it has one.
    """

    row: int
    rank: int
    offset: int
    b: tuple[Piece, ...]
    column_scale: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True)
class ResidentGroup:
    """LoRA weights of one group.

    Args:
        rank: Rows of the A stack.
        a: Pieces of the A stack ``[rank, in_features]``.
        prepared: A kernel's data for these weights, by the kernel's key; lives as long as the weights.
    """

    rank: int
    a: tuple[Piece, ...]
    modules: tuple[ResidentModule, ...]
    prepared: dict[str, object] = field(default_factory=dict, compare=False)

    @property
    def is_scaled(self) -> bool:
        """Whether any of its modules has a column scale."""
        return any(module.column_scale for module in self.modules)


@dataclass(frozen=True, slots=True, eq=False)
class ResidentAdapter:
    """The weights by group name, as views of pages.

    Equal only to itself: the same weights in other pages are another resident adapter.
    ``table`` is for table-driven kernels; ``None`` where no such kernel is in use.
    """

    groups: dict[str, ResidentGroup]
    table: AdapterTable | None = None


def make_resident(
    layout: AdapterLayout, pages: Sequence[int], pool: PageTensor, template: TileTemplate | None = None
) -> ResidentAdapter:
    """Build the views of an adapter in ``pages``, and its table if there is a ``template``."""
    table = None
    if template is not None:
        table = AdapterTable.put(template, pages, pool.shape.num_elements, pool.flat.device)
    return ResidentAdapter(_groups(layout, pages, pool.flat_as(layout.dtype)), table)


def read_in_place(layout: AdapterLayout, image: torch.Tensor) -> ResidentAdapter:
    """Build the views of an adapter in its host image ``[num_pages, elements]``, which they keep alive.

    The image has the layout of the pages, so kernels of the CPU read the one as they read the others.
    """
    return ResidentAdapter(_groups(layout, range(layout.num_pages), image))


def _groups(layout: AdapterLayout, pages: Sequence[int], flat: torch.Tensor) -> dict[str, ResidentGroup]:
    return {name: _group(group, pages, flat) for name, group in layout.groups.items()}


def _group(group: GroupLayout, pages: Sequence[int], flat: torch.Tensor) -> ResidentGroup:
    modules = tuple(
        ResidentModule(
            part.row,
            part.rank,
            part.module.offset,
            _pieces(part.b, pages, flat),
            _pieces(part.column_scale, pages, flat),
        )
        for part in group.modules
    )
    return ResidentGroup(group.rank, _pieces(group.a, pages, flat), modules)


def _pieces(tiles: Sequence[Tile], pages: Sequence[int], flat: torch.Tensor) -> tuple[Piece, ...]:
    # One call per view, not three: an adapter has hundreds, and each holds the interpreter lock that the step needs.
    page_elements = flat.shape[1]
    return tuple(
        Piece(
            flat.as_strided(
                (run.num_rows, run.num_cols), (run.num_cols, 1), pages[run.page] * page_elements + run.offset
            ),
            run.row,
            run.col,
        )
        for run in _runs(tiles)
    )


def _runs(tiles: Sequence[Tile]) -> list[Tile]:
    """Merge tiles that continue one another in rows and in memory."""
    runs: list[Tile] = []
    for tile in tiles:
        last = runs[-1] if runs else None
        if (
            last is not None
            and (tile.page, tile.col, tile.num_cols) == (last.page, last.col, last.num_cols)
            and tile.row == last.row + last.num_rows
            and tile.offset == last.offset + last.num_rows * last.num_cols
        ):
            runs[-1] = Tile(last.page, last.offset, last.row, last.num_rows + tile.num_rows, last.col, last.num_cols)
        else:
            runs.append(tile)
    return runs
