"""Identity of an adapter version: a hash of its content, and a file key of its files before their weights are read.

The *content key* is a hash over a digest of each layer's weights: a tree of two levels. A version that is read again is
compared layer by layer, so that its first layers may be used before the last have been read, and no layer is used
before it has been compared.

The *file key* is a hash over the base, the content of ``adapter_config.json``, and the identity of the weight file:
place, size, and times or ETag. As long as the file key is the same, so is the content: a write, a rename or a copy
changes a time or an inode. A file key serves twice. It finds the content key of an earlier read (``hash_cache``).
Without one, it is the *provisional key* of the version, which keeps that key for the life of the engine.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from itertools import groupby

from blake3 import blake3

from manylora.core.adapters.shape import BaseShape
from manylora.core.adapters.tensors import ModuleWeights
from manylora.core.types import AdapterKey

__all__ = [
    "HASH",
    "by_layer",
    "content_key",
    "digest_layer",
    "digest_text",
    "is_provisional",
    "provisional_key",
    "split_digests",
]

HASH = "blake3"
"""Name of the hash: digests by another one are not compared with. It uses the vector units: with AVX-512 it is five
times as fast as SHA-256 with its own instructions."""

DIGEST_BYTES = 20

LEAST_ALONE_BYTES = 256 * 1024
"""Bytes that are hashed where they lie: short parts are hashed slowly one by one, and are put together first."""

_PREFIX = "file-"  # no content hash begins so: a hash is hexadecimal


def by_layer(weights: Iterable[ModuleWeights]) -> list[list[ModuleWeights]]:
    """Return the weights of each layer, in the order of the layers in an ``AdapterLayout``."""
    ordered = sorted(weights, key=lambda w: w.module.turn)
    return [list(layer) for _, layer in groupby(ordered, key=lambda w: w.module.turn)]


def digest_text(content: bytes) -> bytes:
    """Hash a configuration or a header, to find what is remembered of it while a process lives."""
    return hashlib.blake2b(content, digest_size=16).digest()


def digest_layer(weights: Sequence[ModuleWeights]) -> bytes:
    """Hash the inputs of a layer's arithmetic: each module's name, rank, scale and stored weights.

    File metadata, key order, training settings and file names are left out: two uploads of the same weights are one
    version. Every part is preceded by its length, so that different lists of parts never hash alike.
    """
    digest = blake3()
    held = bytearray()

    def add(part: bytes | memoryview) -> None:
        held.extend(struct.pack("<Q", len(part)))
        if len(part) < LEAST_ALONE_BYTES:
            held.extend(part)
            part = b""
        if part or len(held) > LEAST_ALONE_BYTES:
            digest.update(held)
            digest.update(part)
            held.clear()

    for w in sorted(weights, key=lambda w: w.module.name):
        add(w.module.name.encode())
        add(struct.pack("<Qd", w.rank, w.scale))
        for tensor in (w.a, w.b):
            add(tensor.dtype.encode())
            add(tensor.data.data)
        if w.replaces is not None:
            add(w.replaces.encode())
        for kind, tensor in w.vectors.items():  # a kind is no name of a type or module: no other list hashes alike
            add(kind.value.encode())
            add(tensor.dtype.encode())
            add(tensor.data.data)
    digest.update(held)
    return digest.digest(DIGEST_BYTES)


def content_key(base: BaseShape, digests: Sequence[bytes], invocation: Sequence[int]) -> AdapterKey:
    """Return the identity of an adapter on a base, by the digests of its layers and the tokens that activate it."""
    digest = blake3()
    digest.update(struct.pack("<Q", len(base.fingerprint)))
    digest.update(base.fingerprint.encode())
    for one in digests:
        digest.update(one)
    if invocation:  # of another length than a layer's digest, so that no other list of layers hashes alike
        digest.update(digest_text(repr(tuple(invocation)).encode()))
    return AdapterKey(digest.hexdigest(DIGEST_BYTES))


def split_digests(digests: bytes) -> list[bytes]:
    """Return the digests of ``AdapterVersion.layer_digests`` one by one."""
    return [digests[first : first + DIGEST_BYTES] for first in range(0, len(digests), DIGEST_BYTES)]


def provisional_key(file_key: str) -> AdapterKey:
    """Return the key of a version whose weights were not read yet."""
    return AdapterKey(_PREFIX + file_key)


def is_provisional(key: AdapterKey) -> bool:
    """Whether a key stands for the files of a version and not for its content."""
    return key.startswith(_PREFIX)
