from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from bad_adapters import tiny_base
from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.core.adapters.layout import MAX_TILE_ROWS, AdapterLayout, GroupLayout, Tile, lay_out
from manylora.core.adapters.shape import BaseShape, PageShape
from manylora.lab.catalog.dims import ATTENTION_TARGETS
from manylora.lab.catalog.models import base_shape


def matrices(layout: AdapterLayout) -> list[tuple[tuple[Tile, ...], int, int]]:
    found = []
    for group in layout.groups.values():
        found.append((group.a, group.rank, group.in_features))
        found.extend((m.b, m.rank, m.module.out_features) for m in group.modules)
    return found


def check(layout: AdapterLayout, base: BaseShape) -> None:
    """Every matrix covered exactly once; no tile overlaps another, crosses its page, or is too high."""
    page_elements = base.page.num_elements
    taken = defaultdict(list)
    for tiles, rows, cols in matrices(layout):
        seen = np.zeros((rows, cols), int)
        for t in tiles:
            assert 1 <= t.num_rows <= MAX_TILE_ROWS and t.num_cols >= 1
            assert t.row + t.num_rows <= rows and t.col + t.num_cols <= cols
            seen[t.row : t.row + t.num_rows, t.col : t.col + t.num_cols] += 1
            taken[t.page].append((t.offset, t.offset + t.num_rows * t.num_cols))
        assert (seen == 1).all()
    assert sorted(taken) == list(range(layout.num_pages))
    for spans in taken.values():
        spans.sort()
        assert spans[0][0] >= 0 and spans[-1][1] <= page_elements
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert layout.used_elements == sum(rows * cols for _, rows, cols in matrices(layout))


