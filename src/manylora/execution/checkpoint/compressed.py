"""compressed-tensors: groups of modules, each with a scheme of how its weights are stored.

::

    int-quantized, float-quantized,   weight [out, in];  weight_scale and weight_zero_point of a weight, an output,
    naive-quantized                   a group of inputs, or a block
    pack-quantized                    weight_packed [out, in / 8] int32, the first code in the lowest bits;
                                      weight_zero_point [out / 8, groups], packed along outputs;
                                      weight_shape [2];  weight_g_idx [in]: the group of each input

Source: compressed-tensors (``compressors``, ``utils.match``, ``quantization.lifecycle.apply``).
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from torch import nn

from manylora.execution.checkpoint.codes import MIDDLES, Codes, make_codes, unpack_words
from manylora.execution.checkpoint.elements import ACTIVATION_SCALES, FLOAT8, read_blocks, read_elements
from manylora.execution.checkpoint.grouped import sort_groups
from manylora.execution.checkpoint.stored import FLOATS, Method, QuantisationConfig, StoredTensors

__all__ = ["CompressedTensors"]

logger = logging.getLogger(__name__)

_FORMATS = {
    "pack-quantized": {("int", 4), ("int", 8)},
    "int-quantized": {("int", 4), ("int", 8)},
    "float-quantized": {("float", 8)},
    "naive-quantized": {("int", 4), ("int", 8), ("float", 8)},
}
"""Kinds of numbers and their bits, by the format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scheme:
    """How the weights of a group of modules are stored."""

    form: str
    kind: str  # ``int`` or ``float``
    bits: int  # bits of a code
    block: tuple[int, int]  # outputs and inputs that share a scale; 0 for all of them
    is_sorted: bool  # whether groups are of consecutive inputs

    @property
    def word(self) -> str:
        """Name of the numbers and their groups, for logs."""
        rows, columns = self.block
        grain = {(0, 0): "tensor", (1, 0): "channel"}.get(
            self.block, f"g{columns}" if rows == 1 else f"{rows}x{columns}"
        )
        return f"{self.kind}{self.bits} {grain}"


