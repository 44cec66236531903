"""The LoRA kernels of experts, in Triton's interpreter where there is no GPU, against dense products."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from triton_cases import DEVICE, HALVES, TOLERANCE, Group, Pool, make_base, poison, relative_error

from manylora.core.adapters.shape import ModuleKind
from manylora.execution.lora.tables import StepTables

pytest.importorskip("triton")

__all__ = ["poison"]

NUM_EXPERTS = 5
GROUPS = {"q": Group(40, {"proj": 48}), "gate_up": Group(40, {"weight": 300}), "down": Group(150, {"weight": 40})}
EXPERTS = ("gate_up.weight", "down.weight")


def make_pool(page_elements: int, dtype: str, num_pages: int) -> Pool:
    base = make_base(GROUPS, page_elements, dtype)
    modules = tuple(
        replace(one, kind=ModuleKind.EXPERTS, num_experts=NUM_EXPERTS) if one.name in EXPERTS else one
        for one in base.modules
    )
    return Pool.make(replace(base, modules=modules), num_pages, np.random.default_rng(0))


def load(pool: Pool, **ranks: int) -> tuple:
    """Store an adapter; return it and the dense ``A^T B^T`` of each expert, by module."""
    names = {"q": "q.proj", "gate_up": "gate_up.weight", "down": "down.weight"}
    weights, _ = pool.load({names[name]: rank * (1 if name == "q" else NUM_EXPERTS) for name, rank in ranks.items()})
    dense = {}
    for name, group in weights.groups.items():
        if name == "q":
            continue
        (a, b), rank = _matrices(group), ranks[name]
        dense[name] = [a[e * rank : (e + 1) * rank].t() @ b[e * rank : (e + 1) * rank] for e in range(NUM_EXPERTS)]
    return weights, dense


def _matrices(group) -> tuple[torch.Tensor, torch.Tensor]:
    (module,) = group.modules
    sizes = (group.layout.in_features, GROUPS[group.layout.group].sizes["weight"])
    found = []
    for pieces, width in zip((group.a, module.b), sizes, strict=True):
        matrix = torch.full((group.rank, width), float("nan"), dtype=torch.float64)
        for piece in pieces:
            num_rows, num_cols = piece.weight.shape
            matrix[piece.row : piece.row + num_rows, piece.col : piece.col + num_cols] = piece.weight.double().cpu()
        assert not matrix.isnan().any()
        found.append(matrix)
    return found[0], found[1]


def run(pool: Pool, group: str, segments: list[tuple[int, int, int]], adapters: list[tuple], chosen: torch.Tensor):
    """Add the LoRA of ``(start, stop, adapter)`` rows and their chosen experts; return the result and what it is."""
    dtype = pool.storage.dtype
    experts, order = torch.sort(chosen.reshape(-1), stable=True)
    rows = order // chosen.shape[1]
    span = pool.space.directory.groups[group]
    width = GROUPS[group].sizes["weight"]
    x, out = torch.randn(len(rows), span.in_features).to(dtype), torch.randn(len(rows), width).to(dtype)
    expected = out.double()
    for start, stop, i in segments:
        for at in range(len(rows)):
            if start <= int(rows[at]) < stop and group in adapters[i][1]:
                expected[at] += x[at].double() @ adapters[i][1][group][int(experts[at])]
    tables = StepTables.for_rows(pool.space, [(start, stop, adapters[i][0].table) for start, stop, i in segments])
    found = out.to(DEVICE)
    add(tables, x.to(DEVICE), found, group, pool, experts.to(DEVICE), rows.to(DEVICE))
    return found, expected


def add(tables: StepTables, x: torch.Tensor, out: torch.Tensor, group: str, pool: Pool, *choices: torch.Tensor) -> None:
    """Add a group's LoRA as a mixture does, whose other weight has the same choices."""
    groups = pool.space.directory.groups
    tables.apply_experts(x, out, groups[group], tables.find_experts(*choices, groups["gate_up"], groups["down"]))


