"""The numbers in which the base's weights are kept, and the rounding of a checkpoint's weights to them.

A weight comes as it is stored: as numbers, or as codes of a quantised checkpoint. It is kept

* on a GPU, as codes if it is stored so or ``base_dtype`` is ``int8`` or ``int4``, else as numbers of the model's type;
* on a CPU with compiled kernels, as ``base_dtype`` says: ``auto`` keeps what is stored, in 32, 16, 8 or 4 bits;
* on a CPU without them, as float32.

Own rounding is symmetric: 8 bits have a step for every ``GROUP_8`` inputs of an output, 4 bits for every ``GROUP_4``.
The output head keeps 8 bits where others have 4: its errors go straight into the logits, and it is one of hundreds.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from manylora.core.config import ModelConfig
from manylora.core.errors import ConfigError
from manylora.execution.checkpoint.codes import Codes
from manylora.execution.device import dtype_name
from manylora.execution.kernels.cpu.forms import HALF_BLOCK, NarrowForm
from manylora.execution.kernels.cpu.support import find_compiled
from manylora.execution.kernels.narrow import write_narrow
from manylora.execution.kernels.row_weight import RowForm, write_rows
from manylora.execution.kernels.triton.support import find_triton

__all__ = ["Kept", "Precision", "Stored"]

logger = logging.getLogger(__name__)

GROUP_8 = 128
GROUP_4 = 32

Stored: TypeAlias = torch.Tensor | Codes  # a weight as a checkpoint holds it

Kept: TypeAlias = torch.Tensor | tuple[NarrowForm | RowForm, NDArray[np.uint8]]
"""A weight as it is kept: numbers, or a form and bytes."""

_SIXTEEN = (torch.bfloat16, torch.float16)

_LEAST_HALF, _MOST_HALF = 2.0**-14, 65504.0  # magnitudes that float16 holds to 11 bits


@dataclass(frozen=True, slots=True)
class Precision:
    """How weights are kept."""

    dtype: torch.dtype  # type of the model's numbers: float32 on a CPU
    base: str  # ``stored``, ``float32``, ``bfloat16``, ``float16``, ``int8`` or ``int4``
    is_rounded: bool  # whether activations are rounded to 8 bits beside integers
    is_by_row: bool = False  # whether codes are kept for kernels of a GPU, and all else as numbers of ``dtype``

    @classmethod
    def choose(cls, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Precision:
        """Return the precision that the options ask for, as far as this machine has kernels for it.

        ``ConfigError`` if they ask for numbers that no kernel here multiplies.
        """
        wanted, activations = config.base_dtype, config.activation_dtype
        kernels = find_compiled() if device.type == "cpu" and dtype is torch.float32 else None
        if kernels is None:
            is_refused = device.type == "cpu" and wanted not in ("auto", "float32")
            if is_refused or activations == "int8":
                raise ConfigError(
                    f"Got base_dtype = {wanted!r} and activation_dtype = {activations!r}, which need a CPU, float32 "
                    "activations and numba (pip install 'manylora[cpu]')"
                )
            is_coded = device.type != "cpu" and _has_codes_on_gpu(wanted, dtype, device)
            base = "float32" if not is_coded else "stored" if wanted == "auto" else wanted
            return cls(dtype, base, is_rounded=False, is_by_row=is_coded)
        is_rounded = activations == "int8" or (activations == "auto" and kernels.has_integer_dots)
        return cls(dtype, "stored" if wanted == "auto" else wanted, is_rounded)

    def keep_table(self, stored: Stored) -> Kept:
        """Return an embedding as it is kept: in 16 bits where it is stored in fewer than 32, or others are kept so."""
        is_wide = isinstance(stored, torch.Tensor) and stored.dtype not in _SIXTEEN  # in 32 bits or more
        if self.is_by_row or self.base == "float32" or (self.base == "stored" and is_wide):
            return self.keep_numbers(stored)
        weight = self.keep_numbers(stored) if isinstance(stored, Codes) else stored
        if self.base in ("bfloat16", "float16"):
            return weight.to(getattr(torch, self.base))
        return weight if weight.dtype in _SIXTEEN else weight.to(torch.bfloat16)

    def keep_linear(self, parts: Sequence[Stored], *, is_head: bool = False) -> list[Kept]:
        """Return the weight of linears that share an input, one behind the other: as one weight if they can be one."""
        base = "int8" if is_head and self.base == "int4" else self.base
        weights = [self._rounded(part, base) for part in parts]
        if len({_kind(weight) for weight in weights}) == 1 and getattr(weights[0], "order", None) is None:
            weights = [_joined(weights)]
        return [self._written(weight) for weight in weights]

    def keep_numbers(self, stored: Stored) -> torch.Tensor:
        """Return a weight as numbers of the model's type: what is no matrix of a product (norms, biases) is kept so."""
        weight = stored.dequantise() if isinstance(stored, Codes) else stored
        return weight.to(self.dtype) if weight.is_floating_point() else weight

    def _rounded(self, stored: Stored, base: str) -> Stored:
        """Return one weight in the numbers of ``base``."""
        if isinstance(stored, Codes) and base in ("stored", stored.numbers):
            if stored.group >= stored.codes.shape[1] or stored.group % HALF_BLOCK == 0:
                # Shifts take the type of scales. They may be a hundred steps, of which bfloat16 holds no quarter.
                is_coarse = stored.shifts is not None and stored.scales.dtype is torch.bfloat16
                scales = stored.scales.float() if is_coarse else stored.scales
                return replace(stored, scales=_halved(scales, stored.group))
            logger.warning("weight_widened group=%d reason=no kernel reads groups of this size", stored.group)
            base = "float32"
        weight = stored.dequantise() if isinstance(stored, Codes) else stored
        if base in ("int8", "int4"):
            return round_to_codes(weight, base)
        return weight if base == "stored" else weight.to(getattr(torch, base))

    def _written(self, weight: Stored) -> Kept:
        if isinstance(weight, torch.Tensor):
            if weight.dtype in _SIXTEEN and not self.is_by_row:
                return write_narrow(dtype_name(weight.dtype), weight.contiguous())
            return weight.to(self.dtype)
        parts: dict[str, Any] = {name: getattr(weight, name) for name in ("scales", "shifts", "table", "order")}
        if self.is_by_row:
            return write_rows(weight.numbers, weight.codes, group=weight.group, **parts, dtype=self.dtype)
        is_rounded = self.is_rounded and weight.numbers in ("int8", "int4")
        codes = weight.codes.contiguous()
        return write_narrow(weight.numbers, codes, group=weight.group, **parts, is_rounded=is_rounded)


