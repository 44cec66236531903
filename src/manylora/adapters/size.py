"""How large an adapter is, from the model's real shapes and by the formula that is usually quoted.

The usual formula takes every projection as square. With grouped-query attention K and V are much narrower than
the model, with a gated MLP three projections are much wider, so it is too large for the one and too small for
the other: a pool sized by it holds the wrong number of adapters.

Source: "Per-Adapter Memory Footprint", multi-LoRA serving article; ours sums ``rank * (in + out)`` instead.
"""

from __future__ import annotations

from collections.abc import Collection

from manylora.adapters.shape import BaseShape

__all__ = ["adapter_bytes", "square_adapter_bytes"]


def adapter_bytes(base: BaseShape, rank: int, targets: Collection[str] | None = None) -> int:
    """Return the bytes an adapter's weights take at the base's precision.

    Args:
        base: The base model.
        rank: Rank of every module.
        targets: Last names of the adapted modules (``q_proj``); ``None`` means ``all-linear``.
    """
    chosen = [
        m
        for m in base.modules
        if (m.name in base.all_linear if targets is None else m.name.rpartition(".")[2] in targets)
    ]
    return sum(rank * (m.in_features + m.out_features) for m in chosen) * base.page.element_bytes


def square_adapter_bytes(base: BaseShape, rank: int, num_targets: int) -> int:
    """Return layers x targets x 2 x rank x hidden size x bytes per element: the usual formula.

    Args:
        base: The base model.
        rank: Rank of every module.
        num_targets: Adapted modules per layer.
    """
    return base.num_layers * num_targets * 2 * rank * base.hidden_size * base.page.element_bytes