bases = st.builds(
    tiny_base,
    num_layers=st.integers(1, 3),
    hidden=st.sampled_from([8, 24, 64]),
    intermediate=st.sampled_from([12, 100]),
    heads=st.sampled_from([2, 4]),
    kv_heads=st.sampled_from([1, 2]),
    vocab=st.sampled_from([7, 300, 2000]),
    block_size=st.sampled_from([4, 16, 64]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)


@given(base=bases, data=st.data())
@settings(max_examples=60)
def test_tiles_cover_every_matrix_once_and_never_overlap_or_cross(base: BaseShape, data: st.DataObject) -> None:
    names = [m.name for m in base.modules]
    ranks = data.draw(
        st.dictionaries(st.sampled_from(names), st.integers(1, 40), min_size=1, max_size=len(names)), label="ranks"
    )
    layout = lay_out(ranks, base)
    check(layout, base)
    placed = {part.module.name: part.rank for g in layout.groups.values() for part in g.modules}
    assert placed == ranks
    for name, group in layout.groups.items():
        assert all(part.module.group == name for part in group.modules)
        rows = [row for part in group.modules for row in range(part.row, part.row + part.rank)]
        assert rows == list(range(group.rank))


def test_modules_of_a_group_share_one_stack_in_model_order() -> None:
    base = tiny_base()
    attention = "model.layers.0.self_attn"
    layout = lay_out({f"{attention}.v_proj": 4, f"{attention}.q_proj": 8}, base)
    group = layout.groups[f"{attention}.qkv"]
    assert [(p.module.name, p.row, p.rank) for p in group.modules] == [
        (f"{attention}.q_proj", 0, 8),
        (f"{attention}.v_proj", 8, 4),
    ]
    assert (group.rank, group.in_features) == (12, 32)


def test_a_row_larger_than_a_page_is_cut_in_columns() -> None:
    base = tiny_base(num_layers=1, hidden=8, heads=2, kv_heads=1, vocab=5000, block_size=16)
    assert base.page.num_elements < 5000
    layout = lay_out({"model.embed_tokens": 4}, base)
    check(layout, base)
    assert {t.num_rows for t in layout.groups["model.embed_tokens"].a} == {4}


def test_layout_is_a_function_of_its_arguments() -> None:
    base = tiny_base()
    ranks = {m.name: 3 for m in base.modules}
    assert lay_out(ranks, base) == lay_out(dict(reversed(ranks.items())), base)


def follows(before: Tile, after: Tile) -> bool:
    return after.page == before.page and after.offset == before.offset + before.num_rows * before.num_cols


def llama_3_8b() -> BaseShape:
    base = tiny_base(
        num_layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, vocab=128256, dtype="bfloat16"
    )
    assert base.page.num_bytes == 2 * 1024 * 1024
    return base


@pytest.mark.parametrize("rank", [8, 16, 64, 128])
def test_pages_of_a_real_model_are_all_but_full(rank: int) -> None:
    base = llama_3_8b()
    layout = lay_out(dict.fromkeys(base.all_linear, rank), base)
    capacity = layout.num_pages * base.page.num_elements
    # No page more than the elements need: nothing is lost inside pages but the end of the last.
    assert layout.num_pages == -(-layout.used_elements // base.page.num_elements)
    assert 1 - layout.used_elements / capacity <= 0.006
    # A page is closed before the next is opened, so about one matrix is cut for each page; the others are one piece.
    pieces = [1 + sum(not follows(x, y) for x, y in pairwise(tiles)) for tiles, _, _ in matrices(layout)]
    assert sum(pieces) <= len(pieces) + 1.4 * layout.num_pages


@given(base=bases, data=st.data())
@settings(max_examples=60)
def test_layers_are_complete_in_the_order_in_which_the_model_uses_them(base: BaseShape, data: st.DataObject) -> None:
    names = [m.name for m in base.modules]
    ranks = data.draw(
        st.dictionaries(st.sampled_from(names), st.integers(1, 40), min_size=1, max_size=len(names)), label="ranks"
    )
    layout = lay_out(ranks, base)
    layers = list(layout.layers())
    assert [group for groups, _ in layers for group in groups] == list(layout.groups.values())
    turns = [{part.module.turn for group in groups for part in group.modules} for groups, _ in layers]
    assert all(len(turn) == 1 for turn in turns) and all(max(x) < min(y) for x, y in pairwise(turns))
    first_free, used, largest_row = 0, 0, 0
    for groups, num_full in layers:
        pages = [{t.page for tiles in tiles_of(group) for t in tiles} for group in groups]
        assert [group.num_pages_needed for group in groups] == [max(each) + 1 for each in pages]
        # Only the page in which the layer before it ended is shared with it.
        assert min(map(min, pages)) >= first_free - 1
        first_free = max(map(max, pages)) + 1
        assert first_free - 1 <= num_full <= first_free
        used += sum(tile.num_rows * tile.num_cols for group in groups for tiles in tiles_of(group) for tile in tiles)
        largest_row = max(largest_row, *(t.num_cols for group in groups for tiles in tiles_of(group) for t in tiles))
        # So the prefix of pages that holds the first layers has no more room than the ends of its pages.
        if (room := base.page.num_elements - largest_row - 64) > 0:
            assert first_free <= -(-used // room) + 1
    assert layers[-1][1] == layout.num_pages


def tiles_of(group: GroupLayout) -> list[tuple[Tile, ...]]:
    return [group.a, *(m.b for m in group.modules), *(tiles for m in group.modules for _, tiles in m.vectors)]


def test_the_head_comes_last_though_a_base_may_name_it_first() -> None:
    base = tiny_base()
    ranks = {"lm_head": 2, "model.embed_tokens": 2, "model.layers.1.self_attn.q_proj": 2}
    mixed = replace(base, modules=base.modules[::-1])
    assert list(lay_out(ranks, mixed).groups) == ["model.embed_tokens", "model.layers.1.self_attn.qkv", "lm_head"]


@pytest.mark.parametrize("rank", [8, 64])
@pytest.mark.parametrize("name", ["llama-3-8b", "qwen2.5-7b", "llama-2-70b", "demo"])
def test_the_order_of_layers_costs_no_page(name: str, rank: int) -> None:
    base = base_shape(name)
    for targets in (("q_proj", "v_proj"), ATTENTION_TARGETS, {m.rpartition(".")[2] for m in base.all_linear}):
        ranks = {m.name: rank for m in base.modules if m.name.rpartition(".")[2] in targets}
        layout = lay_out(ranks, base)
        assert layout.num_pages == -(-layout.used_elements // base.page.num_elements)


def test_pieces_start_on_cache_lines_where_pages_are_large() -> None:
    base = llama_3_8b()
    small = replace(base, page=replace(base.page, num_layers=1, num_kv_heads=1, head_dim=8, block_size=1))
    odd = {"model.layers.0.self_attn.q_proj": 5, "model.layers.0.self_attn.k_proj": 3}
    for tiles, _, _ in matrices(lay_out(odd, base)):
        assert tiles[0].offset * base.page.element_bytes % 64 == 0
    check(lay_out({"model.layers.0.self_attn.k_proj": 3}, small), small)
    assert isinstance(small.page, PageShape)
