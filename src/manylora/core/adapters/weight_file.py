"""The weight file of an adapter, open: its tensors first, their bytes when they are wanted.

First only the header of a safetensors file is read, or the pickle of a ``.bin`` file. So the names, types, shapes and
sizes of all tensors are checked before a byte of them is read, and a large file costs no more than a small one until it
has been found to fit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from manylora.core.adapters.bin_file import describe_bin
from manylora.core.adapters.folder import FileIdentity, Folder, LocalFile, OpenFile, shown, unique_pairs
from manylora.core.adapters.shape import BaseShape
from manylora.core.adapters.tensors import ModuleWeights, StoredTensor
from manylora.core.errors import AdapterError

__all__ = ["WeightFile", "check_size", "fetch", "least_bytes", "parse_header", "parse_metadata", "read_header_bytes"]

LEAST_ELEMENT_BYTES = 2

WEIGHTS = "adapter_model.safetensors"

MAX_HEADER_BYTES = 8 * 1024 * 1024
"""Largest safetensors header: thousands of times the header of a real adapter, small enough to parse at once."""

_BITS: Mapping[str, int] = (
    {"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16}
    | {"I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
    | {"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}
)
"""Bits of an element, by safetensors' names of the types."""


class WeightFile:
    """The open weight file of a folder; a context, which closes it.

    ``admit`` takes the identity of the open file before it is parsed, and raises to refuse it. ``AdapterError`` if the
    file is missing, unreadable, too short for its header, or larger than ``max_bytes``.
    """

    def __init__(
        self, folder: Folder, max_bytes: int, admit: Callable[[FileIdentity], None] = lambda identity: None
    ) -> None:
        name, file = folder.name, folder.find_weights()
        opened = folder.open(file, max_bytes)
        self.num_bytes = opened.size
        self.identity = opened.identity
        self.is_pinned = opened.is_pinned
        """Whether ``fetch`` fails for bytes that were written after the opening."""
        self.header: bytes | None = None
        """The header of a safetensors file; ``None`` of a pickle."""
        self._name = name
        self._source: OpenFile = opened
        self._tensors: Mapping[str, StoredTensor] | None = None
        try:
            admit(self.identity)
            if isinstance(opened, LocalFile) and file.endswith(".bin"):
                self._tensors = describe_bin(name, opened.file, max_bytes)
            else:
                self.header = read_header_bytes(name, opened)
        except BaseException:
            opened.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Its tensors by key, without their bytes; ``AdapterError`` if the header is damaged."""
        if self._tensors is None:
            assert self.header is not None
            self._tensors = parse_header(self._name, self.header, self.num_bytes)
        return self._tensors

    def fetch(self, weights: Sequence[ModuleWeights]) -> Sequence[ModuleWeights]:
        """Return weights of its tensors with their bytes; ``AdapterError`` if they cannot be read."""
        return fetch(self._source, weights)

    def close(self) -> None:
        """Close the file."""
        self._source.close()


def least_bytes(weights: Iterable[ModuleWeights]) -> int:
    """Return the least memory that weights take in any type, in bytes; costs no layout."""
    return LEAST_ELEMENT_BYTES * sum(w.rank * (w.module.num_columns + w.module.num_rows) for w in weights)


def check_size(name: str, weights: Sequence[ModuleWeights], base: BaseShape, max_pages: int | None) -> None:
    """Raise ``AdapterError`` if weights need more than ``max_pages`` of a base in any type; costs no layout.

    It is raised as well for what devices that share an adapter cannot settle: each has a part of the base alone.
    """
    for w in weights:
        if w.module.share is not None and (w.vectors or w.replaces):
            what = next(iter(w.vectors)).value if w.vectors else "new weight"
            raise AdapterError(
                name, f"module {w.module.name!r} has a {what}, which is not supported with --tensor-parallel-size"
            )
    if max_pages is None:
        return
    least = least_bytes(weights)
    if least > max_pages * base.page.num_bytes:
        pages = -(-least // base.page.num_bytes)
        raise AdapterError(name, f"needs {pages} pages or more; one adapter may take {max_pages} (--max-adapter-share)")


def read_header_bytes(name: str, source: OpenFile) -> bytes:
    """Return the header of a safetensors file, without its length.

    ``AdapterError`` if it is no safetensors file, or cut.
    """
    length = int.from_bytes(source.read(0, 8), "little") if source.size >= 8 else source.size
    if length > source.size - 8:
        raise _damaged(name, WEIGHTS, "its header claims to be longer than the file")
    if length > MAX_HEADER_BYTES:
        raise _damaged(name, WEIGHTS, f"it has a header of more than {MAX_HEADER_BYTES} bytes")
    return source.read(8, length)


def parse_header(name: str, header: bytes, num_bytes: int, *, file: str = WEIGHTS) -> dict[str, StoredTensor]:
    """Return the tensors that a header (without its length) lists, by key, each with its range in the file.

    They fill the file, of ``num_bytes``, to the last byte, without holes. Messages name the adapter and the file.
    ``AdapterError`` if it is no header of a safetensors file of that size.
    """
    entries, _ = _parse(name, header, file)
    front = 8 + len(header)
    tensors = {key: _tensor(name, file, key, entry, front) for key, entry in entries.items()}
    last = front
    for begin, end in sorted(tensor.place for tensor in tensors.values() if tensor.place is not None):
        if begin != last:
            raise _damaged(name, file, "its tensors overlap, or leave a hole")
        last = end
    if last != num_bytes:
        raise _damaged(name, file, f"its tensors take {last - front} bytes, and it has {num_bytes - front} of them")
    return tensors


def parse_metadata(name: str, header: bytes, *, file: str = WEIGHTS) -> dict[str, str]:
    """Return the metadata in a header, text by name; arguments and errors as for ``parse_header``."""
    return _parse(name, header, file)[1]


def _parse(name: str, header: bytes, file: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the entries of a header's tensors, and its metadata."""
    try:
        entries = json.loads(header, object_pairs_hook=unique_pairs)
    except (ValueError, RecursionError) as error:
        raise _damaged(name, file, f"its header is not valid JSON: {type(error).__name__}") from error
    if not isinstance(entries, dict) or not header.startswith(b"{"):
        raise _damaged(name, file, "its header is no object")
    metadata = entries.pop("__metadata__", None)
    if metadata is not None and not (isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())):
        raise _damaged(name, file, "its metadata is no text by name")
    return entries, metadata or {}


