"""bitsandbytes: 8 bits with a scale for each output, or 4 bits by a table with a scale for each block of codes.

::

    8 bits   weight [out, in] int8;  SCB [out]: the largest magnitude of each output
    4 bits   weight [out * in / 2, 1] uint8, the first of two codes in the high bits; blocks run on over outputs
             weight.quant_map [16];  weight.absmax [blocks] float32, or uint8 codes of a second table:
             absmax = nested_quant_map[code] * nested_absmax[block // nested_blocksize] + nested_offset
             weight.quant_state.bitsandbytes__nf4: the numbers of this, as JSON in bytes

Source: bitsandbytes (``functional.QuantState``, ``int8_vectorwise_dequant``).
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import nn

from manylora.execution.checkpoint.codes import Codes, make_codes, unpack_nibbles
from manylora.execution.checkpoint.elements import from_integers
from manylora.execution.checkpoint.stored import Method, QuantisationConfig, StoredTensors

__all__ = ["BitsAndBytes"]

_STATE = "weight.quant_state.bitsandbytes__"
MOST_STATE_BYTES = 1 << 16


class BitsAndBytes(Method):
    """Weights that bitsandbytes rounded."""

    unlisted = ("llm_int8_skip_modules",)

    def __init__(self, settings: QuantisationConfig, stored: StoredTensors) -> None:
        super().__init__(settings, stored)
        is_4_bit = settings.get("load_in_4bit", False, kind=bool)
        if is_4_bit == settings.get("load_in_8bit", False, kind=bool):
            raise settings.refuse("load_in_4bit", "true, or load_in_8bit, but not both")
        self._kind = settings.get("bnb_4bit_quant_type", "fp4", among=("nf4", "fp4")) if is_4_bit else "int8"
        self.format = f"bitsandbytes {self._kind}"
        nested = ("weight.nested_absmax", "weight.nested_quant_map")
        four = ("weight.absmax", "weight.quant_map", f"{_STATE}{self._kind}", *nested)
        self.marks = four if is_4_bit else ("SCB", "weight_format")

    def read(self, stored: StoredTensors, name: str, module: nn.Module, shape: tuple[int, int]) -> Codes:
        """Return the weight of a module as codes."""
        return (self._read_8 if self._kind == "int8" else self._read_4)(stored, name, shape)

    def _read_8(self, stored: StoredTensors, name: str, shape: tuple[int, int]) -> Codes:
        form = f"{name}.weight_format"
        if form in stored and (found := int(stored.read(form, ("U8",)).flatten()[0])) != 0:
            raise stored.refuse(form, f"of {found}, expected 0 (rows)")
        codes = from_integers(stored.read(f"{name}.weight", ("I8",), shape), 8)
        assert codes is not None
        scales = stored.read(f"{name}.SCB", ("F32",), shape[:1]) / 127
        return make_codes("int8", codes, scales.unsqueeze(1), shape[1])

    def _read_4(self, stored: StoredTensors, name: str, shape: tuple[int, int]) -> Codes:
        num_out, num_in = shape
        weight = f"{name}.weight"
        state = self._read_state(stored, f"{name}.{_STATE}{self._kind}", shape)
        packed = stored.read(weight, ("U8", "BF16", "F16", "F32"))
        if packed.nbytes != math.ceil(num_out * num_in / 2):
            raise stored.refuse(weight, f"of {packed.nbytes} bytes, expected {num_out} * {num_in} / 2")
        octets = packed.reshape(-1).view(torch.uint8)
        codes = unpack_nibbles((octets << 4) | (octets >> 4))[: num_out * num_in].reshape(num_out, num_in)
        block = state["blocksize"]
        maxima = self._read_maxima(stored, weight, math.ceil(num_out * num_in / block), state)
        # Blocks run on over outputs: columns that share a scale in every output are those of the common divisor.
        group = math.gcd(block, num_in)
        first = torch.arange(num_out).unsqueeze(1) * num_in + torch.arange(0, num_in, group)
        return Codes(
            numbers="table4",
            codes=codes,
            group=group,
            scales=maxima[first // block],
            table=stored.read(f"{weight}.quant_map", ("F32",), (16,)),
        )

    def _read_maxima(self, stored: StoredTensors, name: str, blocks: int, state: dict[str, Any]) -> torch.Tensor:
        """Return the largest magnitude of each block, ``[blocks]``, float32."""
        if f"{name}.nested_absmax" not in stored:
            return stored.read(f"{name}.absmax", ("F32",), (blocks,))
        codes = stored.read(f"{name}.absmax", ("U8",), (blocks,)).long()
        table = stored.read(f"{name}.nested_quant_map", ("F32",), (256,))
        nested = state["nested_blocksize"]
        outer = stored.read(f"{name}.nested_absmax", ("F32",), (math.ceil(blocks / nested),))
        return table[codes] * outer[torch.arange(blocks) // nested] + float(state["nested_offset"])

    def _read_state(self, stored: StoredTensors, name: str, shape: tuple[int, int]) -> dict[str, Any]:
        """Return the numbers of a weight, with positive sizes of blocks."""
        octets = stored.read(name, ("U8",))
        try:
            state: dict[str, Any] = json.loads(bytes(octets[:MOST_STATE_BYTES].tolist()))
            is_valid = state["quant_type"] == self._kind and tuple(state["shape"]) == shape
            sizes = [state["blocksize"], state.get("nested_blocksize", 1)]
            is_valid = is_valid and all(type(size) is int and size > 0 for size in sizes)
            float(state.get("nested_offset", 0.0))
        except (ValueError, KeyError, TypeError, RecursionError, IndexError):
            is_valid = False
        if not is_valid:
            raise stored.refuse(name, f"which is no state of {self._kind} for a weight of shape {list(shape)}")
        return state
