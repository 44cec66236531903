"""Read an adapter directory: check it, hash its content, lay it out and pack it.

Every fault of an adapter is found here, before a request can wait for its name.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from manylora.adapters.bin_file import read_bin
from manylora.adapters.config import read_config
from manylora.adapters.content import by_layer, content_key, digest_layer
from manylora.adapters.layout import make_version
from manylora.adapters.method import ModuleWeights
from manylora.adapters.methods import find_method
from manylora.adapters.packed import Allocate, PackedAdapter, own_memory, pack
from manylora.adapters.precision import choose_dtype
from manylora.adapters.shape import BaseShape
from manylora.adapters.tensors import StoredTensor, read_safetensors
from manylora.errors import AdapterError, AdapterNotFound

__all__ = ["WEIGHT_FILES", "check_directory", "check_finite", "find_weights", "read_adapter", "read_tensors"]

WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
"""In PEFT's order: the first that exists is read. If it is damaged, the adapter is refused."""


def read_adapter(
    name: str,
    path: str | Path,
    base: BaseShape,
    *,
    max_bytes: int,
    dtype: str | None = None,
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
    check_finite(name, weights)
    ranks = {w.module.name: w.rank for w in weights}
    layout = method.lay_out(ranks, base, choose_dtype(weights, dtype or base.page.dtype))
    image = pack(name, weights, layout, base.page, allocate)
    digests = [digest_layer(layer) for layer in by_layer(weights)]
    version = make_version(
        layout,
        base.page,
        key=content_key(base, digests),
        source=str(directory),
        disk_bytes=disk_bytes,
        layer_digests=b"".join(digests),
    )
    return PackedAdapter(version, layout, image)


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


def check_finite(name: str, weights: Sequence[ModuleWeights]) -> None:
    """Raise ``AdapterError`` if any weight is no finite number."""
    for w in weights:
        for part, tensor in zip(("lora_A", "lora_B", "the column scale"), w.tensors, strict=False):
            if not np.isfinite(tensor.as_float32()).all():
                raise AdapterError(
                    name, f"{part} of module {w.module.name!r} holds numbers that are not finite (NaN or infinity)"
                )
