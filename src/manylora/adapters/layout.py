"""Layout of an adapter's matrices in its pages, and the sizes that follow from it.

A LoRA pair adds ``scale * (x A^T) B^T`` with A ``[rank, in]`` and B ``[out, rank]``. A is kept as it is and B is
transposed (``[rank, out]``, scale folded in), so that both are stacks of rows along the rank. Each stack is cut into
*tiles*: contiguous row-major pieces that never cross a page. The A matrices of one group (q/k/v, gate/up) are stacked
into one, so that one product serves the group.

::

    group "layers.0.qkv", ranks q=8, k=0, v=4          page
    A stack  [12, in]   rows 0..7 q, 8..11 v      ->   | A tile | B^T tile q | B^T tile v | next group ...
    B^T      q [8, out_q], v [4, out_v]

A method may add a *column scale* to a module: one number per output column, laid out as a matrix of one row. There are
no slots of a largest rank: a module takes its own rank, and an absent module takes nothing.

Placement is first-fit decreasing over *runs*: as many rows of one matrix as a page holds. The tiles of a run are
adjacent, so an executor may read a run as one matrix; almost every matrix is one run. A run is cut further only if the
holes in the open pages hold all that is left. This saves the last, mostly empty page of a small adapter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from manylora.adapters.shape import ELEMENT_BYTES, BaseShape, PageShape, TargetModule
from manylora.types import AdapterKey, AdapterVersion

__all__ = [
    "ALIGN_BYTES",
    "MAX_TILE_ROWS",
    "AdapterLayout",
    "GroupLayout",
    "ModuleLayout",
    "Tile",
    "lay_out",
    "make_version",
]

MAX_TILE_ROWS = 16
"""Most rows in a tile: the height of a matrix instruction, so that a kernel never splits one."""

ALIGN_BYTES = 64
"""Runs start on cache lines, which are also aligned for vector loads."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A ``[num_rows, num_cols]`` piece of a matrix, row-major and contiguous in one page.

    Args:
        page: Index among the adapter's own pages.
        offset: First element in the page.
        row: First row of the matrix.
        num_rows: Rows.
        col: First column of the matrix.
        num_cols: Columns (all of them unless one row is larger than a page).
    """

    page: int
    offset: int
    row: int
    num_rows: int
    col: int
    num_cols: int


@dataclass(frozen=True, slots=True)
class ModuleLayout:
    """One module's share of a group.

    Args:
        module: The base's module.
        rank: Its own rank, without padding.
        row: Its first row in the group's A stack (and column of the activations ``x A^T``).
        b: Tiles of B^T ``[rank, out_features]``, scale folded in.
        column_scale: Tiles of the column scale ``[1, out_features]``; empty without one.
    """

    module: TargetModule
    rank: int
    row: int
    b: tuple[Tile, ...]
    column_scale: tuple[Tile, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One group's LoRA weights.

    Args:
        group: Name of the group.
        rank: Sum of its modules' ranks.
        in_features: Inputs of the group.
        a: Tiles of the A stack ``[rank, in_features]``.
        modules: The modules with weights, in order of ``row``.
    """

    group: str
    rank: int
    in_features: int
    a: tuple[Tile, ...]
    modules: tuple[ModuleLayout, ...]


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """An adapter's groups, by name, and the pages they take.

    Args:
        groups: By group name.
        num_pages: Pages.
        used_elements: Elements that hold weights; the rest of the pages is padding.
        dtype: Type of the elements: the page's own, or a narrower one, of which more fit in a page.
    """

    groups: dict[str, GroupLayout]
    num_pages: int
    used_elements: int
    dtype: str

    @property
    def weight_bytes(self) -> int:
        """Bytes that hold weights."""
        return self.used_elements * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows ``[row, row + num_rows)`` of columns ``[col, col + num_cols)`` of a matrix, to be placed in one page."""

    matrix: int
    row: int
    num_rows: int
    col: int
    num_cols: int

    @property
    def num_elements(self) -> int:
        return self.num_rows * self.num_cols


@dataclass(slots=True)
class _Packer:
    """Adapter pages as they fill, each from its front."""

    page_elements: int
    align: int  # runs start at multiples of so many elements
    num_pages: int = 0
    holes: dict[int, int] = field(default_factory=dict)  # page -> elements free at its end, in page order
    tiles: dict[int, list[Tile]] = field(default_factory=dict)  # by matrix

    def place_all(self, runs: list[_Run]) -> None:
        """Place every run, the largest first; ties stay in model order, so that equal adapters have equal layouts."""
        left = sum(run.num_elements for run in runs)
        for run in sorted(runs, key=lambda r: -r.num_elements):
            page = next((p for p, free in self.holes.items() if run.num_elements <= free), None)
            if page is not None:
                self._put(run, page)
            elif left > sum(self.holes.values()) or not self._fill_holes(run):
                self.holes[self.num_pages] = self.page_elements
                self.num_pages += 1
                self._put(run, self.num_pages - 1)
            left -= run.num_elements

    def _fill_holes(self, run: _Run) -> bool:
        """Cut a run into the holes of open pages; change nothing and return False when it does not fit."""
        rows_in = {page: free // run.num_cols for page, free in self.holes.items()}
        if sum(rows_in.values()) < run.num_rows:
            return False
        row, end = run.row, run.row + run.num_rows
        # The largest holes first: fewest pieces.
        for page in sorted(rows_in, key=lambda p: -rows_in[p]):
            num_rows = min(rows_in[page], end - row)
            if num_rows == 0:
                break
            self._put(_Run(run.matrix, row, num_rows, run.col, run.num_cols), page)
            row += num_rows
        return True

    def _put(self, run: _Run, page: int) -> None:
        start = self.page_elements - self.holes[page]
        tiles = self.tiles.setdefault(run.matrix, [])
        for below in range(0, run.num_rows, MAX_TILE_ROWS):
            rows = min(MAX_TILE_ROWS, run.num_rows - below)
            tiles.append(Tile(page, start + below * run.num_cols, run.row + below, rows, run.col, run.num_cols))
        self.holes[page] -= -(-run.num_elements // self.align) * self.align
        if self.holes[page] == 0:
            del self.holes[page]


def _cut(matrix: int, num_rows: int, num_cols: int, page_elements: int) -> list[_Run]:
    """Cut a matrix into runs that fit a page: by rows, and by columns where one row is larger than a page."""
    width = num_cols
    if num_cols > page_elements:
        # Narrow enough for a full tile of rows: a few wide rows would give as many tiles and smaller products.
        width = max(1, page_elements // min(MAX_TILE_ROWS, num_rows))
    runs = []
    for col in range(0, num_cols, width):
        cols = min(width, num_cols - col)
        rows_per_page = page_elements // cols
        for row in range(0, num_rows, rows_per_page):
            runs.append(_Run(matrix, row, min(rows_per_page, num_rows - row), col, cols))
    return runs


def _alignment(page: PageShape, dtype: str) -> int:
    # A tiny page (of a test model) would lose a visible share to alignment: its runs are packed without.
    align = max(1, ALIGN_BYTES // ELEMENT_BYTES[dtype])
    num_elements = page.elements_of(dtype)
    return align if num_elements % align == 0 and num_elements >= 64 * align else 1


def lay_out(
    ranks: Mapping[str, int], base: BaseShape, dtype: str | None = None, column_scaled: Collection[str] = ()
) -> AdapterLayout:
    """Return the layout of an adapter; its tiles cover each matrix exactly once and never overlap or cross a page.

    A pure function of its arguments, so one host copy can be copied to any pages of any replica.

    Args:
        ranks: Rank of each module that has weights, by module name; every name is in ``base.modules``.
        base: The base model.
        dtype: Type of the packed weights; the page's own when ``None``.
        column_scaled: Names of the modules with a column scale, all of them in ``ranks``.
    """
    assert ranks and all(rank >= 1 for rank in ranks.values()), "an adapter has at least one module of rank 1"
    members: dict[str, list[TargetModule]] = {}
    for module in base.modules:
        if module.name in ranks:
            members.setdefault(module.group, []).append(module)
    assert sum(map(len, members.values())) == len(ranks), "every module is one of the base's"

    # Matrices in model order: a group's A stack, its modules' B^T, then their column scales.
    sizes: list[tuple[int, int]] = []
    for modules in members.values():
        sizes.append((sum(ranks[m.name] for m in modules), modules[0].in_features))
        sizes.extend((ranks[m.name], m.out_features) for m in modules)
        sizes.extend((1, m.out_features) for m in modules if m.name in column_scaled)
    dtype = base.page.dtype if dtype is None else dtype
    page_elements = base.page.elements_of(dtype)
    packer = _Packer(page_elements, _alignment(base.page, dtype))
    packer.place_all([run for i, (rows, cols) in enumerate(sizes) for run in _cut(i, rows, cols, page_elements)])

    placed = iter([tuple(sorted(packer.tiles[i], key=lambda t: (t.col, t.row))) for i in range(len(sizes))])
    groups: dict[str, GroupLayout] = {}
    for group, modules in members.items():
        a = next(placed)
        b = [next(placed) for _ in modules]
        scales = [next(placed) if module.name in column_scaled else () for module in modules]
        row = 0
        parts = []
        for module, b_tiles, scale_tiles in zip(modules, b, scales, strict=True):
            parts.append(ModuleLayout(module, ranks[module.name], row, b_tiles, scale_tiles))
            row += ranks[module.name]
        groups[group] = GroupLayout(group, row, modules[0].in_features, a, tuple(parts))
    used = sum(rows * cols for rows, cols in sizes)
    return AdapterLayout(groups=groups, num_pages=packer.num_pages, used_elements=used, dtype=dtype)


def make_version(
    layout: AdapterLayout, page: PageShape, *, key: str, source: str, disk_bytes: int | None = None
) -> AdapterVersion:
    """Return the version of an adapter with this layout, read or simulated, with its sizes in every tier.

    Args:
        layout: Returned by its method.
        page: The base's page.
        key: Its identity.
        source: The directory it came from, or its name without one.
        disk_bytes: Size of its weight file; the size of its weights when ``None``.
    """
    modules = [part for group in layout.groups.values() for part in group.modules]
    return AdapterVersion(
        key=AdapterKey(key),
        source=source,
        rank=max(part.rank for part in modules),
        total_rank=sum(part.rank for part in modules),
        num_modules=len(modules),
        target_modules=tuple(sorted({part.module.name.rpartition(".")[2] for part in modules})),
        num_pages=layout.num_pages,
        weight_bytes=layout.weight_bytes,
        host_bytes=layout.num_pages * page.num_bytes,
        disk_bytes=layout.weight_bytes if disk_bytes is None else disk_bytes,
        dtype=layout.dtype,
    )