def choose(num_rows: int, per_row: int = 2) -> torch.Tensor:
    return torch.stack([torch.randperm(NUM_EXPERTS)[:per_row] for _ in range(num_rows)])


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("page_elements", "dtype"), [(220, "float32"), *((1 << 14, half) for half in HALVES)])
def test_mixed_adapters_equal_dense_products(page_elements: int, dtype: str) -> None:
    torch.manual_seed(0)
    pool = make_pool(page_elements, dtype, 1600 if page_elements < 1000 else 60)
    # On small pages matrices are cut by rows, and by columns where a row is larger than a page.
    adapters = [load(pool, gate_up=3, down=16), load(pool, q=4, gate_up=17), load(pool, q=5), load(pool, down=1)]
    segments = [(1, 6, 0), (6, 7, 1), (7, 9, 2), (9, 10, 3), (10, 20, 1)]  # row 0, and 20 and 21, are the base's
    for group in ("gate_up", "down"):
        found, expected = run(pool, group, segments, adapters, choose(22))
        assert relative_error(found, expected) < TOLERANCE[pool.storage.dtype], group


@pytest.mark.usefixtures("poison")
def test_prompts_take_high_blocks() -> None:
    torch.manual_seed(1)
    pool = make_pool(1 << 14, "float32", 60)
    adapters = [load(pool, gate_up=4), load(pool, gate_up=20)]
    found, expected = run(pool, "gate_up", [(0, 70, 0), (70, 72, 1)], adapters, choose(72))
    assert relative_error(found, expected) < 1e-5


def test_the_same_sums_whatever_shares_the_batch() -> None:
    torch.manual_seed(2)
    pool = make_pool(1 << 14, "float32", 60)
    table = load(pool, gate_up=20)[0].table
    experts, rows = torch.tensor([1, 1, 3], device=DEVICE), torch.tensor([0, 2, 1], device=DEVICE)
    x, base = torch.randn(3, 40, device=DEVICE), torch.randn(3, 300, device=DEVICE)
    together = base.clone()
    add(StepTables.for_rows(pool.space, [(0, 3, table)]), x, together, "gate_up", pool, experts, rows)
    for at in range(3):
        alone, row = base[at : at + 1].clone(), torch.zeros(1, dtype=torch.int64, device=DEVICE)
        tables = StepTables.for_rows(pool.space, [(0, 1, table)])
        add(tables, x[at : at + 1], alone, "gate_up", pool, experts[at : at + 1], row)
        assert torch.equal(together[at], alone[0])


def test_the_work_is_that_of_adapters_that_change_experts() -> None:
    pool = make_pool(1 << 14, "float32", 60)
    plain, down = (load(pool, **ranks)[0].table for ranks in ({"q": 4}, {"down": 2}))
    groups = pool.space.directory.groups
    tables = StepTables.for_rows(pool.space, [(0, 2, plain), (2, 30, down)])
    experts, rows = torch.zeros(40, dtype=torch.int64, device=DEVICE), torch.arange(40, device=DEVICE)
    choices = tables.find_experts(experts, rows, groups["gate_up"], groups["down"])
    assert choices.firsts[: int(choices.num_firsts)].tolist() == [2]  # of a block of 64 rows


def test_addresses_of_rows_are_aligned_alike() -> None:
    """Kernels are compiled anew for a pointer that is aligned in another way."""
    pool = make_pool(1 << 14, "float32", 60)
    table = load(pool, down=2)[0].table
    for num_adapters in (1, 2, 3):
        tables = StepTables.for_rows(pool.space, [(at, at + 1, table) for at in range(num_adapters)])
        assert tables._of_rows.data_ptr() % 16 == 0


def test_nan_of_one_expert_stays_with_its_rows() -> None:
    torch.manual_seed(3)
    pool = make_pool(1 << 14, "float32", 60)
    weights, dense = load(pool, down=4)
    (module,) = weights.groups["down"].modules
    broken = 2 * 4  # the first row of expert 2
    for piece in module.b:
        if piece.row <= broken < piece.row + len(piece.weight):
            piece.weight[broken - piece.row].fill_(float("nan"))
    chosen = torch.tensor([[0, 2], [1, 3], [2, 4]])
    found, expected = run(pool, "down", [(0, 3, 0)], [(weights, dense)], chosen)
    experts = torch.sort(chosen.reshape(-1), stable=True).values
    assert bool(found[experts == 2].isnan().all())
    assert relative_error(found[experts != 2], expected[experts != 2]) < 1e-5
