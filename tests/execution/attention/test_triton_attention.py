"""The Triton attention and KV write, interpreted where there is no GPU, against plain softmax in float64."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from triton_cases import DEVICE, DTYPES, HALVES, TOLERANCE, poison, relative_error

from manylora.core.adapters.shape import PageShape
from manylora.core.plan import PlannedSequence
from manylora.core.types import SamplingParams
from manylora.execution.attention.call import AttentionCall, Rotation, rotate
from manylora.execution.attention.triton import PageTables, TritonAttentionKernel
from manylora.execution.device import make_device_ops
from manylora.execution.storage.page_tensor import PageTensor

pytest.importorskip("triton")

__all__ = ["poison"]

LAYERS, LAYER, NUM_PAGES = 3, 1, 90


def make_pool(block: int, kv_heads: int, head_dim: int, value_dim: int | None, dtype: torch.dtype) -> PageTensor:
    """Return pages full of NaN: nothing that was not written may be read."""
    name = str(dtype).removeprefix("torch.")
    shape = PageShape(
        block_size=block,
        num_layers=LAYERS,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        element_bytes=dtype.itemsize,
        dtype=name,
        value_dim=value_dim,
    )
    pool = PageTensor(shape, NUM_PAGES, DEVICE)
    pool.flat.fill_(float("nan"))
    return pool


def planned(seq_id: int, start: int, num_tokens: int, pages: list[int]) -> PlannedSequence:
    return PlannedSequence(
        seq_id=seq_id,
        tokens=[0] * (start + num_tokens),
        num_prompt_tokens=start + num_tokens,
        start=start,
        num_tokens=num_tokens,
        pages=tuple(pages),
        adapter=None,
        rank=0,
        sampling=SamplingParams(),
        is_sampled=True,
        seed=0,
    )


def check(
    spans: list[tuple[int, int]],
    *,
    block: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    softcap: float | None = None,
    part: int = 512,
    rotary: int = 0,
    has_sinks: bool = False,
    seed: int = 0,
) -> None:
    """Attend ``(tokens before, tokens now)`` of each sequence, q and k of now given before ``rotary`` dims turn."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    pool = make_pool(block, kv_heads, head_dim, value_dim, dtype)
    value_dim = value_dim or head_dim
    free = [int(page) for page in rng.permutation(NUM_PAGES)]
    sequences, contexts = [], []
    for seq_id, (start, count) in enumerate(spans):
        pages = [free.pop() for _ in range(-(-(start + count) // block))]
        sequences.append(planned(seq_id, start, count, pages))
        key, value = (torch.randn(start + count, kv_heads, size).to(dtype) for size in (head_dim, value_dim))
        contexts.append((key, value))
        for position in range(start):
            place = (pages[position // block], LAYER, position % block)
            pool.keys[place], pool.values[place] = key[position], value[position]
    num_rows = sum(count for _, count in spans)
    query = torch.randn(num_rows, heads, head_dim).to(dtype).transpose(0, 1)
    new = [
        torch.cat([pair[kv][start:] for pair, (start, _) in zip(contexts, spans, strict=True)]).transpose(0, 1)
        for kv in range(2)
    ]
    given = [part.to(DEVICE) for part in (query, *new)]
    rotation = None
    if rotary:
        # Any numbers, so that no two dimensions share theirs; behind them lies what must not be read.
        cos, sin = (torch.randn(num_rows, rotary).to(dtype) for _ in range(2))
        wide = torch.full((2, num_rows, rotary + 3), float("nan"), dtype=dtype, device=DEVICE)
        wide[0, :, :rotary], wide[1, :, :rotary] = cos, sin
        rotation = Rotation(wide[0, :, :rotary], wide[1, :, :rotary])
        query, turned = rotate(query, Rotation(cos, sin)), rotate(new[0], Rotation(cos, sin))
        row = 0
        for (key, _), (start, count) in zip(contexts, spans, strict=True):
            key[start:] = turned[:, row : row + count].transpose(0, 1)
            row += count
    before = [part.cpu().clone() for part in (pool.keys, pool.values)]
    sinks = torch.randn(heads).to(dtype) if has_sinks else None
    ops = make_device_ops(DEVICE)
    kernel = TritonAttentionKernel(ops, pool, max_num_seqs=8, max_model_len=NUM_PAGES * block)
    with patch("manylora.execution.attention.triton.LEAST_PART", part):
        batch = kernel.prepare(sequences)
    module = SimpleNamespace(layer_idx=LAYER)
    own_sinks = None if sinks is None else sinks.to(DEVICE)
    call = AttentionCall(module, *given, 0.3, window, softcap, None, {}, rotation, own_sinks)  # type: ignore[arg-type]
    found = batch.attend(call)
    assert found.shape == (num_rows, heads, value_dim)

    after = [part.cpu() for part in (pool.keys, pool.values)]
    row, written = 0, torch.zeros(before[0].shape[:3], dtype=torch.bool)
    for (start, count), (key, value), sequence in zip(spans, contexts, sequences, strict=True):
        for position in range(start, start + count):
            place = (sequence.pages[position // block], LAYER, position % block)
            tolerance = TOLERANCE[dtype] if rotary else 0.0  # a product may be added with or without rounding
            for part, expected in zip(after, (key[position], value[position]), strict=True):
                torch.testing.assert_close(part[place], expected, atol=tolerance, rtol=tolerance)
            written[place] = True
        grouped = [part.double().repeat_interleave(heads // kv_heads, 1) for part in (key, value)]
        scores = torch.einsum("qhd,khd->hqk", query.transpose(0, 1)[row : row + count].double(), grouped[0]) * 0.3
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(start, start + count)[:, None] - torch.arange(start + count)[None, :]
        is_seen = (distance >= 0) & (distance < (window or 10**9))
        scores = scores.masked_fill(~is_seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, count, 1)), dim=-1)
        expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : start + count], grouped[1])
        assert relative_error(found[row : row + count], expected) < TOLERANCE[dtype]
        row += count
    for now, then in zip(after, before, strict=True):
        assert torch.equal(now[~written].isnan(), then[~written].isnan()), "a write went astray"
        torch.testing.assert_close(now[~written], then[~written], equal_nan=True, atol=0, rtol=0)


MIXED = [(0, 9), (17, 1), (5, 7), (0, 1), (4, 4)]
DECODE = [(17, 1), (0, 1), (33, 1), (3, 1), (4, 1)]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("spans", [MIXED, DECODE])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (6, None), (None, 3.0), (5, 2.0)])
def test_masks(spans: list[tuple[int, int]], window: int | None, softcap: float | None) -> None:
    check(spans, window=window, softcap=softcap)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("part", "window"), [(512, None), (50, None), (13, None), (30, 6)])
def test_parts_of_the_context(part: int, window: int | None) -> None:
    check([(99, 1), (0, 1), (40, 1), (2, 3)], part=part, window=window, head_dim=160)


@pytest.mark.parametrize("lengths", [[1], [600] * 128, [500] * 127 + [32000], [32768] * 16, [1, 5000, 513, 512]])
def test_contexts_are_cut_by_their_lengths(lengths: list[int]) -> None:
    """Parts cover each context once, are of about the same size, and fit the room that a graph has for them."""
    ops = make_device_ops(torch.device("cpu"))
    pool = PageTensor(
        PageShape(block_size=1, num_layers=1, num_kv_heads=1, head_dim=2, element_bytes=4, dtype="float32"),
        1,
        torch.device("cpu"),
    )
    kernel = TritonAttentionKernel(ops, pool, max_num_seqs=len(lengths), max_model_len=1)
    kernel.fill = 66
    kernel.tables = SimpleNamespace(  # type: ignore[assignment]
        place=lambda sequences: list(range(len(sequences))), pages=lambda lines, places: np.zeros_like(lines)
    )
    pages: list[int] = [0] * 40000
    sequences = [replace(planned(i, 0, 1, []), start=n - 1, pages=pages) for i, n in enumerate(lengths)]
    blocks = kernel.blocks(kernel.outline(sequences), sequences)
    assert len(blocks.parts) <= len(lengths) + kernel.fill and len(blocks.merges) <= kernel.fill
    longest = max(512, -(-sum(lengths) // kernel.fill), -(-max(lengths) // 64))
    seen: dict[int, int] = {}
    for row, count, position, line, start, stop in blocks.parts.tolist():
        assert count == 1 and line == row and position == lengths[row] - 1
        assert start == seen.get(row, 0) < stop <= start + longest
        seen[row] = stop
    assert [seen[row] for row in range(len(lengths))] == lengths
    for row, first, number in blocks.merges.tolist():
        assert number > 1 and (blocks.parts[first : first + number, 0] == row).all()
    cut = {int(row) for row in blocks.merges[:, 0]}
    assert cut == {row for row, length in enumerate(lengths) if length > longest}


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block"),
    [(4, 4, 16, 16), (6, 2, 24, 5), (3, 1, 5, 1), (7, 1, 80, 3), (32, 1, 16, 4)],
)
def test_shapes(heads: int, kv_heads: int, head_dim: int, block: int) -> None:
    for spans in ([(3, 7), (12, 1)], [(12, 1), (2, 1)]):
        check(spans, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block=block)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("block", [1, 5, 16, 32])
@pytest.mark.parametrize(
    ("softcap", "half", "value_dim"), [(None, None, 40), (3.0, None, None), (None, HALVES[0], None)]
)
def test_prompts_of_many_tiles(block: int, softcap: float | None, half: str | None, value_dim: int | None) -> None:
    """Tiles that every line of a block sees, and those at its end, of few positions each."""
    spans = [(0, 67), (33, 40), (16, 16), (15, 2), (64, 1)] if block > 1 else [(0, 49), (17, 20)]
    tiles = {"TILE_BYTES": 1, "WIDE_TILE": 16}
    with patch.multiple("manylora.execution.attention.triton", **tiles, _shared_bytes=lambda device: 2**20):
        check(spans, block=block, softcap=softcap, dtype=DTYPES[half or "float32"], value_dim=value_dim, rotary=8)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("head_dim", "rotary"), [(16, 16), (24, 24), (40, 12), (5, 2)])
def test_queries_and_keys_are_rotated_on_the_way(head_dim: int, rotary: int) -> None:
    check([(3, 7), (12, 1), (0, 2)], heads=6, head_dim=head_dim, rotary=rotary)
    check([(50, 1), (0, 1)], head_dim=head_dim, rotary=rotary, part=30)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("head_dim", "value_dim"), [(24, 16), (12, 40)])
def test_values_of_another_size_than_keys(head_dim: int, value_dim: int) -> None:
    check([(3, 7), (12, 1), (0, 2)], kv_heads=4, head_dim=head_dim, value_dim=value_dim, rotary=4)
    check([(50, 1), (0, 1)], head_dim=head_dim, value_dim=value_dim, part=30)


@pytest.mark.usefixtures("poison")
def test_sinks_take_a_share_of_the_weights() -> None:
    check(MIXED, window=6, has_sinks=True)
    check(DECODE, part=8, has_sinks=True)


def test_keys_and_values_of_a_prompt_have_more_elements_than_32_bits_count() -> None:
    memory = torch.empty(2**31 + 16, dtype=torch.float16, device=DEVICE)  # hardly any of it is written
    new = memory.as_strided((1, 3, 16), (16, 2**30, 1))
    new.copy_(torch.arange(48).view(1, 3, 16))
    pool = make_pool(4, 1, 16, None, torch.float16)
    kernel = TritonAttentionKernel(make_device_ops(DEVICE), pool, max_num_seqs=1, max_model_len=4)
    call = AttentionCall(SimpleNamespace(layer_idx=LAYER), new.clone(), new, new, 0.3, None, None, None, {})  # type: ignore[arg-type]
    kernel.prepare([planned(0, 0, 3, [7])]).attend(call)
    for part in (pool.keys, pool.values):
        assert torch.equal(part[7, LAYER, :3], new[0, :, None])


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("half", HALVES)
def test_half_precision(half: str) -> None:
    check(MIXED, dtype=DTYPES[half])
    check(DECODE, dtype=DTYPES[half], part=20)
    check(MIXED, dtype=DTYPES[half], rotary=16)
    check(DECODE, dtype=DTYPES[half], rotary=8, part=20)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("seed", range(3))
def test_random_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    spans = [(int(rng.integers(0, 30)), int(rng.choice([1, 1, 2, 19]))) for _ in range(int(rng.integers(1, 5)))]
    kv_heads, group = (int(rng.integers(1, 4)) for _ in range(2))
    head_dim = int(rng.integers(1, 40))
    check(
        spans,
        block=int(rng.integers(1, 17)) + 3,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary=2 * int(rng.integers(0, head_dim // 2 + 1)),
        window=int(rng.integers(1, 30)) if rng.random() < 0.5 else None,
        seed=seed,
        part=int(rng.integers(4, 40)),
    )


@pytest.mark.parametrize("at_once", [2, 100])
def test_tables_are_rewritten_where_they_changed(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one copy for all lines, and a copy for each line that finds no room in it."""
    monkeypatch.setattr("manylora.execution.attention.triton.MOST_WRITTEN", at_once)
    ops = make_device_ops(DEVICE)
    tables = PageTables(ops, num_lines=2, width=4)
    one, two = tables.place([planned(1, 0, 1, [5]), planned(2, 0, 1, [7, 8])])
    assert tables.table[one, :1].tolist() == [5] and tables.table[two, :2].tolist() == [7, 8]
    pages = [7, 8]
    assert tables.place([replace(planned(2, 0, 1, []), pages=pages)]) == [two]
    for added in ([9], [4]):
        pages += added  # the engine's own list, which grows: pages before are not written again
        tables.table[two, 0] = 63
        assert tables.place([replace(planned(2, 0, 1, []), pages=pages)]) == [two]
        assert tables.table[two, : len(pages)].tolist() == [63, *pages[1:]]
    assert tables.place([planned(2, 0, 1, [3, 4])]) == [two]  # came back with other pages
    assert tables.table[two, :2].tolist() == [3, 4]
    tables.release([2, 99])
    assert tables.place([planned(3, 0, 1, [6]), planned(1, 0, 1, [5])]) == [two, one]
    assert tables.place([planned(4, 0, 1, [2]), planned(1, 0, 1, [5, 1])]) == [
        two,
        one,
    ]  # room is made by who is absent
    assert tables.table[one, :2].tolist() == [5, 1] and tables.table[two, :1].tolist() == [2]
