"""Where each piece of an adapter lies in its pages.

A LoRA pair adds ``scale * (x A^T) B^T`` with A ``[rank, in]`` and B ``[out, rank]``. We keep A as it is and
B transposed (``[rank, out]``, scale folded in), so that both are stacks of rows along the rank, and cut each
stack into *tiles*: contiguous row-major pieces that never cross a page. A's of one group (q/k/v, gate/up)
are stacked into one matrix, so that one product serves the group.

::

    group "layers.0.qkv", ranks q=8, k=0, v=4          page
    A stack  [12, in]   rows 0..7 q, 8..11 v      ->   | A tile | B^T tile q | B^T tile v | next group ...
    B^T      q [8, out_q], v [4, out_v]

There is no slot and no largest rank: a module takes its own rank and an absent one takes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from manylora.adapters.shape import TargetModule

__all__ = ["AdapterLayout", "GroupLayout", "ModuleLayout", "Tile"]


@dataclass(frozen=True, slots=True)
class Tile:
    """A ``[num_rows, num_cols]`` piece of a matrix, row-major and contiguous in one page.

    Args:
        page: Index among the adapter's own pages (not the pool's).
        offset: First element in the page.
        row: First row of the matrix it holds.
        num_rows: Rows.
        col: First column.
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
        module: Which.
        rank: Its true rank.
        row: Its first row in the group's A stack (and column of the shrunk activations).
        b: Tiles of B^T ``[rank, out_features]``, scale folded in.
    """

    module: TargetModule
    rank: int
    row: int
    b: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One group's LoRA weights.

    Args:
        group: Name of the group.
        rank: Rows of the A stack: the sum of its modules' ranks.
        in_features: Columns of the A stack.
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
    """An adapter's groups and how many pages they take.

    Args:
        groups: By group name.
        num_pages: Pages.
        used_elements: Elements that hold weights; the rest of the pages is internal waste.
    """

    groups: dict[str, GroupLayout]
    num_pages: int
    used_elements: int
