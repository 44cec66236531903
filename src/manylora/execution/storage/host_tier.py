"""The host tier: packed adapter images in main memory, by key.

The engine decides which adapters stay and calls ``drop``. The tier is safe from the threads that read files, copy to
the device and run the loop.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from manylora.adapters.layout import AdapterLayout
from manylora.adapters.packed import PackedAdapter
from manylora.execution.storage.page_tensor import image_tensor
from manylora.execution.storage.tile_tables import GroupDirectory, TileTemplate, make_template
from manylora.types import AdapterKey

__all__ = ["HostAdapter", "HostTier"]


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter ready to be copied: its pages ``[num_pages, elements]`` and their layout.

    ``template`` is the layout for table-driven kernels; ``None`` where no such kernel is in use.
    """

    layout: AdapterLayout
    image: torch.Tensor
    template: TileTemplate | None = None


class HostTier:
    """Packed adapters by key; ``is_pinned`` keeps them page-locked, so that copies to a GPU run beside its work."""

    def __init__(self, *, is_pinned: bool, directory: GroupDirectory | None = None) -> None:
        self._directory = directory
        self._is_pinned = is_pinned
        self._lock = threading.Lock()
        self._adapters: dict[AdapterKey, HostAdapter] = {}

    def put(self, packed: PackedAdapter) -> HostAdapter:
        """Keep an adapter and return the kept one; the same content again changes nothing."""
        key = packed.version.key
        with self._lock:
            if key in self._adapters:
                return self._adapters[key]
        image = image_tensor(packed.image)
        template = make_template(packed.layout, self._directory) if self._directory is not None else None
        adapter = HostAdapter(packed.layout, image.pin_memory() if self._is_pinned else image, template)
        with self._lock:
            return self._adapters.setdefault(key, adapter)

    def get(self, key: AdapterKey) -> HostAdapter | None:
        """Return the adapter, ``None`` when it is not in the host tier."""
        with self._lock:
            return self._adapters.get(key)

    def drop(self, key: AdapterKey) -> None:
        """Drop an adapter; its memory is freed once no copy in flight reads it."""
        with self._lock:
            self._adapters.pop(key, None)

    def __len__(self) -> int:
        with self._lock:
            return len(self._adapters)

    @property
    def num_bytes(self) -> int:
        """Bytes of all images."""
        with self._lock:
            return sum(adapter.image.nbytes for adapter in self._adapters.values())
