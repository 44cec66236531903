"""The table-driven LoRA families: ``ragged`` (every adapter at its own rank) and ``padded`` (all at the largest).

A batch with one adapter and many rows is a plain product, and goes to the library that is best at those.
"""

from __future__ import annotations

import torch

from manylora.execution.lora.grouped import apply_grouped
from manylora.execution.lora.parts import GroupParts

__all__ = ["apply_padded", "apply_ragged"]

MIN_PRODUCT_ROWS = 64
"""From here a batch of one adapter is a product for the library."""


def apply_ragged(x: torch.Tensor, out: torch.Tensor, parts: GroupParts) -> None:
    """Add ``(x A^T) B^T`` of every part into its rows of ``out``; see ``lora.LoraKernel``."""
    if len(parts.parts) == 1 and parts.parts[0].stop - parts.parts[0].start >= MIN_PRODUCT_ROWS:
        apply_grouped(x, out, parts)
        return
    assert parts.tables is not None and parts.span is not None, "the step was made without tables"
    parts.tables.ragged.apply(x, out, parts.span)


def apply_padded(x: torch.Tensor, out: torch.Tensor, parts: GroupParts) -> None:
    """Do the same with every row padded to the batch's largest rank, for comparison."""
    assert parts.tables is not None and parts.span is not None, "the step was made without tables"
    parts.tables.padded.apply(x, out, parts.span)
