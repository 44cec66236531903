"""The table-driven LoRA kernel: all adapters of a step at once, each at its own rank.

A batch with one adapter and many rows is a plain product, and goes to the library that is best at those.
"""

from __future__ import annotations

import torch

from manylora.execution.lora.grouped import apply_grouped
from manylora.execution.lora.parts import GroupParts

__all__ = ["apply_ragged"]

MIN_PRODUCT_ROWS = 64
"""From here a batch of one adapter is a product for the library."""


def apply_ragged(x: torch.Tensor, out: torch.Tensor, parts: GroupParts) -> None:
    """Add ``(x A^T) B^T`` of every part into its rows of ``out``; see ``lora.LoraKernel``."""
    if len(parts.parts) == 1 and parts.parts[0].stop - parts.parts[0].start >= MIN_PRODUCT_ROWS:
        apply_grouped(x, out, parts)
        return
    assert parts.tables is not None and parts.span is not None, "the step was made without tables"
    parts.tables.step.apply(x, out, parts.span)