def _has_codes_on_gpu(wanted: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether weights may be kept as codes on a GPU.

    Raises:
        ConfigError: ``wanted`` names codes that no kernel here multiplies, or numbers of another type than activations.
    """
    name = dtype_name(dtype)
    if wanted not in ("auto", "int8", "int4"):
        if wanted != name:
            raise ConfigError(
                f"Got base_dtype = {wanted!r}, but on a GPU weights are kept in 8 or 4 bits, or in the type of "
                f"activations, which is {name} (dtype)"
            )
        return False
    reason = find_triton(device)
    if reason is None and wanted != "auto" and find_spec("numba") is None:
        reason = "weights are rounded by numba, which is not installed"
    if reason is not None and wanted != "auto":
        raise ConfigError(f"Got base_dtype = {wanted!r}, which cannot be served here: {reason}")
    return reason is None


def round_to_codes(weight: torch.Tensor, numbers: str) -> Codes:
    """Return ``weight`` ``[out, in]``, of any floating point, as ``int8`` or ``int4``."""
    from manylora.execution.kernels.cpu.packing import find_peaks, find_steps, round_weights

    is_8, (num_out, num_in) = numbers == "int8", weight.shape
    group = min(GROUP_8 if is_8 else GROUP_4, num_in)
    if weight.dtype in _SIXTEEN:
        bits = weight.contiguous().view(torch.int16).numpy()
        bits = bits.view(np.uint16) if weight.dtype is torch.bfloat16 else bits
    else:
        bits = weight.float().contiguous().numpy()
    steps = np.empty((num_out, -(-num_in // group)), np.float32)
    if is_8:
        find_peaks(bits, group, steps)
        steps /= np.float32(127.0)
    else:
        find_steps(bits, group, steps)
    scales = _halved(torch.from_numpy(steps), group)
    codes = torch.empty(num_out, num_in, dtype=torch.uint8)
    round_weights(bits, group, scales.float().numpy(), 128 if is_8 else 8, codes.numpy())
    return Codes(numbers=numbers, codes=codes, group=group, scales=scales)


def _halved(scales: torch.Tensor, group: int) -> torch.Tensor:
    """Return float32 scales of small groups as float16, if it holds each of them to 11 bits."""
    if scales.dtype is not torch.float32 or group > GROUP_8:
        return scales
    magnitudes = scales.abs()
    is_held = ((magnitudes >= _LEAST_HALF) & (magnitudes <= _MOST_HALF)) | (magnitudes == 0.0)
    return scales.half() if bool(is_held.all()) else scales


def _kind(weight: Stored) -> tuple[object, ...]:
    """Return what weights must have in common to be one weight."""
    if isinstance(weight, torch.Tensor):
        return (weight.dtype,)
    table = None if weight.table is None else tuple(weight.table.tolist())
    return weight.numbers, weight.group, weight.scales.dtype, weight.shifts is None, table, weight.order is None


def _joined(weights: Sequence[Stored]) -> Stored:
    """Return weights of one kind as one, their outputs one behind the other."""
    if len(weights) == 1:
        return weights[0]
    numbers = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    if numbers:
        return torch.cat(numbers)
    codes = [weight for weight in weights if isinstance(weight, Codes)]
    shifts = [weight.shifts for weight in codes if weight.shifts is not None]
    return replace(
        codes[0],
        codes=torch.cat([weight.codes for weight in codes]),
        scales=torch.cat([weight.scales for weight in codes]),
        shifts=torch.cat(shifts) if shifts else None,
    )
