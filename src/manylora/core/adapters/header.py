"""Check an adapter without its weights: its configuration, and the names, types and shapes in its weight file's header.

Thousands of adapters are registered at a start, and few of them are used soon. The header is a few kilobytes before
megabytes of weights. Every fault but one of the numbers themselves shows in it, and so do all sizes of the version.
Most adapters of a service have one of a few shapes, so that all checks are done once per shape.

The pickle of a ``.bin`` file takes the place of a header.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from manylora.core.adapters.config import parse_config, read_config_file
from manylora.core.adapters.content import digest_text
from manylora.core.adapters.file_stamp import make_stamp, provisional_key
from manylora.core.adapters.folder import open_folder
from manylora.core.adapters.hash_cache import KnownContent
from manylora.core.adapters.layout import make_version
from manylora.core.adapters.methods import find_method
from manylora.core.adapters.precision import choose_dtype_unread
from manylora.core.adapters.remote import Registry
from manylora.core.adapters.shape import BaseShape
from manylora.core.adapters.tensors import StoredTensor
from manylora.core.adapters.weight_file import WeightFile, check_size
from manylora.core.adapters.weight_source import parse_header, read_header_bytes
from manylora.core.types import AdapterVersion

__all__ = ["HeaderReader"]

MAX_SHAPES = 4096
"""Outcomes that are kept, each of about a kilobyte: their keys are digests of what tenants wrote."""


class HeaderReader:
    """Checks adapters for one base, by header; for one thread.

    Args:
        base: The base model.
        max_bytes: Largest weight file.
        max_pages: As of ``read_adapter``.
        roots: As of ``read_adapter``.
        registry: As of ``read_adapter``.
        dtype: As of ``read_adapter``.
        known: Returns the content of files by their stamp, if they were read before.
    """

    def __init__(
        self,
        base: BaseShape,
        *,
        max_bytes: int,
        max_pages: int | None = None,
        roots: Collection[str] | None = None,
        registry: Registry | None = None,
        dtype: str | None = None,
        known: Callable[[str], KnownContent | None] = lambda stamp: None,
    ) -> None:
        self._base = base
        self._max_bytes = max_bytes
        self._max_pages = max_pages
        self._roots = roots
        self._registry = registry
        self._dtype = dtype or base.page.dtype
        self._known = known
        self._shapes: dict[bytes, AdapterVersion] = {}

    def read(self, name: str, path: str | Path) -> AdapterVersion:
        """Return the version of an adapter, by content hash if that is known, else with a provisional key.

        Raises:
            AdapterError: It cannot be served on this base, as far as its header shows.
        """
        folder = open_folder(name, path, self._roots, self._registry)
        config = read_config_file(folder)
        shape_in: Callable[[str | None], AdapterVersion]
        if (weights := folder.find_weights()).endswith(".bin"):
            with WeightFile(folder, self._max_bytes) as file:
                identity, num_bytes, is_pinned = file.identity, file.num_bytes, file.is_pinned
            shape_in = partial(self._check, name, parse_config(name, config), file.tensors, num_bytes)
        else:
            source = folder.open(weights, self._max_bytes)
            try:
                identity, num_bytes, is_pinned = source.identity, source.size, source.is_pinned
                shape_in = partial(self._shape, name, config, read_header_bytes(name, source), num_bytes)
            finally:
                source.close()
        stamp = make_stamp(self._base, self._dtype, config, identity)
        content = self._known(stamp)
        if content is None:
            key = provisional_key(stamp)
            return replace(shape_in(None), key=key, source=folder.place, stamp=stamp, is_whole=not is_pinned)
        shape = shape_in(content.dtype)
        return replace(shape, key=content.key, source=folder.place, layer_digests=content.layer_digests, stamp=stamp)

    def _shape(self, name: str, config: bytes, header: bytes, num_bytes: int, dtype: str | None) -> AdapterVersion:
        """Return the version of all adapters with this configuration and header, without key and source."""
        tensors = digest_text(header) + repr((num_bytes, dtype)).encode()
        written = digest_text(config + tensors)
        shape = self._shapes.get(written)
        if shape is not None:
            return shape
        fields = parse_config(name, config)
        meant = digest_text(_in_order(fields).encode() + tensors)
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
        check_size(name, weights, self._base, self._max_pages)
        ranks = {w.module.name: w.rank for w in weights}
        layout = method.lay_out(ranks, self._base, dtype or choose_dtype_unread(weights, self._dtype))
        return make_version(layout, self._base.page, key="", source="", disk_bytes=num_bytes)


def _in_order(config: Mapping[str, Any]) -> str:
    """Return a configuration as text; PEFT writes the targets, a set, in an order that differs from run to run."""
    targets = config.get("target_modules")
    if isinstance(targets, list) and all(isinstance(one, str) for one in targets):
        config = {**config, "target_modules": sorted(targets)}
    return json.dumps(config, sort_keys=True)
