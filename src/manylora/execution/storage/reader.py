"""Read adapters from disk into the host tier.

An adapter that is registered is read here: its caller waits for the answer anyhow. One that is read again, while others
decode, is read by a process of its own (``packing_process``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from manylora.adapters.packed import PackedAdapter
from manylora.adapters.read import WEIGHT_FILES, read_adapter
from manylora.adapters.shape import BaseShape
from manylora.adapters.tensors import TensorFileReader, read_safetensors
from manylora.errors import AdapterError
from manylora.execution.storage.bin_reader import read_bin
from manylora.execution.storage.host_tier import HostAdapter, HostTier
from manylora.execution.storage.reader_process import PackingProcess
from manylora.types import AdapterVersion

__all__ = ["HostReader"]

_TENSOR_READERS: Mapping[str, TensorFileReader] = {".safetensors": read_safetensors, ".bin": read_bin}


class HostReader:
    """Checks, packs and keeps adapters; blocks, safe from any thread.

    Args:
        base: The base they must fit.
        store: Where the packed weights go.
        max_bytes: Largest weight file accepted.
        dtype: Type to keep weights in, as in ``read_adapter``.
    """

    def __init__(self, base: BaseShape, store: HostTier, *, max_bytes: int, dtype: str | None = None) -> None:
        self._base = base
        self._store = store
        self._max_bytes = max_bytes
        self._dtype = dtype
        self._helper = PackingProcess(base, max_bytes=max_bytes, dtype=dtype)

    def read(self, name: str, path: str) -> AdapterVersion:
        """Read an adapter and keep it in the host tier.

        Raises:
            AdapterError: It cannot be served on this base; says why.
        """
        packed = self._read(name, path)
        self._store.put(packed)
        return packed.version

    def read_again(self, version: AdapterVersion) -> HostAdapter:
        """Bring a known version back into the host tier and return it.

        Raises:
            AdapterError: Its directory is gone, broken, or holds other weights by now.
        """
        # What needs torch to be read (.bin) stays here: the helper is light because it does without.
        is_light = (Path(version.source) / WEIGHT_FILES[0]).exists()
        packed = self._helper.read(version.source, version.source) if is_light else None
        if packed is None:
            packed = self._read(version.source, version.source)
        if packed.version.key != version.key:
            raise AdapterError(
                version.source,
                f"its files changed since it was registered (version {version.key[:12]} then, "
                f"{packed.version.key[:12]} now); register it again",
            )
        return self._store.put(packed)

    def close(self) -> None:
        """End what reads; nothing is read again."""
        self._helper.close()

    def _read(self, name: str, path: str) -> PackedAdapter:
        return read_adapter(
            name, path, self._base, max_bytes=self._max_bytes, tensor_readers=_TENSOR_READERS, dtype=self._dtype
        )
