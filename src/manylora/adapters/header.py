"""Check an adapter without its weights: its configuration, and the names, types and shapes in its weight file's header.

Thousands of adapters are registered at a start, and few of them are used soon. The header is a few kilobytes before
megabytes of weights. Every fault but one of the numbers themselves shows in it, and so do all sizes of the version.
Most adapters of a service have one of a few shapes, so that all checks are done once per shape.

A ``.bin`` file has no header and is read whole.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from manylora.adapters.config import parse_config, read_config_file
from manylora.adapters.hash_cache import KnownContent
from manylora.adapters.layout import make_version
from manylora.adapters.methods import find_method
from manylora.adapters.precision import choose_dtype_unread
from manylora.adapters.read import check_directory, find_weights, read_adapter
from manylora.adapters.shape import BaseShape
from manylora.adapters.stamp import make_stamp, provisional_key
from manylora.adapters.tensors import MAX_HEADER_BYTES, StoredTensor, open_regular
from manylora.errors import AdapterError
from manylora.types import AdapterVersion

__all__ = ["HeaderReader", "parse_header"]

MAX_SHAPES = 4096
"""Outcomes that are kept."""

_BITS: Mapping[str, int] = (
    {"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16}
    | {"I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
    | {"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}
)
"""Bits of an element, by safetensors' names of the types."""


class HeaderReader:
    """Checks adapters for one base, by header; for one thread.

    Args:
        base: The base model.
        max_bytes: Largest weight file.
        dtype: Type of the packed weights, as of ``read_adapter``.
        known: Returns the content of files by their stamp, if they were read before.
    """

    def __init__(
        self,
        base: BaseShape,
        *,
        max_bytes: int,
        dtype: str | None = None,
        known: Callable[[str], KnownContent | None] = lambda stamp: None,
    ) -> None:
        self._base = base
        self._max_bytes = max_bytes
        self._dtype = dtype or base.page.dtype
        self._known = known
        self._shapes: dict[tuple[object, ...], AdapterVersion] = {}

    def read(self, name: str, path: str | Path) -> AdapterVersion:
        """Return the version of an adapter, by content hash if that is known, else with a provisional key.

        Raises:
            AdapterError: It cannot be served on this base, as far as its header shows.
        """
        directory = check_directory(name, path)
        config = read_config_file(name, directory)
        weights = find_weights(name, directory)
        if weights.suffix == ".bin":
            return read_adapter(name, directory, self._base, max_bytes=self._max_bytes, dtype=self._dtype).version
        with open_regular(name, weights, self._max_bytes) as file:
            status = os.fstat(file.fileno())
            header = _read_header(name, file, weights.name, status.st_size)
        stamp = make_stamp(self._base, self._dtype, config, weights, status)
        content = self._known(stamp)
        shape = self._shape(name, config, header, status.st_size, None if content is None else content.dtype)
        key = provisional_key(stamp) if content is None else content.key
        return replace(shape, key=key, source=str(directory))

    def _shape(self, name: str, config: bytes, header: bytes, num_bytes: int, dtype: str | None) -> AdapterVersion:
        """Return the version of all adapters with this configuration and header, without key and source."""
        tensors = hashlib.blake2b(header, digest_size=16).digest(), num_bytes, dtype
        written = (config, *tensors)
        shape = self._shapes.get(written)
        if shape is not None:
            return shape
        fields = parse_config(name, config)
        meant = (_in_order(fields), *tensors)
        shape = self._shapes.get(meant)
        if shape is None:
            shape = self._check(name, fields, parse_header(name, header, num_bytes), num_bytes, dtype)
        if len(self._shapes) >= MAX_SHAPES:
            self._shapes.clear()
        self._shapes[written] = self._shapes[meant] = shape
        return shape

    def _check(
        self,
        name: str,
        config: Mapping[str, Any],
        tensors: Mapping[str, StoredTensor],
        num_bytes: int,
        dtype: str | None,
    ) -> AdapterVersion:
        method = find_method(config)
        weights = method.parse(name, config).match(tensors, self._base)
        ranks = {w.module.name: w.rank for w in weights}
        layout = method.lay_out(ranks, self._base, dtype or choose_dtype_unread(weights, self._dtype))
        return make_version(layout, self._base.page, key="", source="", disk_bytes=num_bytes)


