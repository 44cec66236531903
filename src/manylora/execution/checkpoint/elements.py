"""Methods that store a code as an element of a tensor, beside scales of blocks: fp8, fbgemm_fp8 and torchao.

::

    weight               [out, in]   int8 or float8
    scale                a number for each block of outputs and inputs, in rows of blocks
    zero point, if any   in the shape of the scale

Source: transformers (``FP8Linear``, ``FbgemmFp8Linear``); torchao (``Int8Tensor``, ``IntxUnpackedToInt8Tensor``,
``Float8Tensor``, whose attributes are in the files' metadata).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from manylora.core.errors import ConfigError
from manylora.execution.checkpoint.codes import MIDDLES, Codes, make_codes, spread
from manylora.execution.checkpoint.stored import FLOATS, Method, QuantisationConfig, StoredTensors

__all__ = ["ACTIVATION_SCALES", "FLOAT8", "Float8", "TorchAo", "from_integers", "read_blocks", "read_elements"]

FLOAT8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}  # kinds of numbers, by safetensors' names of the types

_DEFAULT_BLOCK = (128, 128)  # outputs and inputs of a block of transformers' ``fp8`` where the configuration gives none

ACTIVATION_SCALES = (
    *("input_scale", "input_zero_point", "output_scale", "output_zero_point", "activation_scale", "input_scale_ub"),
    *("q_scale", "k_scale", "v_scale"),
)
"""Tensors that say how to round activations or the KV cache; neither is rounded by a checkpoint's scales here."""


_TORCHAO = {"Int8Tensor": ("I8",), "IntxUnpackedToInt8Tensor": ("I8",), "Float8Tensor": tuple(FLOAT8)}
"""Types of torchao's tensors, and of their codes."""


def read_elements(
    stored: StoredTensors,
    codes: str,
    scale: str,
    shape: tuple[int, int],
    block: tuple[int, int],
    *,
    dtypes: Collection[str],
    zero: str = "",
    bits: int = 8,
) -> Codes:
    """Return a weight whose codes are elements of the tensor ``codes``, of one of ``dtypes`` (safetensors' names).

    ``shape`` is outputs and inputs, ``block`` those that share a scale. ``zero`` names zero points, if there may be
    some; an integer has ``bits``, 4 or 8. ``ConfigError`` if a tensor is missing, or of another type or shape, or an
    integer has more bits.
    """
    elements = stored.read(codes, dtypes, shape)
    scales = read_blocks(stored, scale, (*FLOATS, "F8_E8M0"), shape, block)
    zeros = read_blocks(stored, zero, ("I8", *FLOATS, *FLOAT8), shape, block) if zero in stored else None
    if elements.dtype is not torch.int8:
        numbers = FLOAT8[stored.files.dtypes[codes]]
        return make_codes(numbers, elements.view(torch.uint8), scales, block[1], zeros)
    if (numbered := from_integers(elements, bits)) is None:
        raise stored.refuse(codes, f"of integers of more than {bits} bits")
    return make_codes(f"int{bits}", numbered, scales, block[1], zeros)


def read_blocks(
    stored: StoredTensors, name: str, dtypes: Collection[str], shape: tuple[int, int], block: tuple[int, int]
) -> torch.Tensor:
    """Return numbers of blocks as numbers of each output, ``[out, ceil(in / block[1])]``; of 8 bits, as float32."""
    numbers = stored.read(name, dtypes)
    spread_out = spread(numbers.float() if numbers.itemsize == 1 else numbers, shape, block)
    if spread_out is None:
        raise stored.refuse(
            name,
            f"of shape {list(numbers.shape)}, expected a number for each block of {list(block)} of a weight of shape "
            f"{list(shape)}",
        )
    return spread_out


def from_integers(integers: torch.Tensor, bits: int) -> torch.Tensor | None:
    """Return the codes of int8 numbers, uint8; ``None`` if one of them has more bits."""
    middle = MIDDLES[f"int{bits}"]
    if bits == 8:
        return integers.view(torch.uint8) ^ middle
    if ((integers < -middle) | (integers >= middle)).any():
        return None
    return (integers + middle).view(torch.uint8)


