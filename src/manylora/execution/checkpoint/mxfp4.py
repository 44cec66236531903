"""mxfp4: experts of gpt-oss in floats of 4 bits, which are widened to the model's type while a weight is read.

::

    experts.gate_up_proj_blocks  [experts, out, in / 32, 16]   uint8: two codes (E2M1), the first in the low bits
    experts.gate_up_proj_scales  [experts, out, in / 32]       uint8: 127 more than the power of 2 of a group's scale
    experts.gate_up_proj         [experts, in, out]            the model's parameter, which is transposed

All numbers have few enough bits for 16. Biases, routers and attention are stored in 16 bits beside them.

Source: OCP Microscaling Formats (MX) 1.0, section 5; transformers (``Mxfp4Dequantize``) for the layout.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter

__all__ = ["mxfp4_converters"]

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of a scale's exponent
_GROUP_BYTES = 16  # of the 32 codes that share a scale


def mxfp4_converters() -> list[WeightConverter]:
    """Return the conversions of the experts' blocks and scales."""
    names = ("experts.gate_up_proj", "experts.down_proj")
    return [WeightConverter([f"{name}_blocks", f"{name}_scales"], name, [_Widen()]) for name in names]


class _Widen(ConversionOps):  # type: ignore[misc]
    """Blocks and scales to numbers."""

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        *,
        model: Any = None,
        full_layer_name: str = "",
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the parameter of that name, of the type that it has in the model."""
        if missing := [pattern for pattern in source_patterns if pattern not in input_dict]:
            raise ValueError(f"{missing[0]} is missing")
        (blocks,), (scales,) = (input_dict[pattern] for pattern in source_patterns)
        for name, octets in (("blocks", blocks), ("scales", scales)):
            if octets.dtype is not torch.uint8:
                raise ValueError(f"{name} of another type than U8")
        if blocks.ndim != 4 or blocks.shape[3] != _GROUP_BYTES or scales.shape != blocks.shape[:3]:
            raise ValueError(
                f"blocks of shape {list(blocks.shape)} and scales of shape {list(scales.shape)}, expected "
                f"[experts, outputs, groups, {_GROUP_BYTES}] and [experts, outputs, groups]"
            )
        num_experts, num_out, num_groups = scales.shape
        expected = model.get_parameter(full_layer_name)
        made = [num_experts, num_groups * 2 * _GROUP_BYTES, num_out]
        if list(expected.shape) != made:  # before work that a header alone could make endless
            raise ValueError(f"{full_layer_name!r} of shape {made}, expected {list(expected.shape)} by config.json")
        return {full_layer_name: _widen(blocks, scales, expected.dtype)}


def _widen(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers, ``[experts, in, out]``; beside them, those of one expert in float32 take memory."""
    num_experts, num_out, num_groups, _ = blocks.shape
    octets = torch.arange(256)
    numbers = torch.tensor([*_MAGNITUDES, *(-one for one in _MAGNITUDES)])
    pairs = torch.stack((numbers[octets & 15], numbers[octets >> 4]), dim=1).to(blocks.device)
    steps = torch.ldexp(torch.ones(256), octets - _BIAS).to(blocks.device)
    widened = torch.empty(num_experts, num_groups * 2 * _GROUP_BYTES, num_out, dtype=dtype, device=blocks.device)
    for expert, own in enumerate(widened):
        found = pairs.index_select(0, blocks[expert].flatten().int()).view(num_out, num_groups, 2 * _GROUP_BYTES)
        found *= steps[scales[expert].int()].unsqueeze(2)
        own.copy_(found.flatten(1).t())
    return widened