def _in_order(config: Mapping[str, Any]) -> str:
    """Return a configuration as text; PEFT writes the targets, a set, in an order that differs from run to run."""
    targets = config.get("target_modules")
    if isinstance(targets, list) and all(isinstance(one, str) for one in targets):
        config = {**config, "target_modules": sorted(targets)}
    return json.dumps(config, sort_keys=True)


def _read_header(name: str, file: BinaryIO, file_name: str, num_bytes: int) -> bytes:
    """Return the header at the start of an open safetensors file."""
    length = int.from_bytes(file.read(8), "little")
    if length > max(MAX_HEADER_BYTES, num_bytes):
        raise AdapterError(name, f"{file_name} is damaged: its header claims to be longer than the file")
    if length > MAX_HEADER_BYTES:
        raise AdapterError(name, f"{file_name} has a header of more than {MAX_HEADER_BYTES} bytes")
    header = file.read(length)
    if num_bytes < 8 or len(header) != length:
        raise _damaged(name, "the file ends within its header")
    return header


def parse_header(name: str, header: bytes, num_bytes: int) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, without their bytes, by key.

    Args:
        name: The adapter, for messages.
        header: The header, without its length.
        num_bytes: Size of the file, which the tensors fill to the last byte, without holes.

    Raises:
        AdapterError: It is no header of a safetensors file of that size.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        unique = dict(items)
        if len(unique) != len(items):
            raise ValueError("a key appears twice")
        return unique

    try:
        entries = json.loads(header, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise _damaged(name, f"its header is not valid JSON: {type(error).__name__}") from error
    if not isinstance(entries, dict) or not header.startswith(b"{"):
        raise _damaged(name, "its header is no object")
    metadata = entries.pop("__metadata__", None)
    if metadata is not None and not (isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())):
        raise _damaged(name, "its metadata is no text by name")
    nothing = np.empty(0, np.uint8)
    tensors: dict[str, StoredTensor] = {}
    ranges: list[tuple[int, int]] = []
    for key, entry in entries.items():
        dtype, shape, (begin, end) = _entry(name, key, entry)
        num_bits = math.prod(shape) * _BITS[dtype]
        if num_bits != 8 * (end - begin):
            raise _damaged(name, f"tensor {_show(key)} has {end - begin} bytes, which its shape does not take")
        tensors[key] = StoredTensor(dtype, shape, nothing)
        ranges.append((begin, end))
    last = 0
    for begin, end in sorted(ranges):
        if begin != last:
            raise _damaged(name, "its tensors overlap, or leave a hole")
        last = end
    if last != num_bytes - 8 - len(header):
        raise _damaged(name, f"its tensors take {last} bytes, and it has {num_bytes - 8 - len(header)} of them")
    return tensors


def _entry(name: str, key: str, entry: Any) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """Return type, shape and range of a tensor in a header."""
    try:
        dtype, shape, offsets = entry["dtype"], tuple(entry["shape"]), tuple(entry["data_offsets"])
        is_valid = dtype in _BITS and len(offsets) == 2
        is_valid = is_valid and all(type(n) is int and 0 <= n < 1 << 62 for n in (*shape, *offsets))
    except (KeyError, TypeError):
        is_valid = False
    if not is_valid:
        raise _damaged(name, f"tensor {_show(key)} is malformed")
    return dtype, shape, (offsets[0], offsets[1])


def _damaged(name: str, reason: str) -> AdapterError:
    return AdapterError(name, f"adapter_model.safetensors is damaged or is no safetensors file: {reason}")


def _show(key: str) -> str:
    return repr(key if len(key) <= 160 else key[:157] + "...")