class Float8(Method):
    """transformers' ``fp8``, a scale for each block or for the weight; ``fbgemm_fp8``, a scale for each output."""

    marks = ("weight_scale_inv", "weight_scale")
    unused = ACTIVATION_SCALES
    unlisted = ("modules_to_not_convert", "ignored_layers")

    def __init__(self, settings: QuantisationConfig, stored: StoredTensors) -> None:
        super().__init__(settings, stored)
        self._also = settings.names("modules_to_convert")
        settings.get("expert_dtype", among=("fp8",))
        block = settings.sizes("weight_block_size") or (0, 0)
        self._block = (1, 0) if settings.get("quant_method") == "fbgemm_fp8" else block  # 0: all of them
        self.format = settings.get("quant_method") + (f" {block[0]}x{block[1]}" if block[0] else "")

    def announces(self, name: str, module: nn.Module) -> bool | None:
        """Return whether the configuration announces codes for a module."""
        return super().announces(name, module) or self.settings.lists(self._also, name)

    def read(self, stored: StoredTensors, name: str, module: nn.Module, shape: tuple[int, int]) -> Codes:
        """Return the weight of a module as codes."""
        scale = next((scale for mark in self.marks if (scale := f"{name}.{mark}") in stored), f"{name}.weight_scale")
        rows, columns = self._block
        if rows == 0 and scale in stored and math.prod(stored.shape(scale)) > 1:
            rows, columns = _DEFAULT_BLOCK
        block = (rows or shape[0], columns or shape[1])
        return read_elements(stored, f"{name}.weight", scale, shape, block, dtypes=FLOAT8)


class TorchAo(Method):
    """torchao's tensors of one code an element; packed ones, which need a GPU, are refused."""

    marks = ("_weight_qdata", "_weight_scale", "_weight_zero_point")
    parts = ()

    def __init__(self, settings: QuantisationConfig, stored: StoredTensors) -> None:
        super().__init__(settings, stored)
        texts = {name: text for name, text in stored.metadata().items() if name.endswith(".weight")}
        entries = {name.removesuffix(".weight"): _parse(stored.got, name, text) for name, text in texts.items()}
        self._entries = {name: entry for name, entry in entries.items() if entry["_type"] != "Tensor"}
        self.format = f"torchao {' '.join(sorted({entry['_type'] for entry in self._entries.values()}))}"

    def announces(self, name: str, module: nn.Module) -> bool | None:
        """Return whether the files' metadata announces codes for a module."""
        return name in self._entries

    def read(self, stored: StoredTensors, name: str, module: nn.Module, shape: tuple[int, int]) -> Codes:
        """Return the weight of a module as codes."""
        entry = self._entries[name]
        rows, columns = entry["_data"]["block_size"]
        return read_elements(
            stored,
            f"{name}._weight_qdata",
            f"{name}._weight_scale",
            shape,
            (min(rows, shape[0]), min(columns, shape[1])),
            dtypes=_TORCHAO[entry["_type"]],
            zero=f"{name}._weight_zero_point",
            bits=4 if entry["_data"].get("target_dtype", {}).get("_data") == "int4" else 8,
        )


def _parse(got: str, name: str, text: str) -> dict[str, Any]:
    """Return torchao's metadata of a tensor of a known type, with the sizes of its blocks."""
    try:
        entry: dict[str, Any] = json.loads(text)
        if entry["_type"] == "Tensor":
            return entry
        sizes, target = entry["_data"]["block_size"], entry["_data"].get("target_dtype", {})
        is_valid = len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes)
        is_valid = is_valid and target.get("_data", "int8") in ("int8", "int4")
        is_valid = is_valid and entry["_type"] in _TORCHAO
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_valid = False
    if is_valid:
        return entry
    expected = f"{', '.join(_TORCHAO)} or Tensor, with a block_size and a target_dtype of int8 or int4"
    raise ConfigError(f"{got}: tensor {name!r} has metadata {text[:160]!r}, expected {expected}")
