"""Layout of an adapter's matrices in its pages, and the sizes that follow from it.

A LoRA pair adds ``scale * (x A^T) B^T`` with A ``[rank, in]`` and B ``[out, rank]``. A is kept as it is and B is
transposed (``[rank, out]``, scale folded in), so that both are stacks of rows along the rank. Each stack is cut into
*tiles*: contiguous row-major pieces that never cross a page. The A matrices of one group (q/k/v, gate/up) are stacked
into one, so that one product serves the group.

::

    group "layers.0.qkv", ranks q=8, k=0, v=4          page
    A stack  [12, in]   rows 0..7 q, 8..11 v      ->   | A tile | B^T tile q | B^T tile v | next group ...
    B^T      q [8, out_q], v [4, out_v]

A method may add *vectors* to a module (``VectorKind``): one number per output column, laid out as a matrix of one row.
They are float32 in pages of any type, so a number takes two elements of 16 bits. There are no slots of a largest rank:
a module takes its own rank, and an absent module takes nothing.

Weights lie in the order in which the model uses them: the embedding, the layers, the head. The pages of an adapter
arrive in order, so a layer can be used before the next has arrived (``GroupLayout.num_pages_needed``)::

    page 0                          page 1                          page 2
    | layer 0       | layer 1       | layer 1   | layer 2           | layer 3   | head |     |

Within a layer, the largest matrix that fits into the open page is next. If none fits, the matrix that fills the page
best is cut at its end, so no page but the last has more room than a row. The tiles of each piece are adjacent: an
executor reads it as one matrix, and most matrices are one piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, count, groupby, pairwise
from typing import TypeAlias

from manylora.core.adapters.shape import ELEMENT_BYTES, BaseShape, ModuleKind, PageShape, TargetModule
from manylora.core.adapters.tensors import ModuleWeights, Replaced, VectorKind
from manylora.core.types import AdapterKey, AdapterVersion

__all__ = [
    "ALIGN_BYTES",
    "MAX_TILE_ROWS",
    "AdapterLayout",
    "GroupLayout",
    "ModuleLayout",
    "Replacements",
    "Tile",
    "Vectors",
    "cut_by_expert",
    "lay_out",
    "layout_of",
    "make_version",
    "merge_tiles",
    "vector_elements",
]

MAX_TILE_ROWS = 16  # most rows in a tile: the height of a matrix instruction, so that a kernel never splits one
MAX_SHAPES = 64  # layouts that are remembered: some hundred kilobytes each

Vectors: TypeAlias = tuple[tuple[str, tuple[VectorKind, ...]], ...]  # the modules that have vectors, by name, and which

Replacements: TypeAlias = tuple[tuple[str, Replaced], ...]
"""The modules whose weights take the place of the base's, by name."""

VECTOR_BYTES = 4  # bytes of a number of a vector
ALIGN_BYTES = 64  # pieces start on cache lines, which are also aligned for vector loads


@dataclass(frozen=True, slots=True)
class Tile:
    """A ``[num_rows, num_cols]`` piece of a matrix, row-major and contiguous in one page."""

    page: int  # index among the adapter's own pages
    offset: int  # first element in the page
    row: int  # first row of the matrix
    num_rows: int
    col: int  # first column of the matrix
    num_cols: int  # columns (all of them unless one row is larger than a page)


