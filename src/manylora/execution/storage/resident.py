"""An adapter where kernels read it: in pages on the device, or in its image in host memory.

Kernels find weights by the layout and the numbers of the pages, without work for each matrix when an adapter comes.
Views are made when they are asked for, group by group: kernels of plain products need them. Tiles that follow one
another in a page become one matrix then, because a tile of 16 rows is far too small a product for a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from manylora.core.adapters.layout import AdapterLayout, GroupLayout, ModuleLayout, Tile, merge_tiles, vector_elements
from manylora.execution.storage.page_tensor import PageTensor
from manylora.execution.storage.tile_tables import AdapterTable, TileTemplate

__all__ = [
    "AdapterMemory",
    "AdapterRows",
    "ResidentAdapter",
    "ResidentExpert",
    "ResidentGroup",
    "ResidentModule",
    "WeightPiece",
    "make_resident",
    "read_in_place",
]


@dataclass(frozen=True, slots=True)
class WeightPiece:
    """A contiguous part of a matrix: ``weight`` holds its rows ``[row, ...)`` and columns ``[col, ...)``."""

    weight: torch.Tensor
    row: int
    col: int


@dataclass(frozen=True, slots=True)
class ResidentModule:
    """B^T of one module, and its factor and shift if it has them."""

    row: int  # its first row in the group's A stack
    rank: int
    offset: int  # its first column in the group's output
    b: tuple[WeightPiece, ...]  # pieces of B^T ``[rank, out_features]``, with LoRA's scale in them
    factor: tuple[WeightPiece, ...] = ()  # pieces of the factor of each output ``[1, out_features]``, float32
    shift: tuple[WeightPiece, ...] = ()  # pieces of the number that is added to each output, likewise


@dataclass(frozen=True, slots=True, eq=False)
class AdapterMemory:
    """The place of an adapter's weights."""

    layout: AdapterLayout  # the place of each matrix in the adapter's own pages
    flat: torch.Tensor  # ``[pages, elements]`` of the adapter's type
    pages: Sequence[int]  # the row of ``flat`` for each of its own pages
    # A kernel's data for these weights, by the kernel's key; lives as long as they do.
    prepared: dict[str, object] = field(default_factory=dict)


AdapterRows = tuple[int, int, AdapterMemory]  # rows ``[start, stop)`` of a step take the adapter in that memory


class ResidentGroup:
    """LoRA weights of one group."""

    def __init__(self, memory: AdapterMemory, layout: GroupLayout) -> None:
        self.memory = memory
        self.layout = layout
        self.rank = layout.rank
        self.has_vectors = any(module.vectors for module in layout.modules)

    @cached_property
    def a(self) -> tuple[WeightPiece, ...]:
        """Pieces of the A stack ``[rank, in_features]``."""
        return _pieces(self.layout.a, self.memory)

    @cached_property
    def modules(self) -> tuple[ResidentModule, ...]:
        """The modules with weights, in order of their first rows."""
        return tuple(
            ResidentModule(
                part.row,
                part.rank,
                part.module.offset,
                _pieces(part.b, self.memory),
                self._vector(part, is_factor=True),
                self._vector(part, is_factor=False),
            )
            for part in self.layout.modules
        )

    def _vector(self, part: ModuleLayout, *, is_factor: bool) -> tuple[WeightPiece, ...]:
        """Return the pieces of a module's factor or shift: float32 numbers over elements of any type."""
        tiles = next((tiles for kind, tiles in part.vectors if kind.is_factor is is_factor), ())
        width = vector_elements(self.memory.layout.dtype)
        return tuple(
            WeightPiece(piece.weight.view(torch.float32), piece.row, piece.col // width)
            for piece in _pieces(tiles, self.memory)
        )


class ResidentExpert(ResidentGroup):
    """LoRA weights of one expert, out of a group that holds those of all."""

    def __init__(self, group: ResidentGroup, expert: int) -> None:
        super().__init__(group.memory, group.layout)
        self.expert = expert
        self.rank = group.rank // group.layout.num_experts
        self._group = group

    @cached_property
    def a(self) -> tuple[WeightPiece, ...]:
        """Pieces of its A ``[rank, in_features]``."""
        return self._own(self._group.a)

    @cached_property
    def modules(self) -> tuple[ResidentModule, ...]:
        """Its one module."""
        (module,) = self._group.modules
        return (ResidentModule(0, self.rank, module.offset, self._own(module.b)),)

    def _own(self, pieces: Sequence[WeightPiece]) -> tuple[WeightPiece, ...]:
        own = []
        for piece in pieces:
            first = self.expert * self.rank - piece.row  # in the piece
            weight = piece.weight[max(first, 0) : max(first + self.rank, 0)]
            if len(weight):
                own.append(WeightPiece(weight, max(-first, 0), piece.col))
        return tuple(own)


@dataclass(frozen=True, slots=True, eq=False)
class ResidentAdapter:
    """The weights by group name.

    Equal only to itself: the same weights in other pages are another resident adapter.
    ``table`` is for table-driven kernels; ``None`` where no such kernel is in use.
    """

    memory: AdapterMemory
    groups: dict[str, ResidentGroup]
    table: AdapterTable | None = None


def make_resident(
    layout: AdapterLayout, pages: Sequence[int], pool: PageTensor, template: TileTemplate | None = None
) -> ResidentAdapter:
    """Return an adapter in ``pages``, with its table if there is a ``template``."""
    table = None
    if template is not None:
        table = AdapterTable.put(template, pages, pool.shape.num_elements, pool.flat.device)
    return _adapter(AdapterMemory(layout, pool.flat_as(layout.dtype), pages), table)


def read_in_place(layout: AdapterLayout, image: torch.Tensor) -> ResidentAdapter:
    """Return an adapter in its host image ``[num_pages, elements]``, which it keeps alive.

    The image has the layout of the pages, so kernels of the CPU read either in the same way.
    """
    return _adapter(AdapterMemory(layout, image, range(layout.num_pages)))


def _adapter(memory: AdapterMemory, table: AdapterTable | None = None) -> ResidentAdapter:
    groups = {name: ResidentGroup(memory, group) for name, group in memory.layout.groups.items()}
    return ResidentAdapter(memory, groups, table)


def _pieces(tiles: Sequence[Tile], memory: AdapterMemory) -> tuple[WeightPiece, ...]:
    flat, pages, page_elements = memory.flat, memory.pages, memory.flat.shape[1]
    first = flat.storage_offset()
    return tuple(
        WeightPiece(
            flat.as_strided(
                (run.num_rows, run.num_cols), (run.num_cols, 1), first + pages[run.page] * page_elements + run.offset
            ),
            run.row,
            run.col,
        )
        for run in merge_tiles(tiles)
    )
