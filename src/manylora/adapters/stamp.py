"""Stamps: the identity of an adapter's files before their weights are read.

A stamp is a hash over the base, the content of ``adapter_config.json``, and the place, size and times of the weight
file. As long as the stamp is the same, so is the content: a write, a rename or a copy changes a time or an inode. A
stamp serves twice. It finds the content hash of an earlier read (``hash_cache``). Without one, it is the *provisional
key* of the version, which keeps that key for the life of the engine.
"""

from __future__ import annotations

import hashlib
import os

from manylora.adapters.config import read_config_file
from manylora.adapters.content import HASH
from manylora.adapters.folder import AdapterFolder
from manylora.adapters.shape import BaseShape
from manylora.errors import AdapterError
from manylora.types import AdapterKey

__all__ = ["is_provisional", "make_stamp", "provisional_key", "stamp_files"]

_PREFIX = "file-"
"""No content hash begins so: a hash is hexadecimal."""


def provisional_key(stamp: str) -> AdapterKey:
    """Return the key of a version whose weights were not read yet."""
    return AdapterKey(_PREFIX + stamp)


def is_provisional(key: AdapterKey) -> bool:
    """Whether a key stands for the files of a version and not for its content."""
    return key.startswith(_PREFIX)


def make_stamp(base: BaseShape, dtype: str, config: bytes, weights: str, status: os.stat_result) -> str:
    """Return the stamp of an adapter's files.

    Args:
        base: The base model.
        dtype: The asked type of packed weights, on which the type of a known version depends.
        config: Content of ``adapter_config.json``.
        weights: Path of the weight file.
        status: Its status, of the open file.
    """
    digest = hashlib.blake2b(digest_size=20)
    place = os.path.realpath(weights)
    times = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    digest.update(repr((HASH, base.fingerprint, dtype, place, times)).encode())
    digest.update(config)
    return digest.hexdigest()


def stamp_files(folder: AdapterFolder, base: BaseShape, dtype: str) -> tuple[str, float]:
    """Return the stamp of the files in a folder, and the time of their last change in seconds since the epoch.

    Raises:
        AdapterError: A file is missing.
    """
    config = read_config_file(folder)
    weights = folder.path / folder.find_weights()
    try:
        status = os.stat(weights)
    except OSError as error:
        raise AdapterError(folder.name, f"cannot open {weights.name}: {error.strerror}") from error
    return make_stamp(base, dtype, config, str(weights), status), max(status.st_mtime, status.st_ctime)
