"""AWQ and GPTQ: integers in 32-bit words, with a scale and a zero point for each group of inputs.

::

    AWQ, 4 bits         qweight [in, out / 8]      8 outputs a word, in the order 0 2 4 6 1 3 5 7
    GPTQ, 4 or 8 bits   qweight [in / 8, out]      8 or 4 inputs a word; g_idx [in]: the group of each input
    both                qzeros [groups, out / 8]   packed along outputs;  scales [groups, out]

Source: the layouts of AutoAWQ (``WQLinear_GEMM``), and of AutoGPTQ and GPTQModel (``checkpoint_format`` gptq, gptq_v2).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import torch
from torch import nn

from manylora.core.errors import ConfigError
from manylora.execution.checkpoint.codes import MIDDLES, Codes, make_codes, unpack_words
from manylora.execution.checkpoint.stored import FLOATS, Method, QuantisationConfig, StoredTensors

__all__ = ["Awq", "Gptq", "sort_groups"]

_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # the place in a word of each of its 8 outputs
_ONE_EACH = {4: 0x11111111, 8: 0x01010101}  # a word whose codes are all 1


class _Grouped(Method):
    """The settings and tensors that both have."""

    marks = ("qweight", "qzeros", "scales", "g_idx")
    parts = ()

    def __init__(self, settings: QuantisationConfig, stored: StoredTensors, method: str, bits: Collection[int]) -> None:
        super().__init__(settings, stored)
        field = "bits" if "bits" in settings else "w_bit"
        if (found := settings.get(field, among=bits, kind=int)) is None:
            raise settings.refuse("bits", " or ".join(map(str, bits)))
        self._bits: int = found
        field = "group_size" if "group_size" in settings else "q_group_size"
        self._group: int = settings.get(field, 128, kind=int)
        if self._group != -1 and self._group <= 0:
            raise settings.refuse(field, "-1 or a positive number")
        self._numbers = f"int{self._bits}"
        self.format = f"{method} {self._numbers} g{self._group}"

    def _make(self, stored: StoredTensors, name: str, codes: torch.Tensor, zeros: torch.Tensor, group: int) -> Codes:
        """Return codes ``[out, in]`` with the stored scales, and zero points ``[groups, out]`` as codes."""
        num_out, num_in = codes.shape
        scales = stored.read(f"{name}.scales", FLOATS, (math.ceil(num_in / group), num_out)).T
        points = zeros[:, :num_out].T.float() - MIDDLES[self._numbers]
        made = make_codes(self._numbers, codes, scales, group, points)
        return sort_groups(stored, f"{name}.g_idx", made, is_sorted=not self.settings.get("desc_act", False))

    def _zeros(self, stored: StoredTensors, name: str, num_out: int, groups: int) -> torch.Tensor:
        return stored.read(f"{name}.qzeros", ("I32",), (groups, math.ceil(num_out * self._bits / 32)))


class Awq(_Grouped):
    """AWQ in its packing for matrix products (``gemm``)."""

    def __init__(self, settings: QuantisationConfig, stored: StoredTensors) -> None:
        super().__init__(settings, stored, "awq", (4,))
        field = "version" if "version" in settings else "format"
        if settings.get(field, "gemm", kind=str).lower() != "gemm":
            raise settings.refuse(field, "gemm")
        if settings.get("backend") == "llm-awq":
            raise settings.refuse("backend", "another, with the packing gemm")
        settings.get("zero_point", among=(True,))

    def read(self, stored: StoredTensors, name: str, module: nn.Module, shape: tuple[int, int]) -> Codes:
        """Return the weight of a module as codes."""
        num_out, num_in = shape
        group = num_in if self._group == -1 else self._group
        if num_in % group or num_out % 8:
            raise ConfigError(
                f"{stored.got}: {name!r} has {num_in} inputs and {num_out} outputs by config.json, expected multiples "
                f"of group_size {group} and of 8"
            )
        words = stored.read(f"{name}.qweight", ("I32",), (num_in, num_out // 8))
        codes = unpack_words(words, 4)[..., _AWQ_PLACES].flatten(1).T.contiguous()
        zeros = unpack_words(self._zeros(stored, name, num_out, num_in // group), 4)[..., _AWQ_PLACES].flatten(1)
        return self._make(stored, name, codes, zeros, group)


class Gptq(_Grouped):
    """GPTQ of 4 or 8 bits.

    The first format stores zero points less 1, with a borrow from the next code of the word where one is 0; adding 1 to
    each code of the whole word undoes it.
    """

    def __init__(self, settings: QuantisationConfig, stored: StoredTensors) -> None:
        super().__init__(settings, stored, "gptq", (4, 8))
        form = settings.get("checkpoint_format", "gptq", among=("gptq", "gptq_v2"))
        settings.get("pack_dtype", among=("int32",))
        settings.get("is_marlin_format", among=(False,))
        settings.get("dynamic", among=({},))
        self._borrowed = _ONE_EACH[self._bits] if form == "gptq" else 0
        listed = settings.get("modules_in_block_to_quantize", [], kind=list)
        names = [name for entry in listed for name in (entry if isinstance(entry, list) else [entry])]
        self._listed = tuple(f".{name}" for name in names)

    def announces(self, name: str, module: nn.Module) -> bool | None:
        """Return whether the configuration announces codes for a module."""
        return name.endswith(self._listed) if self._listed else super().announces(name, module)

    def read(self, stored: StoredTensors, name: str, module: nn.Module, shape: tuple[int, int]) -> Codes:
        """Return the weight of a module as codes."""
        num_out, num_in = shape
        group = num_in if self._group == -1 else min(self._group, num_in)
        per_word = 32 // self._bits
        if num_in % per_word:
            raise ConfigError(
                f"{stored.got}: {name!r} has {num_in} inputs by config.json, expected a multiple of {per_word}"
            )
        words = stored.read(f"{name}.qweight", ("I32",), (num_in // per_word, num_out))
        codes = unpack_words(words, self._bits).permute(1, 0, 2).flatten(1)
        borrowed = self._zeros(stored, name, num_out, math.ceil(num_in / group))
        zeros = unpack_words(borrowed + self._borrowed, self._bits).flatten(1)
        return self._make(stored, name, codes, zeros, group)


def sort_groups(stored: StoredTensors, name: str, codes: Codes, *, is_sorted: bool) -> Codes:
    """Return codes whose columns are sorted by the groups of their inputs.

    The tensor ``name`` has the group of each input, ``[in]``; all -1 says that they are sorted, and so may its absence
    with ``is_sorted``. ``ConfigError`` if the tensor is missing, or has other groups than those of ``codes``.
    """
    if is_sorted and name not in stored:
        return codes
    num_in, group = codes.codes.shape[1], codes.group
    groups = stored.read(name, ("I32", "I64"), (num_in,)).long()
    expected = torch.arange(num_in) // group
    if groups.eq(-1).all() or groups.equal(expected):
        return codes
    order = groups.argsort(stable=True)
    if not groups[order].equal(expected):
        raise stored.refuse(name, f"of other groups than 0 to {(num_in - 1) // group}, with {group} inputs each")
    return replace(codes, codes=codes.codes[:, order], order=order)
