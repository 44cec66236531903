"""The header of a GGUF file, walked without trust: every count and size is compared with the file's own size.

The gguf library and transformers read the file again for the configuration, and allocate what its header says; they get
it after it passed here.

::

    GGUF, version, number of tensors, number of fields
    fields    name, type, value: a number, a text, or a list of numbers or texts
    tensors   name, sizes, type of its blocks, offset
    data      from the next multiple of the alignment

Source: the specification of GGUF, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from typing import Any

from manylora.core.errors import ConfigError

__all__ = ["GgufHeader", "GgufTensor"]

MAX_BYTES, MAX_FIELDS, MAX_TENSORS, MAX_ITEMS = 1 << 28, 1 << 12, 1 << 18, 1 << 21
"""Most bytes, fields and tensors of a header, and items of its lists together; vocabularies have up to 1.3 million."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """A tensor by the header."""

    kind: str  # ggml's name of its blocks
    shape: tuple[int, ...]  # as torch has it, the inputs last
    row_bytes: int  # bytes of one row
    begin: int  # first byte in the file
    end: int  # byte after its last


class GgufHeader:
    """A header as it is walked; every size is compared with the bytes that are left before it is used."""

    def __init__(self, got: str, content: mmap.mmap, library: Any) -> None:
        self._got = got
        self._content = content
        self._library = library
        self._place = 0
        self._items = 0

    def walk(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        """Return fields and tensors; ``ConfigError`` if the header is damaged."""
        if self._content[:4] != b"GGUF":
            raise self._damaged("it does not begin with GGUF")
        self._take(4)
        version, num_tensors, num_fields = self._number("I"), self._number("Q"), self._number("Q")
        if version not in (2, 3):
            raise self._damaged(f"it is of version {version}, expected 2 or 3")
        self._check("tensors", num_tensors, MAX_TENSORS)
        self._check("fields", num_fields, MAX_FIELDS)
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._text()
            if name in fields:
                raise self._damaged(f"field {name!r} is there twice")
            fields[name] = self._value(name, self._number("I"))
        if not isinstance(fields.get("general.architecture"), str):
            raise self._damaged("it has no general.architecture")
        if fields.get("split.count", 0) not in (0, 1):
            raise self._damaged(f"it is one of {fields['split.count']} parts, which is not supported; merge them first")
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or alignment <= 0 or alignment % 8 or alignment > 1 << 16:
            raise self._damaged(f"general.alignment is {alignment!r}, expected a multiple of 8 up to {1 << 16}")
        entries = [self._tensor() for _ in range(num_tensors)]
        start = -(-self._place // alignment) * alignment
        return fields, self._lay_out(entries, start, alignment)

    def _lay_out(
        self, entries: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int
    ) -> dict[str, GgufTensor]:
        """Return the tensors with their places, which are in the file and do not overlap."""
        tensors: dict[str, GgufTensor] = {}
        for name, shape, number, offset in entries:
            try:
                kind = self._library.GGMLQuantizationType(number)
            except ValueError:
                raise self._damaged(
                    f"tensor {name!r} is of type {number}, which the gguf library does not know"
                ) from None
            block, block_bytes = self._library.GGML_QUANT_SIZES[kind]
            row_bytes = shape[-1] // block * block_bytes
            begin, num_bytes = start + offset, math.prod(shape[:-1]) * row_bytes
            if shape[-1] % block:
                raise self._damaged(
                    f"tensor {name!r} has rows of {shape[-1]}, expected blocks of {block} ({kind.name})"
                )
            if offset % alignment or begin + num_bytes > len(self._content):
                raise self._damaged(
                    f"tensor {name!r} of {num_bytes} bytes begins at {begin}, and the file has {len(self._content)}"
                )
            if name in tensors:
                raise self._damaged(f"tensor {name!r} is there twice")
            tensors[name] = GgufTensor(
                kind=kind.name, shape=shape, row_bytes=row_bytes, begin=begin, end=begin + num_bytes
            )
        last = start
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].begin):
            if tensor.begin < last:
                raise self._damaged(f"tensor {name!r} begins at {tensor.begin}, before the end of another at {last}")
            last = tensor.end
        return tensors

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_axes = self._text(), self._number("I")
        if not 1 <= num_axes <= 4:
            raise self._damaged(f"tensor {name!r} has {num_axes} axes, expected 1 to 4")
        shape = tuple(self._number("Q") for _ in range(num_axes))[::-1]
        if not all(0 < size < 1 << 40 for size in shape):
            raise self._damaged(f"tensor {name!r} is of shape {list(shape)}")
        return name, shape, self._number("I"), self._number("Q")

    def _value(self, name: str, kind: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _TEXT:
            return self._text()
        if kind != _LIST:
            raise self._damaged(f"field {name!r} is of type {kind}")
        inner, count = self._number("I"), self._number("Q")
        self._items += count
        self._check("items of lists", self._items, MAX_ITEMS)
        if inner in _SCALARS:
            self._take(count * struct.calcsize(f"<{_SCALARS[inner]}"))
        elif inner == _TEXT:
            for _ in range(count):
                self._take(self._number("Q"))
        else:
            raise self._damaged(f"field {name!r} is a list of type {inner}")
        return None

    def _number(self, code: str) -> Any:
        return struct.unpack_from(f"<{code}", self._content, self._take(struct.calcsize(f"<{code}")))[0]

    def _text(self) -> str:
        length = self._number("Q")
        begin = self._take(length)
        try:
            return self._content[begin : begin + length].decode()
        except UnicodeDecodeError as error:
            raise self._damaged(f"the text at byte {begin} is no UTF-8") from error

    def _take(self, num_bytes: int) -> int:
        """Go on by so many bytes, and return where they begin."""
        begin, self._place = self._place, self._place + num_bytes
        if self._place > (most := min(len(self._content), MAX_BYTES)):
            raise self._damaged(f"its header has {num_bytes} bytes at {begin}, expected at most {most - begin}")
        return begin

    def _check(self, what: str, number: int, most: int) -> None:
        if number > most:
            raise self._damaged(f"its header has {number} {what}, expected at most {most}")

    def _damaged(self, reason: str) -> ConfigError:
        return ConfigError(f"{self._got} is damaged or is no GGUF file: {reason}")
