"""The table-driven LoRA kernels, in Triton's interpreter where there is no GPU, against dense products."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton_cases import DEVICE, HALVES, TOLERANCE, Group, Pool, make_base, poison, relative_error

from manylora.execution.lora import tables
from manylora.execution.lora.batch import LoraBatch, LoraSegment
from manylora.execution.lora.kernels import LORA_KERNELS, TABLE_KERNELS, SharedKernel
from manylora.execution.lora.parts import GroupParts
from manylora.execution.lora.tables import LoraSpace, StepTables, TableSizes

pytest.importorskip("triton")

__all__ = ["poison"]

GROUPS = {
    "qkv": Group(48, {"q": 40, "k": 8, "v": 24}),
    "o": Group(40, {"o": 48}),
    "up": Group(20, {"gate": 300, "up": 300}),
    "down": Group(300, {"down": 20}),
}
EVERY = [f"{name}.{module}" for name, group in GROUPS.items() for module in group.sizes]


def run(
    pool: Pool,
    kernel: str,
    group: str,
    segments: list[tuple[int, int, int]],
    adapters: list[tuple],
    num_rows: int,
    *,
    is_sampled: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply a kernel to ``(start, stop, adapter)`` rows, others NaN; return its output and what it should be."""
    dtype = pool.storage.dtype
    batch = LoraBatch(
        tuple(
            LoraSegment(adapters[i][0], *((0, 0, start, stop) if is_sampled else (start, stop, 0, 0)))
            for start, stop, i in segments
        ),
        LoraSpace(pool.space.directory, pool.space.pool, TABLE_KERNELS[kernel]) if kernel in TABLE_KERNELS else None,
    )
    shape = GROUPS[group]
    width = sum(shape.sizes.values())
    x = torch.full((num_rows, shape.in_features), float("nan"), dtype=dtype)
    # Rows of a wider tensor, as slices of a fused product are.
    out = torch.full((num_rows, width + 5), 7.0, dtype=dtype, device=DEVICE)[:, :width]
    expected = out.double().cpu()
    for start, stop, i in segments:
        x[start:stop] = torch.randn(stop - start, shape.in_features).to(dtype)
        out[start:stop] = torch.randn(stop - start, width).to(DEVICE, dtype)
        expected[start:stop] = out[start:stop].double().cpu()
        offset = 0
        for module, size in shape.sizes.items():
            if (dense := adapters[i][1].get(f"{group}.{module}")) is not None:
                expected[start:stop, offset : offset + size] += x[start:stop].double() @ dense
            offset += size
    parts = batch.parts(group, is_sampled=is_sampled)
    assert parts is not None
    LORA_KERNELS[kernel](x.to(DEVICE), out, parts)
    return out, expected


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("page_elements", "dtype"), [(200, "float32"), *((1 << 14, half) for half in HALVES)])
@pytest.mark.parametrize("kernel", ["naive", "padded", "ragged"])
def test_mixed_adapters_equal_dense_products(kernel: str, page_elements: int, dtype: str) -> None:
    torch.manual_seed(0)
    pool = Pool.make(
        make_base(GROUPS, page_elements, dtype), 800 if page_elements < 1000 else 60, np.random.default_rng(0)
    )
    # On small pages matrices are cut by rows, and by columns where a row is larger than a page.
    adapters = [
        pool.load({"qkv.q": 5, "qkv.v": 17, "o.o": 1, "down.down": 2}),
        pool.load(dict.fromkeys(EVERY, 3)),
        pool.load({"up.up": 18, "qkv.k": 16, "o.o": 20, "down.down": 5}),
    ]
    segments = [(1, 4, 0), (4, 4, 1), (5, 6, 2), (6, 7, 1), (9, 10, 0)]
    for group in GROUPS:
        found, expected = run(pool, kernel, group, segments, adapters, 11)
        assert relative_error(found, expected) < TOLERANCE[pool.storage.dtype], group
        untouched = [0, 4, 7, 8, 10]
        assert bool((found[untouched] == 7.0).all())


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("kernel", "rank"), [("padded", 40), *(("ragged", r) for r in (1, 15, 16, 100, 256))])
def test_ranks(kernel: str, rank: int) -> None:
    torch.manual_seed(rank)
    pool = Pool.make(make_base(GROUPS, 1 << 12, "float32"), 80, np.random.default_rng(rank))
    adapters = [pool.load({"qkv.q": rank, "qkv.v": rank}), pool.load({"qkv.k": 7})]
    found, expected = run(pool, kernel, "qkv", [(0, 2, 0), (2, 3, 1)], adapters, 3)
    assert relative_error(found, expected) < 1e-5


