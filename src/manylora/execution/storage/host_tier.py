"""The host tier: packed adapter images in main memory, by key.

The engine decides which adapters stay and calls ``drop``. The tier is safe from the threads that read files, copy to
the device and run the loop.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from manylora.adapters.layout import AdapterLayout
from manylora.adapters.packed import PackedAdapter
from manylora.execution.storage.page_tensor import image_tensor
from manylora.execution.storage.resident import ResidentAdapter, read_in_place
from manylora.execution.storage.tile_tables import GroupDirectory, TileTemplate, make_template
from manylora.types import AdapterKey

__all__ = ["HostAdapter", "HostTier"]


@dataclass(slots=True, eq=False)
class HostAdapter:
    """An adapter ready to be copied: its pages ``[num_pages, elements]`` and their layout.

    ``template`` is the layout for table-driven kernels; ``None`` where no such kernel is in use.
    """

    layout: AdapterLayout
    image: torch.Tensor
    template: TileTemplate | None = None
    _in_place: ResidentAdapter | None = field(default=None, init=False)

    @property
    def is_read_in_place(self) -> bool:
        """Whether any step has read the image where it lies."""
        return self._in_place is not None

    def in_place(self) -> ResidentAdapter:
        """Return views of the image for kernels that read it where it lies; the same ones every time.

        They are made at the first call, for few adapters are ever read here. One thread alone may call.
        """
        if self._in_place is None:
            self._in_place = read_in_place(self.layout, self.image)
        return self._in_place


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

    def drop(self, key: AdapterKey) -> HostAdapter | None:
        """Drop an adapter and return it; its memory is freed once no copy and no step in flight reads it."""
        with self._lock:
            return self._adapters.pop(key, None)

    def __len__(self) -> int:
        with self._lock:
            return len(self._adapters)

    @property
    def num_bytes(self) -> int:
        """Bytes of all images."""
        with self._lock:
            return sum(adapter.image.nbytes for adapter in self._adapters.values())
