"""A module's output with its adapters: base product, LoRA, and an epilogue where an adapter has a column scale.

::

    no column scale in the step     out = x W^T + bias         += LoRA
    one or more                     out = x W^T                += LoRA      *= scale of row's adapter     += bias

Plain LoRA takes the first line: no launch and no memory for column scales.

The inputs of assisted rows leave for the CPU before the base product is launched, and their LoRA is added behind it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from manylora.execution.kernels.linear import linear
from manylora.execution.lora.assisted import AssistedReply
from manylora.execution.lora.batch import StepContext
from manylora.execution.lora.parts import GroupParts, Part

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
    reply = step.assist.send(group, x, is_sampled=is_sampled) if step.assist is not None else None
    if parts is None and reply is None:
        return linear(x, weight, bias)
    is_scaled = (parts is not None and parts.is_scaled) or (reply is not None and reply.is_scaled)
    out = linear(x, weight, None if is_scaled else bias)
    rows = out.view(-1, out.shape[-1])
    if parts is not None:
        if parts.wait is not None:
            parts.wait()
        step.kernel(x.reshape(-1, x.shape[-1]), rows, parts)
    if reply is not None:
        reply.add_to(rows)
    if is_scaled:
        apply_epilogue(rows, bias, parts, reply)
    return out


def apply_epilogue(
    out: torch.Tensor, bias: torch.Tensor | None, parts: GroupParts | None, reply: AssistedReply | None = None
) -> None:
    """Multiply each row by the column scale of its adapter, then add the bias to all rows.

    ``out`` ``[rows, out]`` is the base product with LoRA, changed in place.
    """
    if parts is not None and parts.tables is not None and parts.span is not None:
        parts.tables().scale(out, parts.span)
    elif parts is not None:
        scale_columns(out, parts.parts)
    if reply is not None:
        scale_columns(out, reply.parts)
    if bias is not None:
        out.add_(bias)


def scale_columns(out: torch.Tensor, parts: Iterable[Part]) -> None:
    """Multiply the rows of ``parts`` by their column scales, piece by piece; those may be in page-locked memory."""
    for part in parts:
        for module in part.weights.modules:
            for piece in module.column_scale:
                start = module.offset + piece.col
                columns = out[part.start : part.stop, start : start + piece.weight.shape[1]]
                columns.mul_(piece.weight.to(out.device, out.dtype, non_blocking=True))
