"""Rows whose adapter is not on the device, as modules see them: inputs go out, and their LoRA comes back.

``execution/assist`` implements this on CPU workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from manylora.execution.lora.parts import Part

__all__ = ["Assist", "AssistedReply"]


class AssistedReply(Protocol):
    """The LoRA of one group's assisted rows, on its way.

    Args:
        parts: These rows and their weights, on the host.
        is_scaled: Whether any of the weights has a column scale.
    """

    parts: Sequence[Part]
    is_scaled: bool

    def add_to(self, out: torch.Tensor, scale: torch.Tensor | float | None = None) -> None:
        """Add the LoRA, times ``scale``, into its rows of ``out`` ``[rows, out]``, behind the device's work so far."""
        ...


class Assist(Protocol):
    """A step's assisted rows."""

    def send(self, group: str, x: torch.Tensor, *, is_sampled: bool = False) -> AssistedReply | None:
        """Send their inputs for a group; return the reply, or ``None`` if none of their adapters changes the group.

        The reply is to be added before the next inputs are sent. ``x`` ``[..., in]`` are the inputs of all rows of the
        step (with ``is_sampled``, of the sampled rows), or the token ids if the group is an embedding.
        """
        ...