class CompressedTensors(Method):
    """Weights that compressed-tensors stored, in any of the formats above, one for each group of modules."""

    marks = ("weight_scale", "weight_packed", "weight_zero_point", "weight_shape", "weight_g_idx")
    unused = ACTIVATION_SCALES
    unlisted = ("ignore",)

    def __init__(self, settings: QuantisationConfig, stored: StoredTensors) -> None:
        super().__init__(settings, stored)
        settings.get("quantization_status", among=("compressed", "frozen"))  # frozen in early releases
        for field in ("sparsity_config", "transform_config"):
            inner = settings.get(field, {}, kind=dict)
            if inner.get("format", "dense") != "dense" or inner.get("config_groups"):
                raise settings.refuse(field, "none")
        if "kv_cache_scheme" in settings:
            logger.info("checkpoint_kv_cache_scheme_ignored model=%s", stored.files.model)
        schemes: dict[str, _Scheme | None] = {}
        for group in settings.part("config_groups").parts():
            schemes |= dict.fromkeys(group.names("targets"), self._scheme(group))
        self._schemes = dict(sorted(schemes.items(), key=lambda item: (item[0].startswith("re:"), item[0])))
        words = sorted({scheme.word for scheme in schemes.values() if scheme is not None})
        if not words:
            raise settings.refuse("config_groups", "a group of weights")
        self.format = f"compressed-tensors {', '.join(words)}"

    def announces(self, name: str, module: nn.Module) -> bool | None:
        """Return whether the configuration announces codes for a module."""
        return self._find(name, module) is not None

    def read(self, stored: StoredTensors, name: str, module: nn.Module, shape: tuple[int, int]) -> Codes:
        """Return the weight of a module as codes, by the scheme of the module's group."""
        scheme = self._find(name, module)
        assert scheme is not None
        block = (scheme.block[0] or shape[0], scheme.block[1] or shape[1])
        scale, zero = f"{name}.weight_scale", f"{name}.weight_zero_point"
        if block[0] == 1 and shape[1] % block[1]:
            raise stored.refuse(scale, f"for groups of {block[1]} inputs, which do not divide {shape[1]}")
        if scheme.form == "pack-quantized":
            codes = _read_packed(stored, name, shape, block, scheme.bits)
        else:
            dtypes, weight = ("I8",) if scheme.kind == "int" else FLOAT8, f"{name}.weight"
            codes = read_elements(stored, weight, scale, shape, block, dtypes=dtypes, zero=zero, bits=scheme.bits)
        return sort_groups(stored, f"{name}.weight_g_idx", codes, is_sorted=scheme.is_sorted)

    def _scheme(self, group: QuantisationConfig) -> _Scheme | None:
        """Return the scheme of a group; ``None`` if it rounds activations alone."""
        if "weights" not in group:
            return None
        weights = group.part("weights")
        kind = weights.get("type", "int", among=("int", "float"))
        bits = weights.get("num_bits", 8, kind=int)
        source = group if "format" in group else self.settings
        form = source.get("format", "", kind=str)
        if form not in _FORMATS:
            raise source.refuse("format", f"one of {', '.join(_FORMATS)}")
        if (kind, bits) not in _FORMATS[form]:
            known = ", ".join(f"{bits} of type {kind}" for kind, bits in sorted(_FORMATS[form]))
            raise weights.refuse("num_bits", f"one of {known}, for the format {form}")
        size = weights.get("group_size", kind=int)
        default = "tensor" if size is None else "channel" if size == -1 else "group"
        strategy = weights.get("strategy", default, among=("tensor", "channel", "group", "block"))
        if strategy == "group" and (size is None or size <= 0):
            raise weights.refuse("group_size", "a positive number")
        blocks = {"tensor": (0, 0), "channel": (1, 0), "group": (1, size), "block": weights.sizes("block_structure")}
        if (block := blocks[strategy]) is None:
            raise weights.refuse("block_structure", "two positive numbers")
        is_sorted = weights.get("actorder") not in (True, "group", "dynamic")
        return _Scheme(form=form, kind=kind, bits=bits, block=block, is_sorted=is_sorted)

    def _find(self, name: str, module: nn.Module) -> _Scheme | None:
        """Return the scheme of a module: by its own name, then by an expression, then by its class."""
        classes = {kind.__name__ for kind in type(module).__mro__}
        is_ignored = any(self._names(entry, name) or entry in classes for entry in self._unlisted)
        if is_ignored or not isinstance(module, nn.Linear | nn.Embedding):
            return None
        named = (scheme for target, scheme in self._schemes.items() if self._names(target, name))
        classed = (scheme for target, scheme in self._schemes.items() if target in classes)
        return next(named, None) or next(classed, None)

    def _names(self, target: str, name: str) -> bool:
        if target.startswith("re:"):
            return self.settings.matches(target.removeprefix("re:"), name)
        return target == name


def _read_packed(stored: StoredTensors, name: str, shape: tuple[int, int], block: tuple[int, int], bits: int) -> Codes:
    """Return a weight whose codes, and perhaps zero points, are in 32-bit words."""
    num_out, num_in = shape
    if f"{name}.weight" in stored:
        raise stored.refuse(f"{name}.weight", f"and {name}.weight_packed, of which one was expected")
    stated = stored.read(f"{name}.weight_shape", ("I64", "I32"), (2,)).tolist()
    if stated != list(shape):
        raise stored.refuse(f"{name}.weight_shape", f"of {stated}, expected {list(shape)} by config.json")
    words = stored.read(f"{name}.weight_packed", ("I32",), (num_out, math.ceil(num_in * bits / 32)))
    codes = unpack_words(words, bits).flatten(1)[:, :num_in].contiguous()
    scales = read_blocks(stored, f"{name}.weight_scale", FLOATS, shape, block)
    zero, zeros = f"{name}.weight_zero_point", None
    if zero in stored and stored.files.dtypes[zero] == "I32":
        packed_shape = (math.ceil(num_out * bits / 32), scales.shape[1])
        packed = stored.read(zero, ("I32",), packed_shape)
        unpacked = unpack_words(packed, bits).permute(0, 2, 1).flatten(0, 1)  # (outputs, groups)
        zeros = unpacked[:num_out].float() - MIDDLES[f"int{bits}"]
    elif zero in stored:  # as early releases stored it
        zeros = read_blocks(stored, zero, ("I8",), shape, block)
    return make_codes(f"int{bits}", codes, scales, block[1], zeros)