@dataclass(frozen=True, slots=True)
class ModuleLayout:
    """One module's share of a group."""

    module: TargetModule  # the base's module
    rank: int  # its own rank, without padding
    row: int  # its first row in the group's A stack (and column of the activations ``x A^T``)
    b: tuple[Tile, ...]  # tiles of B^T ``[rank, out_features]``, scale folded in
    # Tiles of each vector ``[1, out_features]``, by kind; columns are counted in elements of the layout.
    vectors: tuple[tuple[VectorKind, tuple[Tile, ...]], ...] = ()
    replaces: Replaced | None = None  # as in ``ModuleWeights``

    @property
    def needs_base(self) -> bool:
        """Whether it is to be settled with the base's numbers."""
        return self.replaces is not None or any(kind.needs_base for kind, _ in self.vectors)


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One group's LoRA weights."""

    group: str  # name of the group
    rank: int  # sum of its modules' ranks
    in_features: int  # inputs of the group
    a: tuple[Tile, ...]  # tiles of the A stack ``[rank, in_features]``
    modules: tuple[ModuleLayout, ...]  # the modules with weights, in order of ``row``
    num_pages_needed: int  # the group is complete once so many of the adapter's pages, from the first on, have arrived

    @property
    def num_experts(self) -> int:
        """Experts that its rank is divided among, in order; 0 if it is no group of experts."""
        module = self.modules[0].module
        return module.num_experts if module.kind is ModuleKind.EXPERTS else 0


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """An adapter's groups, by name, and the pages they take."""

    groups: dict[str, GroupLayout]  # by group name, in the order in which they arrive
    num_pages: int
    used_elements: int  # elements that hold weights; the rest of the pages is padding
    dtype: str  # type of the elements: the page's own, or a narrower one, of which more fit in a page
    needs_base: bool = False  # whether a module is to be settled with the base's numbers
    # A kernel's data for this layout, by the kernel's key: adapters of one shape share both.
    prepared: dict[str, object] = field(default_factory=dict, compare=False, repr=False)

    @property
    def weight_bytes(self) -> int:
        """Bytes that hold weights."""
        return self.used_elements * ELEMENT_BYTES[self.dtype]

    def layers(self) -> Iterator[tuple[tuple[GroupLayout, ...], int]]:
        """Yield the groups of each layer, in order of arrival, and the pages that are full once they are filled."""
        layers = [tuple(groups) for _, groups in groupby(self.groups.values(), lambda g: g.modules[0].module.turn)]
        for groups, after in pairwise([*layers, ()]):
            yield groups, min((tile.page for group in after for tile in _tiles(group)), default=self.num_pages)


def _tiles(group: GroupLayout) -> Iterator[Tile]:
    yield from group.a
    for part in group.modules:
        yield from part.b
        for _, tiles in part.vectors:
            yield from tiles


@dataclass(slots=True)
class _Strip:
    """Columns ``[col, col + num_cols)`` of a matrix, of which rows ``[row, end)`` have no place yet."""

    matrix: int
    row: int
    end: int
    col: int
    num_cols: int

    @property
    def num_elements(self) -> int:
        return (self.end - self.row) * self.num_cols


