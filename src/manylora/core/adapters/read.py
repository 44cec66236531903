"""Read an adapter directory: check it, hash its content, lay it out and pack it.

Every fault of an adapter is found here, before a request can wait for its name.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from manylora.core.adapters.config import read_config
from manylora.core.adapters.content import by_layer, content_key, digest_layer
from manylora.core.adapters.folder import open_folder
from manylora.core.adapters.layout import make_version
from manylora.core.adapters.method import ModuleWeights
from manylora.core.adapters.methods import find_method
from manylora.core.adapters.packed import Allocate, PackedAdapter, own_memory, pack
from manylora.core.adapters.precision import choose_dtype
from manylora.core.adapters.remote import Registry
from manylora.core.adapters.shape import BaseShape
from manylora.core.adapters.weight_file import WeightFile, check_size
from manylora.core.errors import AdapterError

__all__ = ["check_finite", "read_adapter"]


def read_adapter(
    name: str,
    path: str | Path,
    base: BaseShape,
    *,
    max_bytes: int,
    max_pages: int | None = None,
    roots: Collection[str] | None = None,
    registry: Registry | None = None,
    dtype: str | None = None,
    allocate: Allocate = own_memory,
) -> PackedAdapter:
    """Read and check a PEFT directory, and pack its weights for a base. Blocks; safe from any thread.

    Args:
        name: The adapter, for messages.
        path: The directory, or its URL.
        base: The base model.
        max_bytes: Largest weight file.
        max_pages: Most pages of an adapter; a larger one is refused before its weights are read.
        roots: As of ``AdapterFolder``.
        registry: Asked for URLs; ``None`` if none is allowed.
        dtype: Type of the packed weights; ``auto`` for the narrowest exact one (``precision``), the page's own when
            ``None``.
        allocate: Returns the memory for the image.

    Raises:
        AdapterError: The adapter cannot be served on this base, with the reason.
    """
    folder = open_folder(name, path, roots, registry)
    config = read_config(folder)
    method = find_method(config)
    settings = method.parse(name, config)
    with WeightFile(folder, max_bytes) as file:
        weights = settings.match(file.tensors, base)
        check_size(name, weights, base, max_pages)
        weights = tuple(file.fetch(weights))
    check_finite(name, weights)
    ranks = {w.module.name: w.rank for w in weights}
    layout = method.lay_out(ranks, base, choose_dtype(weights, dtype or base.page.dtype))
    image = pack(name, weights, layout, base.page, allocate)
    digests = [digest_layer(layer) for layer in by_layer(weights)]
    version = make_version(
        layout,
        base.page,
        key=content_key(base, digests),
        source=folder.place,
        disk_bytes=file.num_bytes,
        layer_digests=b"".join(digests),
    )
    return PackedAdapter(version, layout, image)


def check_finite(name: str, weights: Sequence[ModuleWeights]) -> None:
    """Raise ``AdapterError`` if any weight is no finite number."""
    for w in weights:
        for part, tensor in zip(("lora_A", "lora_B", "the column scale"), w.tensors, strict=False):
            if not np.isfinite(tensor.as_float32()).all():
                raise AdapterError(
                    name, f"{part} of module {w.module.name!r} holds numbers that are not finite (NaN or infinity)"
                )
