"""Bases as they are kept, in files of the cache folder: the next start maps one in place of reading and packing again.

::

    base-<name>-<files>.weights     the buffer of ``BaseWeights``
    base-<name>-<files>.table       its manifest, written last

*name* is a hash of the checkpoint's place and of the precision, *files* a hash of its files' names, sizes and times of
change: a checkpoint that changed has another file, and the old one is removed. Only weights in our own order are kept
here, since it is the same on every processor. A fault of these files costs a read of the checkpoint, never an error.

Isolated functions do not use them: their base is sealed memory, which no process can write to.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from hashlib import blake2b
from pathlib import Path
from threading import Thread

import msgspec

from manylora.core.config import ModelConfig
from manylora.execution.checkpoint.files import find_gguf, is_gguf
from manylora.execution.model.base_weights import BaseWeights, WeightsManifest
from manylora.execution.model.precision import Precision
from manylora.execution.model.sealed_memory import SealedMemory

__all__ = ["PackedCache"]

logger = logging.getLogger(__name__)

FORMAT = 4  # number of the order of bytes and of the probe's findings: another one for other packing
SETTLED_S = 2.0  # age of files from which on their times are sure to change with their content
MOST_OF_FREE = 0.25  # share of the free disk that a base may take

THREAD_NAME = "base-cache"

_FILES = ("*.safetensors", "*.json")


class PackedCache:
    """The files of one base in one precision; the folder is made with the first."""

    def __init__(self, folder: Path, config: ModelConfig, precision: Precision) -> None:
        self._folder = folder
        self._model = config.model
        files = _files_of(config.model)
        stats = [(path.name, path.stat()) for path in files]
        self._is_settled = bool(stats) and max(stat.st_mtime for _, stat in stats) < time.time() - SETTLED_S
        place = os.path.realpath(config.model)
        self._name = f"base-{_hash(FORMAT, place, precision.base, precision.is_rounded, precision.dtype)}-"
        self._stem = self._name + _hash(*((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats))

    def find(self) -> BaseWeights | None:
        """Return the weights, mapped; ``None`` if there are none of these files."""
        if not self._is_settled:
            return None
        try:
            manifest = msgspec.msgpack.decode(self._path("table").read_bytes(), type=WeightsManifest)
            file = os.open(self._path("weights"), os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, msgspec.DecodeError, msgspec.ValidationError):
            return None
        memory = SealedMemory(file, manifest.num_bytes)  # closes the file
        if os.fstat(file).st_size != manifest.num_bytes or manifest.model != self._model:
            return None
        logger.info("base_mapped path=%s num_bytes=%d", self._path("weights"), manifest.num_bytes)
        return BaseWeights(manifest, memory.map(is_read=True), memory)

    def store_later(self, weights: BaseWeights) -> None:
        """Write the weights on a thread of its own, beside the rest of the start."""
        is_ours = weights.is_narrow and not any(entry.packing for entry in weights.manifest.entries)
        if self._is_settled and is_ours and isinstance(weights.memory, SealedMemory):
            arguments = (weights.manifest, weights.memory)
            Thread(target=self._store, args=arguments, name=THREAD_NAME, daemon=True).start()

    def _store(self, manifest: WeightsManifest, memory: SealedMemory) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self._folder).free
            if manifest.num_bytes > free * MOST_OF_FREE:
                logger.info("base_not_cached num_bytes=%d free=%d", manifest.num_bytes, free)
                return
            with tempfile.TemporaryDirectory(dir=self._folder, prefix="base-being-written-") as own:
                part = Path(own) / "part"
                with part.open("wb") as target:
                    offset = 0
                    while offset < manifest.num_bytes:
                        offset += os.sendfile(target.fileno(), memory.fd, offset, manifest.num_bytes - offset)
                    os.fsync(target.fileno())
                part.rename(self._path("weights"))
                table = Path(own) / "table"
                table.write_bytes(msgspec.msgpack.encode(manifest))
                table.rename(self._path("table"))
            for old in self._folder.glob(f"{self._name}*"):
                if not old.name.startswith(self._stem):
                    old.unlink(missing_ok=True)
            logger.info("base_cached path=%s num_bytes=%d", self._path("weights"), manifest.num_bytes)
        except OSError as error:
            logger.warning("base_not_cached folder=%s error=%s", self._folder, error)

    def _path(self, kind: str) -> Path:
        return self._folder / f"{self._stem}.{kind}"


def _files_of(model: str) -> list[Path]:
    """Return the files that decide a local checkpoint's weights; none of a model at the hub."""
    if is_gguf(model):
        return [find_gguf(model)] if Path(model).is_file() else []
    return sorted(path for pattern in _FILES for path in Path(model).glob(pattern))


def _hash(*parts: object) -> str:
    return blake2b(repr(parts).encode(), digest_size=12).hexdigest()
