"""A toy base of one group, and random adapters of it in pages so small that every matrix is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from manylora.core.adapters.layout import AdapterLayout, Tile, lay_out
from manylora.core.adapters.shape import BaseShape, ModuleKind, PageShape, TargetModule
from manylora.execution.lora.batch import LoraBatch, LoraSegment
from manylora.execution.lora.kernels import LORA_KERNELS, TABLE_KERNELS
from manylora.execution.storage.page_tensor import PageTensor
from manylora.execution.storage.resident import ResidentAdapter, make_resident

IN, SIZES, VOCAB = 24, (20, 8, 12), 50
GROUP = "layers.0.qkv"
NAMES = ("layers.0.q_proj", "layers.0.k_proj", "layers.0.v_proj")


def make_base(page_elements: int) -> BaseShape:
    offsets = np.cumsum([0, *SIZES]).tolist()
    modules = [
        TargetModule(
            name=name,
            kind=ModuleKind.LINEAR,
            in_features=IN,
            out_features=size,
            layer=0,
            group=GROUP,
            offset=offset,
        )
        for name, size, offset in zip(NAMES, SIZES, offsets, strict=False)
    ]
    embedding = TargetModule(
        name="embed", kind=ModuleKind.EMBEDDING, in_features=VOCAB, out_features=IN, layer=None, group="embed", offset=0
    )
    return BaseShape(
        name="toy",
        architecture="toy",
        fingerprint="toy",
        vocab_size=VOCAB,
        hidden_size=IN,
        num_layers=1,
        max_model_len=64,
        page=PageShape(
            block_size=1,
            num_layers=1,
            num_kv_heads=1,
            head_dim=page_elements // 2,
            element_bytes=4,
            dtype="float32",
        ),
        modules=(*modules, embedding),
        all_linear=NAMES,
        eos_token_ids=(),
    )


def put(flat: torch.Tensor, pages: list[int], tiles: tuple[Tile, ...], matrix: torch.Tensor) -> None:
    for tile in tiles:
        rows = matrix[tile.row : tile.row + tile.num_rows, tile.col : tile.col + tile.num_cols]
        size = tile.num_rows * tile.num_cols
        flat[pages[tile.page], tile.offset : tile.offset + size] = rows.reshape(-1)


def load(
    base: BaseShape, storage: PageTensor, first_page: int, ranks: dict[str, int], dtype: str = "float32"
) -> tuple[ResidentAdapter, dict[str, torch.Tensor], int]:
    """Store a random adapter; return it, each module's dense ``A^T B^T`` and the next free page."""
    layout: AdapterLayout = lay_out(ranks, base, dtype)
    flat = storage.flat_as(dtype)
    pages = list(range(first_page, first_page + layout.num_pages))[::-1]
    dense = {}
    for group in layout.groups.values():
        a = torch.randn(group.rank, group.in_features).to(flat.dtype).float()
        put(flat, pages, group.a, a)
        for module in group.modules:
            b = torch.randn(module.rank, module.module.out_features).to(flat.dtype).float()
            put(flat, pages, module.b, b)
            dense[module.module.name] = a[module.row : module.row + module.rank].t() @ b
    return make_resident(layout, pages, storage), dense, first_page + layout.num_pages


@pytest.mark.parametrize("page_elements", [16, 40, 4096])
@pytest.mark.parametrize("num_rows", [1, 3, 12])
@pytest.mark.parametrize("kernel", sorted(LORA_KERNELS.keys() - TABLE_KERNELS))
def test_kernel_equals_dense_product_whatever_type_weights_have(kernel: str, page_elements: int, num_rows: int) -> None:
    torch.manual_seed(0)
    base = make_base(page_elements)
    storage = PageTensor(base.page, 1500, torch.device("cpu"))
    first, dense_first, page = load(base, storage, 0, {NAMES[0]: 5, NAMES[2]: 17}, "bfloat16")
    second, dense_second, page = load(base, storage, page, dict.fromkeys(NAMES, 3), "float32")
    third, dense_third, page = load(base, storage, page, {NAMES[1]: 9}, "float16")
    only_embedding, _, page = load(base, storage, page, {"embed": 2})
    assert page <= storage.num_pages
    batch = LoraBatch(
        (
            LoraSegment(first, 1, 1 + num_rows, 0, 1),
            LoraSegment(only_embedding, 13, 14, 1, 1),
            LoraSegment(second, 14, 15, 1, 2),
            LoraSegment(third, 15, 17, 2, 3),
        ),
    )
    x, out = torch.randn(18, IN), torch.randn(18, sum(SIZES))
    expected = out.clone()
    for rows, dense in (
        (slice(1, 1 + num_rows), dense_first),
        (slice(14, 15), dense_second),
        (slice(15, 17), dense_third),
    ):
        for module in base.modules[:3]:
            if module.name in dense:
                columns = slice(module.offset, module.offset + module.out_features)
                expected[rows, columns] += x[rows] @ dense[module.name]
    parts = batch.parts(GROUP)
    assert parts is not None
    LORA_KERNELS[kernel](x, out, parts)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-5)
