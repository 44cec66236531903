"""Read an adapter's folder for a base: only its header, or all of it.

Every fault of an adapter is found here, before a request can wait for its name. ``read_adapter`` checks a folder,
hashes its content, lays it out and packs it.

``HeaderReader`` does without the weights: thousands of adapters are registered at a start, and few of them are used
soon. The header is a few kilobytes before megabytes of weights. Every fault but one of the numbers themselves shows in
it, and so do all sizes of the version. The pickle of a ``.bin`` file takes the place of a header.

The adapters of a service come from few trainers, and many differ only in their numbers. To parse configuration and
header, match them with the base and lay the weights out is a large part of reading a small adapter. So all that both
files say is worked out once for the adapters that share them: a *shape*.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from manylora.core.adapters.folder import FileIdentity, Folder, parse_config, read_config, read_config_file
from manylora.core.adapters.hash_cache import KnownContent
from manylora.core.adapters.identity import HASH, by_layer, content_key, digest_layer, digest_text, provisional_key
from manylora.core.adapters.layout import layout_of, make_version
from manylora.core.adapters.method import parse_settings
from manylora.core.adapters.packed import Allocate, PackedAdapter, choose_dtype, choose_dtype_unread, own_memory, pack
from manylora.core.adapters.remote import Registry
from manylora.core.adapters.shape import BaseShape
from manylora.core.adapters.sources import open_folder
from manylora.core.adapters.tensors import ModuleWeights, StoredTensor
from manylora.core.adapters.weight_file import WeightFile, check_size, parse_header
from manylora.core.errors import AdapterError
from manylora.core.types import AdapterVersion

__all__ = ["HeaderReader", "MatchedShapes", "MatchedWeights", "ReadRules", "check_finite", "read_adapter"]

MAX_MATCHED = 16
"""Shapes whose weights ``MatchedShapes`` remembers: a few hundred kilobytes each, in a process with bounded memory."""

MAX_OUTCOMES = 4096
"""Outcomes that ``HeaderReader`` keeps, each of about a kilobyte: their keys are digests of what tenants wrote."""

Shape: TypeAlias = tuple[bytes, bytes, int]  # digests of configuration and header, and the size of the file


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRules:
    """How adapters are read for one base."""

    base: BaseShape
    max_bytes: int  # largest weight file
    max_pages: int | None = None  # most pages of an adapter; a larger one is refused before its weights are read
    roots: Collection[str] | None = None  # as in ``AdapterFolder``
    registry: Registry | None = None  # asked for URLs; ``None`` if none is allowed
    # Type of the packed weights; ``auto`` for the narrowest exact one (``packed``), the page's own when ``None``.
    dtype: str | None = None

    @property
    def asked_dtype(self) -> str:
        """The type of packed weights that is asked for."""
        return self.dtype or self.base.page.adapter_dtype

    def open(self, name: str, place: str | Path) -> Folder:
        """Return the folder at a path or URL; errors as for ``open_folder``."""
        return open_folder(name, place, self.roots, self.registry)

    def make_file_key(self, config: bytes, weights: FileIdentity) -> str:
        """Return the file key of the content of a configuration and the identity of a weight file.

        It depends on the asked type too, since the type of a known version does.
        """
        digest = hashlib.blake2b(digest_size=20)
        digest.update(repr((HASH, self.base.fingerprint, self.asked_dtype, weights.place, weights.parts)).encode())
        digest.update(config)
        return digest.hexdigest()

    def file_key_of(self, folder: Folder) -> tuple[str, float]:
        """Return the file key of the files in a folder, and the time of their last change in seconds since the epoch.

        Raises:
            AdapterError: A file is missing, or the weight file is in a registry and has more than ``max_bytes`` bytes.
        """
        config = read_config_file(folder)
        weights = folder.identify(folder.find_weights(), self.max_bytes)
        return self.make_file_key(config, weights), weights.changed_at


def read_adapter(name: str, path: str | Path, rules: ReadRules, allocate: Allocate = own_memory) -> PackedAdapter:
    """Read and check a PEFT directory or URL, and pack its weights for a base. Blocks; safe from any thread.

    ``allocate`` returns the memory for the image. ``AdapterError`` if the adapter cannot be served on this base, with
    the reason.
    """
    folder, base = rules.open(name, path), rules.base
    settings = parse_settings(name, read_config(folder))
    with WeightFile(folder, rules.max_bytes) as file:
        weights = settings.match(file.tensors, base)
        check_size(name, weights, base, rules.max_pages)
        weights = tuple(file.fetch(weights))
    check_finite(name, weights)
    layout = layout_of(weights, base, choose_dtype(weights, rules.asked_dtype))
    image = pack(name, weights, layout, base.page, allocate)
    digests = [digest_layer(layer) for layer in by_layer(weights)]
    version = make_version(
        layout,
        base.page,
        key=content_key(base, digests, settings.invocation),
        source=folder.place,
        disk_bytes=file.num_bytes,
        layer_digests=b"".join(digests),
        invocation=settings.invocation,
    )
    return PackedAdapter(version, layout, image)


def check_finite(name: str, weights: Sequence[ModuleWeights]) -> None:
    """Raise ``AdapterError`` if any weight is no finite number."""
    for w in weights:
        for part, tensor in zip(
            ("lora_A", "lora_B", *(f"the {kind.value}" for kind in w.vectors)), w.tensors, strict=True
        ):
            if not np.isfinite(tensor.as_float32()).all():
                raise AdapterError(
                    name, f"{part} of module {w.module.name!r} holds numbers that are not finite (NaN or infinity)"
                )


@dataclass(frozen=True, slots=True, eq=False)
class MatchedWeights:
    """The weights of a file, matched with the base and without their bytes."""

    weights: Sequence[ModuleWeights]  # of every module, in the base's order
    layers: Sequence[Sequence[ModuleWeights]]  # the same by layer, in the order of the layers in a layout
    shape: Shape | None  # its key in ``MatchedShapes``; ``None`` if the file has no header


class MatchedShapes:
    """Matches files with one base, and remembers the shapes of some. For one reader at a time."""

    def __init__(self, base: BaseShape) -> None:
        self._base = base
        self._known: dict[Shape, MatchedWeights] = {}

    def match(self, name: str, config: bytes, file: WeightFile) -> MatchedWeights:
        """Return the weights of an open file; it may hold another version than the registered version.

        ``config`` is the content of its configuration. ``AdapterError`` if they cannot be served on this base, as far
        as configuration and header show.
        """
        shape = None if file.header is None else (digest_text(config), digest_text(file.header), file.num_bytes)
        known = None if shape is None else self._known.get(shape)
        if known is not None:
            return known
        weights = parse_settings(name, parse_config(name, config)).match(file.tensors, self._base)
        return MatchedWeights(weights, by_layer(weights), shape)

    def remember(self, matched: MatchedWeights) -> None:
        """Keep what was found of an adapter that is served; the oldest makes room."""
        if matched.shape is None or matched.shape in self._known:
            return
        if len(self._known) >= MAX_MATCHED:
            del self._known[next(iter(self._known))]
        self._known[matched.shape] = matched


class HeaderReader:
    """Checks adapters for one base, by header; for one thread.

    ``known`` returns the content of files by their file key, if they were read before.
    """

    def __init__(self, rules: ReadRules, known: Callable[[str], KnownContent | None] = lambda file_key: None) -> None:
        self._rules = rules
        self._known = known
        self._shapes: dict[bytes, AdapterVersion] = {}

    def read(self, name: str, path: str | Path) -> AdapterVersion:
        """Return the version of an adapter, by content hash if that is known, else with a provisional key.

        ``AdapterError`` if the adapter cannot be served on this base, as far as its header shows.
        """
        folder = self._rules.open(name, path)
        config = read_config_file(folder)
        shape_in: Callable[[str | None], AdapterVersion]
        with WeightFile(folder, self._rules.max_bytes) as file:
            if file.header is None:
                shape_in = partial(self._check, name, parse_config(name, config), file.tensors, file.num_bytes)
            else:
                shape_in = partial(self._shape, name, config, file.header, file.num_bytes)
        file_key = self._rules.make_file_key(config, file.identity)
        content = self._known(file_key)
        if content is None:
            key = provisional_key(file_key)
            return replace(shape_in(None), key=key, source=folder.place, file_key=file_key, is_whole=not file.is_pinned)
        shape = shape_in(content.dtype)
        return replace(
            shape, key=content.key, source=folder.place, layer_digests=content.layer_digests, file_key=file_key
        )

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
        if len(self._shapes) >= MAX_OUTCOMES:
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
        rules, base = self._rules, self._rules.base
        settings = parse_settings(name, config)
        weights = settings.match(tensors, base)
        check_size(name, weights, base, rules.max_pages)
        layout = layout_of(weights, base, dtype or choose_dtype_unread(weights, rules.asked_dtype))
        return make_version(layout, base.page, key="", source="", disk_bytes=num_bytes, invocation=settings.invocation)


def _in_order(config: Mapping[str, Any]) -> str:
    """Return a configuration as text; PEFT writes the targets, a set, in an order that differs from run to run."""
    targets = config.get("target_modules")
    if isinstance(targets, list) and all(isinstance(one, str) for one in targets):
        config = {**config, "target_modules": sorted(targets)}
    return json.dumps(config, sort_keys=True)