@dataclass(slots=True)
class _Packer:
    """Adapter pages as they fill, one after another, each from its front."""

    page_elements: int
    align: int  # pieces start at multiples of so many elements
    is_tight: bool  # whether wide rows go first, so that narrow ones are left to fill the ends of pages
    num_pages: int = 0
    free: int = 0  # elements at the end of the last page
    tiles: dict[int, list[Tile]] = field(default_factory=dict)  # by matrix

    def place(self, strips: list[_Strip]) -> None:
        """Place the strips of a layer; ties stay in model order, so that equal adapters have equal layouts."""
        left = sorted(strips, key=lambda strip: -strip.num_elements)
        while left:
            strip = self._next(left)
            num_rows = min(strip.end - strip.row, self.free // strip.num_cols)
            if num_rows == 0:
                self.num_pages += 1
                self.free = self.page_elements
                continue
            self._put(strip, num_rows)
            if strip.row == strip.end:
                left.remove(strip)

    def _next(self, left: list[_Strip]) -> _Strip:
        """Return the strip to place: the largest that fits, else the one that, cut, fills the page best."""
        if self.is_tight:
            width = max((strip.num_cols for strip in left if strip.num_cols <= self.free), default=0)
            left = [strip for strip in left if strip.num_cols == width] or left
        whole = next((strip for strip in left if strip.num_elements <= self.free), None)
        return whole or max(left, key=lambda strip: self.free // strip.num_cols * strip.num_cols)

    def _put(self, strip: _Strip, num_rows: int) -> None:
        """Place the strip's next rows in the last page."""
        start = self.page_elements - self.free
        tiles = self.tiles.setdefault(strip.matrix, [])
        for below in range(0, num_rows, MAX_TILE_ROWS):
            rows = min(MAX_TILE_ROWS, num_rows - below)
            offset = start + below * strip.num_cols
            tiles.append(Tile(self.num_pages - 1, offset, strip.row + below, rows, strip.col, strip.num_cols))
        strip.row += num_rows
        self.free -= -(-num_rows * strip.num_cols // self.align) * self.align


def _strips(matrix: int, num_rows: int, num_cols: int, page_elements: int) -> list[_Strip]:
    """Return a matrix as one strip, or as several where one row is larger than a page."""
    width = num_cols
    if num_cols > page_elements:
        # Narrow enough for a full tile of rows: a few wide rows would give as many tiles and smaller products.
        width = max(1, page_elements // min(MAX_TILE_ROWS, num_rows))
    return [_Strip(matrix, 0, num_rows, col, min(width, num_cols - col)) for col in range(0, num_cols, width)]


def vector_elements(dtype: str) -> int:
    """Return the elements of a type that a number of a vector takes."""
    return VECTOR_BYTES // ELEMENT_BYTES[dtype]


def _alignment(page: PageShape, dtype: str, has_vectors: bool) -> int:
    # A tiny page (of a test model) would lose a visible share to alignment: its runs are packed without.
    align = max(1, ALIGN_BYTES // ELEMENT_BYTES[dtype])
    num_elements = page.elements_of(dtype)
    least = vector_elements(dtype) if has_vectors else 1
    return align if num_elements % align == 0 and num_elements >= 64 * align else least


def layout_of(weights: Iterable[ModuleWeights], base: BaseShape, dtype: str) -> AdapterLayout:
    """Return the layout of some weights in a type; their bytes may not have been read yet."""
    weights = list(weights)
    vectors = tuple((w.module.name, tuple(w.vectors)) for w in weights if w.vectors)
    replaced = tuple((w.module.name, w.replaces) for w in weights if w.replaces is not None)
    return lay_out({w.module.name: w.rank for w in weights}, base, dtype, vectors, replaced)


def lay_out(
    ranks: Mapping[str, int],
    base: BaseShape,
    dtype: str | None = None,
    vectors: Vectors = (),
    replaced: Replacements = (),
) -> AdapterLayout:
    """Return the layout of an adapter; its tiles cover each matrix exactly once and never overlap or cross a page.

    A pure function of its arguments, so one host copy can be copied to any pages of any replica. It is worked out once
    for all adapters of one shape, which share the result. ``ranks`` has every module with weights, by its name in the
    base; ``vectors`` and ``replaced`` are of these. Without a ``dtype`` it is the ``adapter_dtype`` of the page.
    """
    dtype = base.page.adapter_dtype if dtype is None else dtype
    return _lay_out(tuple(ranks.items()), base, dtype, tuple(sorted(vectors)), tuple(sorted(replaced)))


@lru_cache(MAX_SHAPES)
def _lay_out(
    shape: tuple[tuple[str, int], ...], base: BaseShape, dtype: str, vectors: Vectors, replaced: Replacements
) -> AdapterLayout:
    ranks, kinds, replacements = dict(shape), dict(vectors), dict(replaced)
    assert ranks and all(rank >= 1 for rank in ranks.values()), "an adapter has at least one module of rank 1"
    members: dict[str, list[TargetModule]] = {}
    for module in sorted(base.modules, key=lambda module: module.turn):
        if module.name in ranks:
            members.setdefault(module.group, []).append(module)
    assert sum(map(len, members.values())) == len(ranks), "every module is one of the base's"

    page_elements = base.page.elements_of(dtype)
    sizes = [
        [size for modules in layer for size in _sizes(modules, ranks, kinds, vector_elements(dtype))]
        for _, layer in groupby(members.values(), lambda modules: modules[0].turn)
    ]
    align = _alignment(base.page, dtype, bool(vectors))
    # More cuts are worth it if they save a page.
    packers = (_pack(sizes, _Packer(page_elements, align, is_tight)) for is_tight in (False, True))
    packer = min(packers, key=lambda packer: packer.num_pages)

    placed = iter([tuple(sorted(tiles, key=lambda t: (t.col, t.row))) for _, tiles in sorted(packer.tiles.items())])
    groups: dict[str, GroupLayout] = {}
    for group, modules in members.items():
        a = next(placed)
        b = [next(placed) for _ in modules]
        placed_vectors = [tuple((kind, next(placed)) for kind in kinds.get(module.name, ())) for module in modules]
        row = 0
        parts = []
        for module, b_tiles, vector_tiles in zip(modules, b, placed_vectors, strict=True):
            replaces = replacements.get(module.name)
            parts.append(ModuleLayout(module, ranks[module.name], row, b_tiles, vector_tiles, replaces))
            row += ranks[module.name]
        of_vectors = (tiles for vectors_of_one in placed_vectors for _, tiles in vectors_of_one)
        num_pages = 1 + max(tile.page for tile in chain(a, *b, *of_vectors))
        groups[group] = GroupLayout(group, row, modules[0].num_columns, a, tuple(parts), num_pages)
    used = sum(rows * cols for layer in sizes for rows, cols in layer)
    needs_base = any(part.needs_base for group in groups.values() for part in group.modules)
    return AdapterLayout(groups, packer.num_pages, used, dtype, needs_base)


def _pack(layers: list[list[tuple[int, int]]], packer: _Packer) -> _Packer:
    """Place the matrices of each layer, given by rows and columns; they are numbered through."""
    number = count()
    for sizes in layers:
        packer.place(
            [strip for rows, cols in sizes for strip in _strips(next(number), rows, cols, packer.page_elements)]
        )
    return packer


def _sizes(
    modules: Sequence[TargetModule],
    ranks: Mapping[str, int],
    vectors: Mapping[str, Sequence[VectorKind]],
    vector_width: int,
) -> Iterator[tuple[int, int]]:
    """Yield rows and columns of a group's matrices: the A stack, its modules' B^T, then their vectors."""
    yield sum(ranks[m.name] for m in modules), modules[0].num_columns
    yield from ((ranks[m.name], m.num_rows) for m in modules)
    yield from ((1, vector_width * m.out_features) for m in modules for _ in vectors.get(m.name, ()))


def make_version(
    layout: AdapterLayout,
    page: PageShape,
    *,
    key: str,
    source: str,
    disk_bytes: int | None = None,
    layer_digests: bytes = b"",
    invocation: tuple[int, ...] = (),
) -> AdapterVersion:
    """Return the version of an adapter with this layout, read or simulated, with its sizes in every tier.

    ``source`` is the directory that it came from, or its name without one; ``disk_bytes`` the size of its weight file,
    by default of its weights. The others are as in ``AdapterVersion``.
    """
    modules = [part for group in layout.groups.values() for part in group.modules]
    return AdapterVersion(
        key=AdapterKey(key),
        source=source,
        rank=max(part.rank // part.module.num_experts for part in modules),
        num_modules=len(modules),
        target_modules=tuple(sorted({part.module.name.rpartition(".")[2] for part in modules})),
        num_pages=layout.num_pages,
        weight_bytes=layout.weight_bytes,
        host_bytes=layout.num_pages * page.num_bytes,
        disk_bytes=layout.weight_bytes if disk_bytes is None else disk_bytes,
        dtype=layout.dtype,
        layer_digests=layer_digests,
        invocation=invocation,
    )


def merge_tiles(tiles: Sequence[Tile]) -> list[Tile]:
    """Merge neighbouring tiles of the same columns whose rows and bytes are contiguous; keep the order."""
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


def cut_by_expert(tiles: Sequence[Tile], rank: int, *, most_rows: int | None = None) -> Iterator[tuple[int, Tile]]:
    """Yield the pieces of a stack of experts, ``rank`` rows each: an expert's number and a piece of its rows.

    Rows count from the expert's first one. A piece has at most ``most_rows``.
    """
    for run in merge_tiles(tiles):
        row, end = run.row, run.row + run.num_rows
        while row < end:
            expert = row // rank
            stop = min((expert + 1) * rank, end)
            if most_rows is not None:
                stop = min(stop, row + most_rows)
            offset = run.offset + (row - run.row) * run.num_cols
            yield expert, Tile(run.page, offset, row - expert * rank, stop - row, run.col, run.num_cols)
            row = stop