@pytest.mark.usefixtures("poison")
def test_prompts_beside_decoding_rows() -> None:
    torch.manual_seed(0)
    pool = Pool.make(make_base(GROUPS, 1 << 14, "float32"), 60, np.random.default_rng(0))
    adapters = [pool.load({"up.gate": 20, "up.up": 4}), pool.load({"up.up": 9})]
    segments = [(0, 130, 0), (130, 131, 1), (131, 150, 0)]
    found, expected = run(pool, "ragged", "up", segments, adapters, 150)
    assert relative_error(found, expected) < 1e-5


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("num_rows", "num_splits"), [(3, 8), (70, 2)])
def test_a_long_input_is_summed_in_splits(num_rows: int, num_splits: int) -> None:
    torch.manual_seed(0)
    shape = Group(4100, {"o": 40})
    pool = Pool.make(make_base({"o": shape}, 1 << 14, "float32"), 30, np.random.default_rng(0))
    weights, dense = pool.load({"o.o": 5})
    span = pool.space.directory.groups["o"]
    x, out = torch.randn(num_rows, 4100, device=DEVICE), torch.zeros(num_rows, 40, device=DEVICE)
    tables = StepTables.for_rows(pool.space, [(0, num_rows, weights.table)])
    assert tables.num_splits(span) == num_splits
    tables.apply(x, out, span)
    assert relative_error(out, x.double().cpu() @ dense["o.o"]) < 1e-5


@pytest.mark.parametrize(("num_rows", "most"), [(1, 8), (512, 8), (1024, 8), (1025, 4), (4096, 2), (10000, 1)])
def test_many_rows_of_prompts_need_no_splits(num_rows: int, most: int) -> None:
    pool = Pool.make(make_base(GROUPS, 1 << 14, "float32"), 1, np.random.default_rng(0))
    room = TableSizes(num_blocks=1, num_items=1, num_rows=num_rows, max_rank=1, max_planes=1)
    assert StepTables(pool.space, room, pool.space.blocks.prompt).max_splits == most
    assert StepTables(pool.space, room, pool.space.blocks.decode).max_splits == 8


@pytest.mark.usefixtures("poison")
def test_sampled_rows_have_tables_of_their_own() -> None:
    torch.manual_seed(0)
    pool = Pool.make(make_base(GROUPS, 1 << 14, "float32"), 60, np.random.default_rng(0))
    adapters = [pool.load({"o.o": 4}), pool.load({"o.o": 9})]
    found, expected = run(pool, "ragged", "o", [(0, 2, 0), (2, 3, 1)], adapters, 3, is_sampled=True)
    assert relative_error(found, expected) < 1e-5


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("seed", range(4))
def test_random_batches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    pool = Pool.make(make_base(GROUPS, int(rng.choice([600, 5000])), "float32"), 900, rng)
    adapters = []
    for _ in range(int(rng.integers(1, 5))):
        chosen = rng.choice(EVERY, size=int(rng.integers(1, len(EVERY) + 1)), replace=False)
        adapters.append(pool.load({str(name): int(rng.integers(1, 40)) for name in chosen}))
    segments, row = [], 0
    for _ in range(int(rng.integers(1, 6))):
        row += int(rng.integers(0, 2))
        stop = row + int(rng.choice([0, 1, 1, 3, 17]))
        segments.append((row, stop, int(rng.integers(len(adapters)))))
        row = stop
    group = next(
        (
            g
            for g in GROUPS
            for start, stop, i in segments
            if stop > start and any(n.startswith(g) for n in adapters[i][1])
        ),
        None,
    )
    if group is None:
        return
    found, expected = run(pool, "ragged", group, segments, adapters, row + 1)
    assert relative_error(found, expected) < 1e-5


