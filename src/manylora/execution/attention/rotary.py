"""Rotary embeddings (RoPE) that the attention kernels apply.

Transformers rotates queries and keys in ten small operations before it calls attention. Kernels that read q and k can
rotate them as well, given the angles. An unrotated tensor carries its angles::

    q, k  ->  fusion.rotation    ->  Unrotated(q), Unrotated(k)  ->  AttentionCall.rotation  ->  kernels

Any operation on such a tensor returns a plain one. So a model that changes q after rotating it is detected: its
attention gets a query without a rotation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

__all__ = ["Rotation", "Unrotated", "rotate"]


@dataclass(frozen=True, slots=True)
class Rotation:
    """Angles of every row: dimension ``d`` is rotated with ``d + rotary_dim / 2``; later dimensions stay.

    Args:
        cos: ``[rows, rotary_dim]``, contiguous in the last dimension; so is ``sin``.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    @property
    def rotary_dim(self) -> int:
        """The number of dimensions that are rotated."""
        return self.cos.shape[1]


class Unrotated(torch.Tensor):
    """A query or key that is not rotated yet."""

    rotation: Rotation

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, x: torch.Tensor, rotation: Rotation) -> Self:
        """Return ``x`` itself, with the rotation that is still to be applied."""
        unrotated = x.as_subclass(cls)
        unrotated.rotation = rotation
        return unrotated


def rotate(x: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
    """Return ``x`` ``[heads, rows, head_dim]`` rotated; the reference of the kernels."""
    if rotation is None:
        return x
    turning = x[..., : rotation.rotary_dim].float()
    first, second = turning.chunk(2, dim=-1)
    turned = turning * rotation.cos.float() + torch.cat((-second, first), dim=-1) * rotation.sin.float()
    return torch.cat((turned.to(x.dtype), x[..., rotation.rotary_dim :]), dim=-1)
