"""The LoRA kernels against dense products, on pages so small that every matrix is cut."""

from __future__ import annotations

import random

import pytest
import torch
from lora_cases import GROUP, IN, NAMES, load, make_base
from triton_cases import Group
from triton_cases import make_base as make_base_of

from manylora.execution.lora.batch import LoraBatch, LoraSegment
from manylora.execution.lora.kernels import add_embedding, apply_grouped
from manylora.execution.lora.parts import GroupParts, Part
from manylora.execution.storage.page_tensor import PageTensor, consecutive

pytestmark = pytest.mark.usefixtures("two_threads")


def test_head_parts_are_sampled_rows_only() -> None:
    base = make_base(64)
    storage = PageTensor(base.page, 100, torch.device("cpu"))
    adapter, _, _ = load(base, storage, 0, {NAMES[0]: 2})
    batch = LoraBatch((LoraSegment(adapter, 0, 5, 0, 0), LoraSegment(adapter, 5, 9, 0, 2)))
    sampled, every = batch.parts(GROUP, is_sampled=True), batch.parts(GROUP)
    assert sampled is not None and [(part.start, part.stop) for part in sampled.parts] == [(0, 2)]
    assert every is not None and [(part.start, part.stop) for part in every.parts] == [(0, 5), (5, 9)]
    assert batch.parts(GROUP) is every
    assert batch.parts("embed") is None


@pytest.mark.parametrize("page_elements", [16, 4096])
def test_embedding_gathers_columns_of_a(page_elements: int) -> None:
    torch.manual_seed(0)
    base = make_base(page_elements)
    storage = PageTensor(base.page, 200, torch.device("cpu"))
    adapter, dense, _ = load(base, storage, 0, {"embed": 7})
    tokens = torch.tensor([3, 49, 0, 3, 17])
    out = torch.zeros(5, IN)
    add_embedding(GroupParts((Part(1, 4, adapter.groups["embed"]),)), tokens, out, 2.0)
    torch.testing.assert_close(out[1:4], 2.0 * dense["embed"][tokens[1:4]], atol=1e-5, rtol=1e-5)
    assert not out[0].any() and not out[4].any()


def test_tiles_behind_one_another_become_one_view() -> None:
    base = make_base(4096)
    storage = PageTensor(base.page, 4, torch.device("cpu"))
    adapter, _, _ = load(base, storage, 0, dict.fromkeys(NAMES, 40))
    weights = adapter.groups[GROUP]
    assert sum(len(module.b) for module in weights.modules) <= 5 and len(weights.a) <= 2


def test_pages_that_follow_one_another_are_one_copy() -> None:
    assert list(consecutive([5, 6, 7, 2, 9, 10])) == [(0, 5, 3), (3, 2, 1), (4, 9, 2)]
    assert list(consecutive([4])) == [(0, 4, 1)] and list(consecutive([])) == []


def test_drawn_adapters_equal_dense_products() -> None:
    """Widths, ranks, types, missing modules, rows, pages and threads as they come."""
    rng, threads = random.Random(0), torch.get_num_threads()
    torch.manual_seed(0)
    try:
        for _ in range(30):
            sizes = {f"m{number}": rng.randint(1, 200) for number in range(rng.randint(1, 4))}
            base = make_base_of({"g": Group(rng.randint(1, 200), sizes)}, 8 * rng.randint(8, 300), "float32")
            storage, page = PageTensor(base.page, 4000, torch.device("cpu")), 0
            storage.flat.fill_(float("nan"))
            adapters = []
            for _ in range(rng.randint(1, 4)):
                chosen = [module.name for module in base.modules if rng.random() < 0.7] or [base.modules[0].name]
                ranks = {name: rng.randint(1, rng.choice([4, 17, 64])) for name in chosen}
                adapter, dense, page = load(base, storage, page, ranks, rng.choice(["float32", "float16", "bfloat16"]))
                adapters.append((adapter, dense))
            spans, row = [], 0
            for _ in range(rng.randint(1, 6)):
                count = rng.choice([1, 1, 2, 4, 7, 8, 9, rng.randint(1, 40), 130])
                spans.append((row, row + count, rng.randrange(len(adapters))))
                row += count + rng.randint(0, 2)
            x, out = torch.randn(row, base.modules[0].in_features), torch.randn(row, sum(sizes.values()))
            expected = out.double()
            for start, stop, number in spans:
                for module in base.modules:
                    if (product := adapters[number][1].get(module.name)) is not None:
                        columns = slice(module.offset, module.offset + module.out_features)
                        expected[start:stop, columns] += x[start:stop].double() @ product.double()
            torch.set_num_threads(rng.randint(1, 3))
            batch = LoraBatch(tuple(LoraSegment(adapters[number][0], a, b, 0, 0) for a, b, number in spans))
            parts = batch.parts("g")
            assert parts is not None
            apply_grouped(x, out, parts)
            torch.testing.assert_close(out.double(), expected, rtol=0.0, atol=3e-6 * float(expected.abs().max()))
    finally:
        torch.set_num_threads(threads)