def test_nan_of_one_adapter_stays_with_its_rows() -> None:
    torch.manual_seed(0)
    pool = Pool.make(make_base(GROUPS, 1 << 14, "float32"), 60, np.random.default_rng(0))
    broken, fine = pool.load({"o.o": 4}), pool.load({"o.o": 9})
    broken[0].groups["o"].a[0].weight.fill_(float("nan"))
    found, expected = run(pool, "ragged", "o", [(0, 1, 0), (1, 3, 1)], [broken, fine], 3)
    assert bool(found[0].isnan().all())
    assert relative_error(found[1:], expected[1:]) < 1e-5


def test_the_same_sums_whatever_shares_the_batch() -> None:
    torch.manual_seed(0)
    pool = Pool.make(make_base(GROUPS, 1 << 14, "float32"), 60, np.random.default_rng(0))
    table = [pool.load({"qkv.q": 20, "qkv.v": 3})[0].table for _ in range(3)]
    x, base = torch.randn(3, 48, device=DEVICE), torch.randn(3, 72, device=DEVICE)
    span = pool.space.directory.groups["qkv"]
    together, alone = base.clone(), base.clone()
    StepTables.for_rows(pool.space, [(i, i + 1, table[i]) for i in range(3)]).apply(x, together, span)
    for i in range(3):
        StepTables.for_rows(pool.space, [(0, 1, table[i])]).apply(x[i : i + 1], alone[i : i + 1], span)
    assert torch.equal(together, alone)


def test_the_same_sums_whatever_the_width_of_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step with few row blocks a program takes fewer columns; a row's result must not show how many blocks."""
    torch.manual_seed(0)
    pool = Pool.make(make_base(GROUPS, 1 << 14, "float32"), 60, np.random.default_rng(0))
    weights, dense = pool.load({"up.gate": 70, "up.up": 5})
    x, span = torch.randn(2, 20, device=DEVICE), pool.space.directory.groups["up"]
    lengths = pool.space.ranges(span, 1024)[0].tolist()
    assert lengths == [2, 2, 4, 6]
    sums = []
    for programs in (3, 8, 40):  # by lists of 2, of 4 and of 6 ranges
        monkeypatch.setattr(tables, "num_programs", lambda device, programs=programs: programs)
        out = torch.zeros(2, 600, device=DEVICE)
        StepTables.for_rows(pool.space, [(0, 2, weights.table)]).apply(x, out, span)
        sums.append(out)
    assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], sums[2])
    gate, up = (x.double().cpu() @ dense[f"up.{name}"] for name in ("gate", "up"))
    assert relative_error(sums[0], torch.cat([gate, up], dim=1)) < 1e-5


class _OneWorker:
    """Collectives of a worker that has all columns; notes the tensors that it would add up."""

    rank = 0

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def sum(self, x: torch.Tensor, purpose: str) -> torch.Tensor:
        assert purpose == "lora" and x.is_contiguous()
        self.shapes.append(tuple(x.shape))
        return x


def test_workers_add_up_the_rows_of_the_step_alone() -> None:
    """Scratch has room for the largest step, as that of captured steps has; a step of two rows sends two."""
    torch.manual_seed(0)
    pool = Pool.make(make_base(GROUPS, 1 << 14, "float32"), 60, np.random.default_rng(0))
    table, dense = pool.load({"o.o": 4})
    room = StepTables.for_rows(pool.space, [(0, 9, table.table)])
    assert room.write([(0, 2, table.table)])
    room.plan()
    workers, x, out = _OneWorker(), torch.randn(2, 40, device=DEVICE), torch.zeros(2, 48, device=DEVICE)
    span = pool.space.directory.groups["o"]
    SharedKernel(workers, is_by_table=True)(x, out, GroupParts((), tables=lambda: room, span=span))  # type: ignore[arg-type]
    assert workers.shapes == [(1, 2, room.room.max_rank)]
    assert relative_error(out, x.double().cpu() @ dense["o.o"]) < 1e-5


def test_tables_that_are_too_small_say_so() -> None:
    pool = Pool.make(make_base(GROUPS, 1 << 14, "float32"), 60, np.random.default_rng(0))
    small, large = pool.load({"o.o": 4})[0].table, pool.load({"o.o": 40})[0].table
    tables = StepTables.for_rows(pool.space, [(0, 1, small)])
    assert tables.write([(0, 1, small)])
    assert not tables.write([(0, 1, large)]) and not tables.write([(0, 1, small), (1, 2, small)])