def fetch(source: OpenFile, weights: Iterable[ModuleWeights]) -> list[ModuleWeights]:
    """Return the weights with the bytes that were not read yet; adjacent tensors are read at once."""
    weights = list(weights)
    places = sorted({place for w in weights for tensor in w.tensors for place in tensor.places})
    data: dict[tuple[int, int], NDArray[np.uint8]] = {}
    first = 0
    for number, (_, end) in enumerate(places):
        if number + 1 == len(places) or places[number + 1][0] != end:
            begin = places[first][0]
            content = np.frombuffer(source.read(begin, end - begin), np.uint8)
            data |= {place: content[place[0] - begin : place[1] - begin] for place in places[first : number + 1]}
            first = number + 1

    return [w.filled(data) for w in weights]


def _tensor(name: str, file: str, key: str, entry: Any, front: int) -> StoredTensor:
    """Return a tensor of a header; its bytes are counted from ``front`` on."""
    try:
        dtype, shape, offsets = entry["dtype"], tuple(entry["shape"]), tuple(entry["data_offsets"])
        is_valid = dtype in _BITS and len(offsets) == 2
        is_valid = is_valid and all(type(n) is int and 0 <= n < 1 << 62 for n in (*shape, *offsets))
    except (KeyError, TypeError):
        is_valid = False
    if not is_valid:
        raise _damaged(name, file, f"tensor {shown(key, 160)} is malformed")
    begin, end = offsets
    if math.prod(shape) * _BITS[dtype] != 8 * (end - begin):
        raise _damaged(name, file, f"tensor {shown(key, 160)} has {end - begin} bytes, which its shape does not take")
    return StoredTensor(dtype, shape, np.empty(0, np.uint8), (front + begin, front + end))


def _damaged(name: str, file: str, reason: str) -> AdapterError:
    return AdapterError(name, f"{file} is damaged or is no safetensors file: {reason}")
