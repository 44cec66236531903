"""A module's output with its adapters: base product, LoRA, and an epilogue where an adapter has a column scale.

::

    no column scale in the step     out = x W^T + bias         += LoRA
    one or more                     out = x W^T                += LoRA      *= scale of row's adapter     += bias

Plain LoRA takes the first line: no launch and no memory for column scales.
"""

from __future__ import annotations

import torch

from manylora.execution.kernels.linear import linear
from manylora.execution.lora.batch import StepContext
from manylora.execution.lora.parts import GroupParts

__all__ = ["adapted_product", "apply_epilogue"]


def adapted_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    step: StepContext,
    group: str,
    *,
    is_sampled: bool = False,
) -> torch.Tensor:
    """Return ``x W^T + b`` with each row's adapter, for ``x`` ``[..., in]``, ``weight`` ``[out, in]``, packed or not.

    ``is_sampled`` means that ``x`` holds the sampled rows only.
    """
    lora = step.lora
    parts = lora.parts(group, is_sampled=is_sampled) if lora is not None else None
    if parts is None:
        return linear(x, weight, bias)
    out = linear(x, weight, None if parts.is_scaled else bias)
    rows = out.view(-1, out.shape[-1])
    if parts.wait is not None:
        parts.wait()
    step.kernel(x.reshape(-1, x.shape[-1]), rows, parts)
    if parts.is_scaled:
        apply_epilogue(rows, bias, parts)
    return out


def apply_epilogue(out: torch.Tensor, bias: torch.Tensor | None, parts: GroupParts) -> None:
    """Multiply each row by the column scale of its adapter, then add the bias to all rows.

    ``out`` ``[rows, out]`` is the base product with LoRA, changed in place.
    """
    if parts.tables is not None and parts.span is not None:
        parts.tables().scale(out, parts.span)
    else:
        for part in parts.parts:
            for module in part.weights.modules:
                for piece in module.column_scale:
                    start = module.offset + piece.col
                    columns = out[part.start : part.stop, start : start + piece.weight.shape[1]]
                    columns.mul_(piece.weight.to(out.dtype))
    if bias is not None:
        out.add_(bias)
