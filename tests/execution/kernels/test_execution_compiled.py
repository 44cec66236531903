"""The compiled kernels and oneDNN's product against plain torch."""

from __future__ import annotations

import itertools
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from manylora.core.adapters.layout import AdapterLayout, GroupLayout, ModuleLayout, Tile, lay_out
from manylora.core.adapters.shape import ModuleKind, PageShape, TargetModule
from manylora.execution.kernels.cpu.products import MAX_READ_ROWS, make_product_tables, product_kernel
from manylora.execution.kernels.cpu.support import CompiledKernels, find_compiled
from manylora.execution.kernels.linear import MIN_PACKED, MIN_WORK, has_onednn, linear, pack
from manylora.execution.lora.kernels import apply_grouped
from manylora.execution.lora.parts import GroupParts, Part
from manylora.execution.storage.page_tensor import PageTensor
from manylora.execution.storage.resident import AdapterRows, ResidentGroup, read_in_place
from manylora.lab.catalog.dims import ModelDims
from manylora.lab.catalog.models import base_shape

BLOCK, LAYERS, PAGES = 4, 3, 60

pytestmark = pytest.mark.usefixtures("two_threads")


@pytest.fixture(scope="module")
def kernels() -> CompiledKernels:
    pytest.importorskip("numba")
    kernels = find_compiled()
    if kernels is None:
        pytest.skip("torch's OpenMP threads are not within reach")
    return kernels


def test_the_threads_found_are_torchs(kernels: CompiledKernels) -> None:
    """With one thread any runtime would pass for torch's."""
    assert torch.get_num_threads() == 2
    assert find_compiled.__wrapped__() is not None


def make_pool(num_kv_heads: int, head_dim: int, value_dim: int | None) -> PageTensor:
    sizes = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "value_dim": value_dim, "element_bytes": 4}
    shape = PageShape(block_size=BLOCK, num_layers=LAYERS, dtype="float32", **sizes)
    pool = PageTensor(shape, PAGES, torch.device("cpu"))
    pool.flat.normal_()
    return pool


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "value_dim", "has_sinks"),
    [(4, 4, 16, None, False), (6, 2, 24, 10, True), (3, 1, 5, 8, False)],
)
def test_decode_attention_equals_plain_softmax(
    kernels: CompiledKernels,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int | None,
    has_sinks: bool,
    window: int | None,
    softcap: float | None,
    num_threads: int,
) -> None:
    torch.manual_seed(0)
    pool = make_pool(num_kv_heads, head_dim, value_dim)
    lengths = [1, 33, 4, 17, 5]
    tables = np.random.default_rng(0).permutation(PAGES)[: 5 * 9].reshape(5, 9).astype(np.int64)
    bounds = np.array([(max(0, n - window) if window else 0, n) for n in lengths], dtype=np.int64)
    query = torch.randn(5, num_heads, head_dim)
    sinks = torch.randn(num_heads) if has_sinks else None
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        factors = {"scaling": 0.3, "softcap": softcap, "sinks": sinks}
        found = kernels.attend(query, pool.flat, pool.shape, 1, tables, bounds, **factors)
    finally:
        torch.set_num_threads(before)
    for row in range(5):
        first, last = bounds[row]
        key, value = (
            part[tables[row], 1].flatten(0, 1)[first:last].repeat_interleave(num_heads // num_kv_heads, 1)
            for part in (pool.keys, pool.values)
        )
        scores = torch.einsum("hd,jhd->hj", query[row], key) * 0.3
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None]), dim=1)
        expected = torch.einsum("hj,jhd->hd", scores.softmax(-1)[:, : len(value)], value)
        torch.testing.assert_close(found[row], expected, atol=1e-5, rtol=1e-5)


