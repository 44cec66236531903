"""Read an adapter directory: check it, hash its content, lay it out and pack it.

Every fault of an adapter is found here, before a request can wait for its name.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from manylora.adapters.bin_file import read_bin
from manylora.adapters.config import read_config
from manylora.adapters.layout import make_version
from manylora.adapters.method import ModuleWeights
from manylora.adapters.methods import find_method
from manylora.adapters.packed import Allocate, PackedAdapter, own_memory, pack
from manylora.adapters.precision import choose_dtype
from manylora.adapters.shape import BaseShape
from manylora.adapters.tensors import StoredTensor, read_safetensors
from manylora.errors import AdapterError, AdapterNotFound
from manylora.types import AdapterKey

__all__ = ["WEIGHT_FILES", "check_directory", "find_weights", "read_adapter", "read_tensors"]

WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
"""In PEFT's order: the first that exists is read. If it is damaged, the adapter is refused."""


def read_adapter(
    name: str,
    path: str | Path,
    base: BaseShape,
    *,
    max_bytes: int,
    dtype: str | None = None,
    packed_as: str | None = None,
    allocate: Allocate = own_memory,
) -> PackedAdapter:
    """Read and check a PEFT directory, and pack its weights for a base. Blocks on the disk; safe from any thread.

    Args:
        name: The adapter, for messages.
        path: The directory, already permitted by ``sources.resolve_path``.
        base: The base model.
        max_bytes: Largest weight file.
        dtype: Type of the packed weights; ``auto`` for the narrowest exact one (``precision``), the page's own when
            ``None``.
        packed_as: Type of the image where the version was registered with one before its weights were read; the
            type that ``dtype`` chooses when ``None``.
        allocate: Returns the memory for the image.

    Raises:
        AdapterError: The adapter cannot be served on this base, with the reason.
    """
    directory = check_directory(name, path)
    config = read_config(name, directory)
    method = find_method(config)
    settings = method.parse(name, config)
    tensors, disk_bytes = read_tensors(name, directory, max_bytes)
    weights = settings.match(tensors, base)
    _check_finite(name, weights)
    ranks = {w.module.name: w.rank for w in weights}
    chosen = choose_dtype(weights, dtype or base.page.dtype)
    layout = method.lay_out(ranks, base, packed_as or chosen)
    image = pack(name, weights, layout, base.page, allocate)
    key = _content_key(weights, base)
    version = make_version(layout, base.page, key=key, source=str(directory), disk_bytes=disk_bytes)
    return PackedAdapter(version, layout, image, chosen)


def check_directory(name: str, path: str | Path) -> Path:
    """Return ``path`` if it is a directory, else raise ``AdapterNotFound``."""
    directory = Path(path)
    try:
        is_directory = directory.is_dir()
    except (OSError, ValueError) as error:
        raise AdapterNotFound(name, "its path cannot be looked up") from error
    if not is_directory:
        raise AdapterNotFound(name, "there is no directory at its path")
    return directory


def find_weights(name: str, directory: Path) -> Path:
    """Return the weight file of a directory, or raise ``AdapterError`` if it has none."""
    for file in WEIGHT_FILES:
        if os.path.lexists(directory / file):
            return directory / file
    raise AdapterError(name, f"has no weight file ({' or '.join(WEIGHT_FILES)})")


def read_tensors(name: str, directory: Path, max_bytes: int) -> tuple[dict[str, StoredTensor], int]:
    """Return the tensors of a directory's weight file by key, and the file's size in bytes.

    Raises:
        AdapterError: The file is missing, damaged, or larger than ``max_bytes``.
    """
    file = find_weights(name, directory)
    tensors = (read_bin if file.suffix == ".bin" else read_safetensors)(name, file, max_bytes)
    try:
        return tensors, file.stat().st_size
    except OSError as error:
        raise AdapterError(name, f"{file.name} went away while it was read") from error


def _check_finite(name: str, weights: Sequence[ModuleWeights]) -> None:
    """Raise ``AdapterError`` if any weight is no finite number."""
    for w in weights:
        for part, tensor in (("lora_A", w.a), ("lora_B", w.b), ("the column scale", w.column_scale)):
            if tensor is not None and not np.isfinite(tensor.as_float32()).all():
                raise AdapterError(
                    name, f"{part} of module {w.module.name!r} holds numbers that are not finite (NaN or infinity)"
                )


def _content_key(weights: Sequence[ModuleWeights], base: BaseShape) -> AdapterKey:
    """Hash the inputs of an adapter's arithmetic: the base, and each module's rank, scale and stored weights.

    File metadata, key order, training settings and file names are left out: two uploads of the same weights are one
    version. Every part is preceded by its length, so that different lists of parts never hash alike.
    """
    digest = hashlib.blake2b(digest_size=20)

    def add(part: bytes | memoryview) -> None:
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)

    add(base.fingerprint.encode())
    for w in sorted(weights, key=lambda w: w.module.name):
        add(w.module.name.encode())
        add(struct.pack("<Qd", w.rank, w.scale))
        # Unambiguous: a third tensor is always the column scale.
        for tensor in (w.a, w.b) if w.column_scale is None else (w.a, w.b, w.column_scale):
            add(tensor.dtype.encode())
            add(tensor.data.data)
    return AdapterKey(digest.hexdigest())
