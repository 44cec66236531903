"""Tables with the places of every adapter's tiles, for kernels on the device.

A kernel that serves all adapters in one launch finds their weights by two tables, neither of which grows with
``adapters x layers`` from step to step:

::

    adapter table   one per resident adapter, written when it arrives: int64
                    header  [groups, 3 + 6 * modules]   first A tile, A tiles, K planes, (first B tile, B tiles) ...,
                                                        (first tile of the factor, its tiles) ..., the same of the shift
                                                        (of experts' linears: the first expert's line, and zeros)
                    experts [n, 5]                      first A tile, A tiles, K planes, first B tile, B tiles
                    tiles   [n, 6]                      element in the page tensor, row, rows, column, columns, plane
    step table      one per step: number of row blocks, then (first row, rows, address of the adapter table) each;
                    of a mixture, then the address for each row, 0 of the base's

A *row block* is up to 16 rows (decoding) or 64 (prompts) of one adapter. The host writes one line per row block; the
device works out each program's tiles (``triton_lora.plan``). So a step costs the host the same with four groups or four
hundred, and a captured graph finds the tables at fixed addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd

import numpy as np
import torch
from numpy.typing import NDArray

from manylora.core.adapters.layout import (
    ALIGN_BYTES,
    MAX_TILE_ROWS,
    AdapterLayout,
    GroupLayout,
    Tile,
    cut_by_expert,
    vector_elements,
)
from manylora.core.adapters.shape import BaseShape, ModuleKind

__all__ = [
    "BLOCK_FIELDS",
    "EXPERT_FIELDS",
    "GROUP_FIELDS",
    "ITEM_FIELDS",
    "PART_FIELDS",
    "RANGE_WIDTHS",
    "TILE_FIELDS",
    "AdapterTable",
    "GroupDirectory",
    "GroupSpan",
    "TileTemplate",
    "make_template",
]

GROUP_FIELDS = 3
"""Numbers at the front of a group's header line. Six more follow for each module of the largest group: two each for B,
then two each for the factor, then two each for the shift."""

TILE_FIELDS = 6
BLOCK_FIELDS = 3
EXPERT_FIELDS = 5

ITEM_FIELDS = 3
"""A tile of A for a row block: element in the page tensor; first row (from bit 32), rows (24), first rank (5) and
ranks; address of the tile."""

PART_FIELDS = 5
"""A row block and a module: first row, rows, address of the first tile of B, its tiles, planes of the group's A."""

RANGE_WIDTHS = 4  # widths of the ranges into which a group's columns are divided, each half of the one before


@dataclass(frozen=True, slots=True)
class GroupSpan:
    """A group of the base: its line in adapters' headers, columns of A, and each module's (first column, width)."""

    index: int
    in_features: int
    modules: tuple[tuple[int, int], ...]
    num_experts: int = 0  # 0 if it is no group of experts' linears


@dataclass(frozen=True, slots=True)
class GroupDirectory:
    """The base's groups by number."""

    groups: dict[str, GroupSpan]
    places: dict[str, tuple[str, int]]  # group of each module, and its number in the group, by module name
    num_modules: int  # modules of the largest group
    alignment: int  # common divisor of first element and width of every tile: the widest load of a kernel, in elements

    @classmethod
    def of(cls, base: BaseShape) -> GroupDirectory:
        """Return the groups of ``base`` by number, without the embedding, whose A is gathered instead of multiplied."""
        modules: dict[str, list[tuple[int, int]]] = {}
        inputs: dict[str, tuple[int, int]] = {}
        places: dict[str, tuple[str, int]] = {}
        for module in base.modules:
            if module.kind is not ModuleKind.EMBEDDING:
                members = modules.setdefault(module.group, [])
                places[module.name] = (module.group, len(members))
                members.append((module.offset, module.num_rows))
                experts = module.num_experts if module.kind is ModuleKind.EXPERTS else 0
                inputs[module.group] = module.num_columns, experts
        groups = {
            name: GroupSpan(index, inputs[name][0], tuple(members), inputs[name][1])
            for index, (name, members) in enumerate(modules.items())
        }
        return cls(groups, places, max((len(m) for m in modules.values()), default=1), _alignment(base, groups))

    @property
    def line(self) -> int:
        """Numbers in a header line."""
        return GROUP_FIELDS + 6 * self.num_modules

    @property
    def has_experts(self) -> bool:
        """Whether the base is a mixture whose experts adapters may change."""
        return any(span.num_experts for span in self.groups.values())


def _alignment(base: BaseShape, groups: dict[str, GroupSpan]) -> int:
    """Return the common alignment of tiles, in elements: 1 where a row is cut or the page is tiny."""
    page = base.page
    widths = [g.in_features for g in groups.values()] + [w for g in groups.values() for _, w in g.modules]
    align = ALIGN_BYTES // page.element_bytes
    if page.num_elements < 64 * align or any(width > page.num_elements for width in widths):
        return 1
    return gcd(align, page.num_elements, *widths)


