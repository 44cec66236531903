"""Stamps: the identity of an adapter's files before their weights are read.

A stamp is a hash over the base, the content of ``adapter_config.json``, and the identity of the weight file: place,
size, and times or ETag. As long as the stamp is the same, so is the content: a write, a rename or a copy changes a time
or an inode. A stamp serves twice. It finds the content hash of an earlier read (``hash_cache``). Without one, it is the
*provisional key* of the version, which keeps that key for the life of the engine.
"""

from __future__ import annotations

import hashlib

from manylora.core.adapters.config import read_config_file
from manylora.core.adapters.content import HASH
from manylora.core.adapters.folder import Folder
from manylora.core.adapters.opened import FileIdentity
from manylora.core.adapters.shape import BaseShape
from manylora.core.types import AdapterKey

__all__ = ["is_provisional", "make_stamp", "provisional_key", "stamp_files"]

_PREFIX = "file-"
"""No content hash begins so: a hash is hexadecimal."""


def provisional_key(stamp: str) -> AdapterKey:
    """Return the key of a version whose weights were not read yet."""
    return AdapterKey(_PREFIX + stamp)


def is_provisional(key: AdapterKey) -> bool:
    """Whether a key stands for the files of a version and not for its content."""
    return key.startswith(_PREFIX)


def make_stamp(base: BaseShape, dtype: str, config: bytes, weights: FileIdentity) -> str:
    """Return the stamp of an adapter's files.

    Args:
        base: The base model.
        dtype: The asked type of packed weights, on which the type of a known version depends.
        config: Content of ``adapter_config.json``.
        weights: Identity of the weight file.
    """
    digest = hashlib.blake2b(digest_size=20)
    digest.update(repr((HASH, base.fingerprint, dtype, weights.place, weights.parts)).encode())
    digest.update(config)
    return digest.hexdigest()


def stamp_files(folder: Folder, base: BaseShape, dtype: str, max_bytes: int) -> tuple[str, float]:
    """Return the stamp of the files in a folder, and the time of their last change in seconds since the epoch.

    Raises:
        AdapterError: A file is missing, or the weight file is in a registry and has more than ``max_bytes`` bytes.
    """
    config = read_config_file(folder)
    weights = folder.identify(folder.find_weights(), max_bytes)
    return make_stamp(base, dtype, config, weights), weights.changed_at
