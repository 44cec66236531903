"""Kernels are timed over all groups of a model, and against the bytes that they read."""

from __future__ import annotations

from manylora.lab.bench.kernels import TABLELESS, kernel_table, measure_kernels
from manylora.lab.catalog.dims import ModelDims
from manylora.lab.catalog.models import base_shape


def test_every_kernel_is_timed_beside_the_floor() -> None:
    base = base_shape(
        ModelDims(
            name="toy",
            hidden_size=64,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            head_dim=32,
            intermediate_size=96,
            vocab_size=50,
            max_model_len=64,
            dtype="float32",
        )
    )
    result = measure_kernels(base, num_adapters=3, ranks=(4, 20), rounds=2)
    linears = [module for module in base.modules if module.name in base.all_linear]
    elements = sum(rank * (one.in_features + one.out_features) for rank in (4, 20, 4) for one in linears)
    assert result.num_bytes == 4 * elements
    assert {cost.kernel for cost in result.costs} == set(TABLELESS)
    assert all(cost.step_s > 0 and cost.floor_share.median > 0 for cost in result.costs)
    assert "reference" in kernel_table(result, "toy").markdown()