@dataclass(frozen=True, slots=True, eq=False)
class TileTemplate:
    """An adapter's table before its pages are known; made once, outside any step."""

    header: NDArray[np.int64]  # ``[groups, line]``, as above; places of tiles count from the front of the table
    experts: NDArray[np.int64]  # ``[n, EXPERT_FIELDS]``, likewise
    tiles: NDArray[np.int64]  # ``[n, TILE_FIELDS]``; the element counts from the front of its page
    pages: NDArray[np.int64]  # the tile's page, as a number among the adapter's own ``[n]``
    max_rank: int  # most rows of a stack of A; so is ``max_tiles`` of tiles, and ``max_planes`` of column pieces
    max_tiles: int
    max_planes: int
    expert_rank: int  # most rows of an expert's A; 0 if none is changed
    is_complete: bool  # whether the table holds the whole adapter; LoRA of the embedding is not in it

    # What steps ask of all their adapters, so it is computed once.
    present: NDArray[np.bool_] = field(init=False)  # whether the adapter changes any module of each group
    has_vectors: NDArray[np.bool_] = field(init=False)  # whether any module of each group has a factor or a shift
    any_vectors: bool = field(init=False)  # whether any group has one

    def __post_init__(self) -> None:
        first = GROUP_FIELDS + (self.header.shape[1] - GROUP_FIELDS) // 3
        object.__setattr__(self, "present", self.header[:, 0] > 0)
        object.__setattr__(self, "has_vectors", self.header[:, first + 1 :: 2].sum(axis=1) > 0)
        object.__setattr__(self, "any_vectors", bool(self.has_vectors.any()))

    def place(self, pages: Sequence[int], page_elements: int) -> NDArray[np.int64]:
        """Return the table of the adapter in ``pages``, flat."""
        tiles = self.tiles.copy()
        tiles[:, 0] += np.asarray(pages, dtype=np.int64)[self.pages] * page_elements
        return np.concatenate([self.header.ravel(), self.experts.ravel(), tiles.ravel()])


def make_template(layout: AdapterLayout, directory: GroupDirectory) -> TileTemplate:
    """Return an adapter's tiles in the order in which kernels walk them; made once for all adapters of a layout."""
    kept = layout.prepared.get("tiles")
    if not isinstance(kept, tuple) or kept[0] is not directory:  # a mixture's experts take a tenth of a second
        kept = layout.prepared["tiles"] = (directory, _make_template(layout, directory))
    template: TileTemplate = kept[1]
    return template


def _make_template(layout: AdapterLayout, directory: GroupDirectory) -> TileTemplate:
    header = np.zeros((len(directory.groups), directory.line), dtype=np.int64)
    lines: list[tuple[int, ...]] = []
    pages: list[int] = []
    experts: list[tuple[int, ...]] = []
    front = header.size + EXPERT_FIELDS * sum(layout.groups[name].num_experts for name in layout.groups)
    max_rank = max_planes = 1
    expert_rank = 0

    def add(tiles: Sequence[Tile], first_row: int, width: int = 1) -> tuple[int, int]:
        # A plane per range of columns: partial sums of different ranges must not share a place.
        planes = {col: plane for plane, col in enumerate(sorted({tile.col for tile in tiles}))}
        start = front + len(lines) * TILE_FIELDS
        for tile in tiles:
            columns = tile.col // width, tile.num_cols // width
            lines.append((tile.offset, first_row + tile.row, tile.num_rows, *columns, planes[tile.col]))
            pages.append(tile.page)
        return start, len(planes)

    for name, group in layout.groups.items():
        span = directory.groups.get(name)
        if span is None:
            continue
        if group.num_experts:
            header[span.index, 0] = header.size + len(experts) * EXPERT_FIELDS
            for a, b in _pairs(group):
                start, num_planes = add(a, 0)
                experts.append((start, len(a), num_planes, add(b, 0)[0], len(b)))
                max_planes = max(max_planes, num_planes)
            expert_rank = max(expert_rank, group.rank // group.num_experts)
            continue
        start, num_planes = add(group.a, 0)
        header[span.index, :GROUP_FIELDS] = start, len(group.a), num_planes
        max_rank, max_planes = max(max_rank, group.rank), max(max_planes, num_planes)
        for module in group.modules:
            start, _ = add(module.b, module.row)
            number = directory.places[module.module.name][1]
            place = GROUP_FIELDS + 2 * number
            header[span.index, place : place + 2] = start, len(module.b)
            for kind, vector in module.vectors:
                start, _ = add(vector, 0, vector_elements(layout.dtype))
                place = GROUP_FIELDS + 2 * (directory.num_modules * (1 if kind.is_factor else 2) + number)
                header[span.index, place : place + 2] = start, len(vector)
    return TileTemplate(
        header=header,
        experts=np.asarray(experts, dtype=np.int64).reshape(-1, EXPERT_FIELDS),
        tiles=np.asarray(lines, dtype=np.int64).reshape(-1, TILE_FIELDS),
        pages=np.asarray(pages, dtype=np.int64),
        max_rank=max_rank,
        max_tiles=int(header[:, 1].max(initial=1)),
        max_planes=max_planes,
        expert_rank=expert_rank,
        is_complete=all(name in directory.groups for name in layout.groups),
    )


def _pairs(group: GroupLayout) -> list[tuple[list[Tile], list[Tile]]]:
    """Return the tiles of A and of B of each expert; rows count from its first one."""
    (part,) = group.modules
    pairs: list[tuple[list[Tile], list[Tile]]] = [([], []) for _ in range(group.num_experts)]
    for side, tiles in enumerate((group.a, part.b)):
        for expert, tile in cut_by_expert(tiles, group.rank // group.num_experts, most_rows=MAX_TILE_ROWS):
            pairs[expert][side].append(tile)
    return pairs


@dataclass(frozen=True, slots=True, eq=False)
class AdapterTable:
    """A resident adapter's table: ``data``, int64, on the device. Kernels hold its address while the adapter lives."""

    template: TileTemplate
    data: torch.Tensor
    address: int = field(init=False)  # of ``data``

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", self.data.data_ptr())

    @classmethod
    def put(
        cls, template: TileTemplate, pages: Sequence[int], page_elements: int, device: torch.device
    ) -> AdapterTable:
        """Write the table of an adapter in ``pages`` to the device, on the current stream."""
        host = torch.from_numpy(template.place(pages, page_elements))
        if device.type == "cpu":
            return cls(template, host)
        return cls(template, host.pin_memory().to(device, non_blocking=True))
