"""Factors and shifts: what an adapter does to numbers one by one, behind a product with LoRA or without any.

A step in which no adapter has them for a group launches nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from manylora.core.adapters.shape import TargetModule
from manylora.execution.lora.batch import StepContext
from manylora.execution.lora.kernels import compiled_for, group_tables
from manylora.execution.lora.parts import AssistedReply, GroupParts, Part

__all__ = ["AdaptedNumbers", "apply_epilogue", "apply_vectors"]


def apply_epilogue(
    out: torch.Tensor, bias: torch.Tensor | None, parts: GroupParts | None, reply: AssistedReply | None
) -> None:
    """Multiply each row by its adapter's factor and add its shift, then add the bias to all rows.

    ``out`` ``[rows, out]`` is the base product with LoRA, changed in place.
    """
    if parts is not None and parts.has_vectors:
        apply_vectors(out, parts)
    if reply is not None:
        _apply_pieces(out, reply.parts)
    if bias is not None:
        out.add_(bias)


def apply_vectors(out: torch.Tensor, parts: GroupParts) -> None:
    """Multiply rows of ``out`` ``[rows, out]`` by their adapters' factors and add their shifts, in place."""
    if parts.tables is not None and parts.span is not None:
        parts.tables().apply_vectors(out, parts.span)
    elif (kernels := compiled_for(out)) is not None and out.is_contiguous():
        kernels.apply_vectors(out, group_tables(kernels, parts))
    else:
        _apply_pieces(out, parts.parts)


def _apply_pieces(out: torch.Tensor, parts: Iterable[Part]) -> None:
    """Do so piece by piece, with vectors that may be in page-locked memory."""
    for part in parts:
        rows = out[part.start : part.stop]
        for module in part.weights.modules:
            for pieces, act in ((module.factor, torch.Tensor.mul_), (module.shift, torch.Tensor.add_)):
                for piece in pieces:
                    start = module.offset + piece.col
                    columns = rows[:, start : start + piece.weight.shape[1]]
                    act(columns, piece.weight.to(out.device, non_blocking=True))


class AdaptedNumbers:
    """Numbers of a step's tokens that adapters may multiply and shift, one by one: a group without products."""

    def __init__(self, module: TargetModule, step: StepContext) -> None:
        self._group, self._width, self._axis = module.group, module.out_features, module.token_axis
        self._step = step

    @property
    def is_used(self) -> bool:
        """Whether an adapter of the step may change these numbers."""
        return self._step.assist is not None or self._parts() is not None

    def apply(self, x: torch.Tensor, *, is_shared: bool = False) -> torch.Tensor:
        """Return ``x`` with the factor and the shift of each row's adapter, in place unless ``x`` is shared."""
        parts, assist = self._parts(), self._step.assist
        reply = assist.send(self._group, x) if assist is not None else None
        if parts is None and reply is None:
            return x
        x = (x.clone() if is_shared else x).transpose(1, self._axis)
        rows = x.reshape(-1, self._width)
        if parts is not None and parts.wait is not None:
            parts.wait()
        if reply is not None:
            reply.add_to(rows)
        apply_epilogue(rows, None, parts, reply)
        return rows.view(x.shape).transpose(1, self._axis)

    def _parts(self) -> GroupParts | None:
        lora = self._step.lora
        parts = lora.parts(self._group) if lora is not None else None
        return parts if parts is not None and parts.has_vectors else None  # a graph of all groups has none