def test_nan_stays_with_its_own_sequence(kernels: CompiledKernels) -> None:
    pool = make_pool(2, 8, None)
    pool.flat[1] = float("nan")
    tables, bounds = np.array([[0, 2], [1, 2]], dtype=np.int64), np.array([[0, 6], [0, 6]], dtype=np.int64)
    query = torch.randn(2, 2, 8)
    found = kernels.attend(query, pool.flat, pool.shape, 0, tables, bounds, scaling=1.0, softcap=None)
    assert found[0].isfinite().all() and found[1].isnan().all()


@pytest.mark.parametrize("failure", [None, OSError("no library"), RuntimeError("no cache directory")])
def test_without_torchs_threads_there_are_no_kernels(
    failure: Exception | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("numba")

    def open_no_team(library: Path) -> None:
        if failure is not None:
            raise failure

    monkeypatch.setattr("manylora.execution.kernels.cpu.openmp.open_team", open_no_team)
    with caplog.at_level("INFO", logger="manylora.execution.kernels.cpu.support"):
        assert find_compiled.__wrapped__() is None
    assert "available=no" in caplog.text


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (1, 300)], ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_equals_torchs(shape: tuple[int, int], has_bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(*shape, 96), torch.randn(160, 96)
    bias = torch.randn(160) if has_bias else None
    torch.testing.assert_close(linear(x, weight, bias), functional.linear(x, weight, bias), atol=1e-4, rtol=1e-5)


def test_large_products_go_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_onednn():
        pytest.skip("this build of torch has no oneDNN")
    calls: list[int] = []

    def note(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        calls.append(x.shape[0])
        return functional.linear(x, weight, bias)

    monkeypatch.setattr("manylora.execution.kernels.linear._onednn", note)
    weight = torch.randn(64, 64)
    linear(torch.randn(4, 64), weight)
    assert calls == []
    linear(torch.randn(MIN_WORK // weight.numel(), 64), weight)
    assert calls == [MIN_WORK // weight.numel()]


@pytest.mark.parametrize("num_rows", [1, 5, 300])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_packed_weight_gives_the_same_product(num_rows: int, has_bias: bool) -> None:
    if not has_onednn():
        pytest.skip("this build of torch has no oneDNN")
    torch.manual_seed(0)
    x, weight = torch.randn(2, num_rows, 520), torch.randn(MIN_PACKED // 512, 520)
    bias = torch.randn(weight.shape[0]) if has_bias else None
    packed = pack(weight)
    assert packed.is_mkldnn and packed.shape == weight.shape
    torch.testing.assert_close(linear(x, packed, bias), functional.linear(x, weight, bias), atol=1e-3, rtol=1e-5)


def test_what_is_small_or_16_bit_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    for weight in (torch.randn(64, 64), torch.randn(1024, 1024).bfloat16()):
        assert pack(weight) is weight
    monkeypatch.setattr("manylora.execution.kernels.linear.has_onednn", lambda: False)
    weight = torch.randn(1024, 1024)
    assert pack(weight) is weight


def scattered(pool: torch.Tensor, start: int, matrix: torch.Tensor, num_pieces: int) -> tuple[tuple[Tile, ...], int]:
    """Put a matrix into ``pool`` from ``start`` on, cut into pieces by rows and by columns; return where it ends."""
    pieces = []
    for rows in torch.arange(matrix.shape[0]).chunk(num_pieces):
        for cols in torch.arange(matrix.shape[1]).chunk(num_pieces):
            row, col = int(rows[0]), int(cols[0])
            weight = pool.as_strided((len(rows), len(cols)), (len(cols), 1), start)
            weight.copy_(matrix[row : row + len(rows), col : col + len(cols)])
            pieces.append(Tile(0, start, row, len(rows), col, len(cols)))
            start += weight.numel()
    return tuple(pieces), start


def random_group(
    pool: torch.Tensor, start: int, in_features: int, widths: list[int], rank: int, num_pieces: int
) -> tuple[ResidentGroup, int]:
    a, start = scattered(pool, start, torch.randn(rank * len(widths), in_features) / 8, num_pieces)
    modules = []
    for index, width in enumerate(widths):
        b, start = scattered(pool, start, torch.randn(rank, width), num_pieces)
        module = TargetModule(
            name=str(index),
            kind=ModuleKind.LINEAR,
            in_features=in_features,
            out_features=width,
            layer=0,
            group="group",
            offset=sum(widths[:index]),
        )
        modules.append(ModuleLayout(module, rank, index * rank, b))
    group = GroupLayout("group", rank * len(widths), in_features, a, tuple(modules), 1)
    layout = AdapterLayout({"group": group}, 1, start, str(pool.dtype).removeprefix("torch."))
    return read_in_place(layout, pool[None]).groups["group"], start


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("num_pools", [1, 3])
@pytest.mark.parametrize("num_pieces", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lora_equals_plain_products_whatever_does_not_fill_a_tile_or_a_run(
    kernels: CompiledKernels,
    dtype: torch.dtype,
    num_pieces: int,
    num_pools: int,
    num_threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    # Prompts: wider than a panel of A, columns left over, a block of rows and a bit. Decoding: runs and a bit.
    in_features, widths = 800, [288, 45]
    # Adapters in pages and in host images, which have a type of their own each: a call takes them all.
    pools = [torch.full((200_000,), float("nan"), dtype=one) for one in (dtype, torch.float32, dtype)[:num_pools]]
    parts, start, row = [], 7, 2
    for index, (rank, num_rows) in enumerate(((1, 9), (21, 141), (8, 1), (6, 16), (5, 7))):
        weights, start = random_group(pools[index % num_pools], start, in_features, widths, rank, num_pieces)
        parts.append(Part(row, row + num_rows, weights))
        row += num_rows + 1
    x, out = torch.randn(row + 1, in_features), torch.randn(row + 1, sum(widths))
    x[1] = x[row] = float("nan")
    expected = out.clone()
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        apply_grouped(x, out, GroupParts(tuple(parts)))
    finally:
        torch.set_num_threads(before)
    monkeypatch.setattr("manylora.execution.lora.kernels.find_compiled", lambda: None)
    apply_grouped(x, expected, GroupParts(tuple(parts)))
    torch.testing.assert_close(out, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("num_pieces", [1, 3])
def test_work_is_every_weight_once(kernels: CompiledKernels, num_pieces: int) -> None:
    """So adapters on fewer modules cost less, by what their weights are less."""
    from manylora.execution.kernels.cpu.lora import make_tables
    from manylora.execution.kernels.cpu.tables import PIECE_COLS, PIECE_ROWS

    pool = torch.zeros(20_000)
    for widths in ([40], [40, 24, 24]):
        weights, num_weights = random_group(pool, 0, 32, widths, 5, num_pieces)
        for make, num_rows in ((make_tables, 2), (make_product_tables, 20)):
            tables = make([(0, num_rows, weights.memory)], ["group"])["group"]
            pieces = np.concatenate([tables.shrink, tables.expand])
            assert (pieces[:, PIECE_ROWS] * pieces[:, PIECE_COLS]).sum() == num_weights


def test_a_steps_prompts_are_one_call(kernels: CompiledKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    from manylora.execution.kernels.cpu.lora import lora_kernel
    from manylora.execution.kernels.cpu.openmp import Team

    calls: list[int] = []
    monkeypatch.setattr(Team, "run", lambda team, kernel, *arguments: calls.append(kernel))
    pool = torch.zeros(20_000)
    weights, _ = random_group(pool, 0, 32, [32, 32], 4, 1)
    rows = [1, MAX_READ_ROWS + 1, 2, MAX_READ_ROWS + 5]
    starts = np.cumsum([0, *rows]).tolist()
    parts = GroupParts(tuple(Part(a, b, weights) for a, b in itertools.pairwise(starts)))
    apply_grouped(torch.zeros(starts[-1], 32), torch.zeros(starts[-1], 64), parts)
    assert calls == [product_kernel(), lora_kernel()]


def test_a_steps_lines_are_those_of_its_adapters_one_by_one(kernels: CompiledKernels) -> None:
    """Gathered by the compiled loop, and here line by line from the adapters' own tables."""
    from manylora.execution.kernels.cpu import tables
    from manylora.execution.kernels.cpu.tables import COST, FIRST_ROW, NUM_ROWS, OFFSET, START, StepPieces

    groups, rows = adapters_of_some_groups()
    groups = [groups[-1], *groups[1:-1]]  # not all of them, in another order
    step = StepPieces(rows, groups)
    begin = min(weights.flat.data_ptr() for _, _, weights in rows)
    for kind, pieces, of_each in (("shrink", step.shrink(), "rank"), ("expand", step.expand(), "expand_cost")):
        found = iter(pieces.table.tolist())
        for number, group in enumerate(groups):
            work = 0
            for start, stop, weights in rows:
                own = tables.adapter_tables(weights)
                if group not in own.template.numbers:
                    continue
                place = own.template.numbers[group]
                first, count = getattr(own.template, kind).places[place]
                size = weights.flat.element_size()
                cost = size + stop - start
                for line in getattr(own, kind)[first : first + count].tolist():
                    line[FIRST_ROW], line[NUM_ROWS] = start, stop - start
                    line[OFFSET] += (weights.flat.data_ptr() - begin) // size
                    line[START] = line[START] * cost + work
                    line[COST] *= cost
                    assert next(found) == line
                modules = weights.layout.groups[group].modules
                by_columns = sum(-(-part.module.num_rows // tables.UNIT) * part.rank for part in modules)
                work += cost * (weights.layout.groups[group].rank if of_each == "rank" else by_columns)
            assert pieces.costs[number] == work
        assert next(found, None) is None


def adapters_of_some_groups() -> tuple[list[str], list[AdapterRows]]:
    """Return the groups of linears of a base, and rows of adapters of several types that change some of them each."""
    dims = {"hidden_size": 64, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "vocab_size": 50}
    base = base_shape(ModelDims(name="m", intermediate_size=96, max_model_len=64, dtype="float32", **dims))
    names, rows = list(base.all_linear), []
    for number, dtype in enumerate(("float32", "bfloat16", "float32", "float16", "float32")):
        chosen = [name for place, name in enumerate(names) if number == 0 or place % (number + 1) == 0]
        layout = lay_out({name: 1 + (place + number) % 7 for place, name in enumerate(chosen)}, base, dtype)
        image = torch.zeros(layout.num_pages, base.page.elements_of(dtype), dtype=getattr(torch, dtype))
        rows.append((20 * number, 20 * number + 3 * number + 1, read_in_place(layout, image).memory))
    return list(dict.fromkeys(module.group for module in base.modules if module.name in names)), rows


def test_tables_of_all_groups_at_once_are_those_of_each_group_by_itself(kernels: CompiledKernels) -> None:
    from manylora.execution.kernels.cpu.lora import make_tables
    from manylora.execution.kernels.cpu.tables import DTYPE, OFFSET

    groups, rows = adapters_of_some_groups()
    for make in (make_tables, make_product_tables):
        together = make(rows, groups)
        assert list(together) == groups
        for group in groups:
            own = [row for row in rows if group in row[2].layout.groups]
            alone = make(own, [group])[group]
            shift = alone.memory.address - together[group].memory.address
            for field in fields(alone):
                ours, theirs = getattr(together[group], field.name), getattr(alone, field.name)
                if field.name in ("shrink", "expand"):
                    theirs = theirs.copy()
                    theirs[:, OFFSET] += shift // np.where(theirs[:, DTYPE] == 0, 4, 2)
                if field.name != "memory":
                    np.testing.assert_array_equal(ours, theirs)
