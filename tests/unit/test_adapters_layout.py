from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from bad_adapters import tiny_base
from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.adapters.layout import MAX_TILE_ROWS, AdapterLayout, Tile, lay_out
from manylora.adapters.shape import BaseShape, PageShape


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
    # And still almost every matrix is one piece, which an executor sees as one matrix.
    cuts = [
        1 + sum(not follows(x, y) for x, y in pairwise(tiles)) - -(-rows * cols // base.page.num_elements)
        for tiles, rows, cols in matrices(layout)
    ]
    # At rank 128 most matrices are larger than half a page, and filling every page means cutting many once more.
    assert min(cuts) >= 0 and np.mean(cuts) <= (0.1 if rank <= 64 else 1.0)


def test_runs_start_on_cache_lines_where_pages_are_large() -> None:
    base = llama_3_8b()
    small = replace(base, page=replace(base.page, num_layers=1, num_kv_heads=1, head_dim=8, block_size=1))
    odd = {"model.layers.0.self_attn.q_proj": 5, "model.layers.0.self_attn.k_proj": 3}
    for tiles, _, _ in matrices(lay_out(odd, base)):
        assert tiles[0].offset * base.page.element_bytes % 64 == 0
    check(lay_out({"model.layers.0.self_attn.k_proj": 3}, small), small)
    assert isinstance(small.page, PageShape)
