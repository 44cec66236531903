"""What the Triton tests share: a base with pages of any size, random adapters in them, and scratch full of NaN."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from manylora.core.adapters.layout import Tile, lay_out
from manylora.core.adapters.shape import BaseShape, ModuleKind, PageShape, TargetModule
from manylora.execution.lora.tables import LoraSpace
from manylora.execution.storage.page_tensor import PageTensor
from manylora.execution.storage.resident import ResidentAdapter, make_resident
from manylora.execution.storage.tile_tables import GroupDirectory, make_template

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
"""The kernels are compiled where there is a GPU, and interpreted elsewhere."""

HALVES = ["float16", "bfloat16"] if DEVICE.type == "cuda" else ["float16"]
"""Products of bfloat16 are wrong in the interpreter."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@dataclass
class Group:
    """A group to test with: ``{module: columns}`` behind one input."""

    in_features: int
    sizes: Mapping[str, int]


def make_base(groups: Mapping[str, Group], page_elements: int, dtype: str) -> BaseShape:
    modules = []
    for name, group in groups.items():
        offset = 0
        for module, size in group.sizes.items():
            modules.append(
                TargetModule(
                    name=f"{name}.{module}",
                    kind=ModuleKind.LINEAR,
                    in_features=group.in_features,
                    out_features=size,
                    layer=0,
                    group=name,
                    offset=offset,
                )
            )
            offset += size
    return BaseShape(
        name="toy",
        architecture="toy",
        fingerprint="toy",
        vocab_size=10,
        hidden_size=8,
        num_layers=1,
        max_model_len=64,
        page=PageShape(
            block_size=1,
            num_layers=1,
            num_kv_heads=1,
            head_dim=page_elements // 2,
            element_bytes=DTYPES[dtype].itemsize,
            dtype=dtype,
        ),
        modules=tuple(modules),
        all_linear=tuple(module.name for module in modules),
        eos_token_ids=(),
    )


@dataclass
class Pool:
    """Pages full of NaN, but where an adapter lies."""

    base: BaseShape
    storage: PageTensor
    space: LoraSpace
    free: list[int]

    @classmethod
    def make(cls, base: BaseShape, num_pages: int, rng: np.random.Generator) -> Pool:
        storage = PageTensor(base.page, num_pages, DEVICE)
        storage.flat.fill_(float("nan"))
        space = LoraSpace(GroupDirectory.of(base), storage.flat)
        return cls(base, storage, space, [int(page) for page in rng.permutation(num_pages)])

    def load(self, ranks: Mapping[str, int]) -> tuple[ResidentAdapter, dict[str, torch.Tensor]]:
        """Store a random adapter in scattered pages; return it and the dense ``A^T B^T`` of each module, float64."""
        layout = lay_out(ranks, self.base)
        pages = [self.free.pop() for _ in range(layout.num_pages)]
        dense = {}
        for group in layout.groups.values():
            a = self._put(pages, group.a, torch.randn(group.rank, group.in_features) / group.in_features**0.5)
            for module in group.modules:
                b = self._put(pages, module.b, torch.randn(module.rank, module.module.out_features) / module.rank**0.5)
                dense[module.module.name] = a[module.row : module.row + module.rank].t() @ b
        template = make_template(layout, self.space.directory)
        return make_resident(layout, pages, self.storage, template), dense

    def _put(self, pages: list[int], tiles: tuple[Tile, ...], matrix: torch.Tensor) -> torch.Tensor:
        """Store a matrix; return it as the pages hold it, float64."""
        matrix = matrix.to(self.storage.dtype)
        for tile in tiles:
            piece = matrix[tile.row : tile.row + tile.num_rows, tile.col : tile.col + tile.num_cols]
            first = tile.offset
            self.storage.flat[pages[tile.page], first : first + piece.numel()] = piece.reshape(-1).to(
                self.storage.flat.device
            )
        return matrix.double()


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill every fresh buffer with what must never be read."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        tensor: torch.Tensor = empty(*args, **kwargs)  # type: ignore[call-overload]
        return tensor.fill_(float("nan") if tensor.is_floating_point() else -(10**6))

    monkeypatch.setattr(torch, "empty", poisoned)
    yield


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of what is expected; NaN if any is."""
    found, expected = found.double().cpu(), expected.double().cpu()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))
