"""The host tier: packed adapter images in main memory, by key.

The engine decides which adapters stay and calls ``drop``. The tier is safe from the threads that read files, copy to
the device and run the loop. Vectors that depend on the base's numbers are settled here (``settle``), before a page that
holds them is there for anyone.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from manylora.core.adapters.layout import AdapterLayout
from manylora.core.adapters.packed import PackedAdapter
from manylora.core.errors import AdapterError
from manylora.core.types import AdapterKey
from manylora.execution.storage.arrival import Arrival
from manylora.execution.storage.page_tensor import image_tensor
from manylora.execution.storage.resident import ResidentAdapter, read_in_place
from manylora.execution.storage.tile_tables import GroupDirectory, TileTemplate, make_template

__all__ = ["HostAdapter", "HostTier", "PinnedMemory", "Settle"]

CHUNK_BYTES = 256 * 2**20
"""Page-locked memory that is asked for at once: the driver takes tens of milliseconds, whatever an adapter needs."""

ALIGN_BYTES = 4096


Settle: TypeAlias = Callable[[str, AdapterLayout, torch.Tensor], Callable[[int], int]]
"""Begins to settle an image ``[num_pages, elements]`` of an adapter, by its name for messages, and its layout.

The function that it returns takes the number of pages that have come, and returns how many of these are final; it
raises ``AdapterError`` if they do not go with the base."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class HostAdapter:
    """An adapter's pages ``[num_pages, elements]`` and their layout, ready to be copied as far as they have arrived.

    ``template`` is the layout for table-driven kernels; ``None`` where no such kernel is in use. ``first_digests`` are
    those of its layers, if it was read for the first time and is complete.
    """

    layout: AdapterLayout
    image: torch.Tensor
    arrival: Arrival
    template: TileTemplate | None = None
    first_digests: bytes = field(default=b"", init=False)
    _source: torch.Tensor | None = None
    _settling: Callable[[int], int] | None = None
    _in_place: ResidentAdapter | None = field(default=None, init=False)

    @property
    def is_read_in_place(self) -> bool:
        """Whether any step has read the image where it lies."""
        return self._in_place is not None

    def in_place(self) -> ResidentAdapter:
        """Return views of the image for kernels that read it where it lies; the same ones every time.

        They are made at the first call, for few adapters are ever read here. For one thread.
        """
        if self._in_place is None:
            self._in_place = read_in_place(self.layout, self.image)
        return self._in_place

    def advance(self, num_pages: int) -> None:
        """Take pages up to ``num_pages``, which a reader process has filled.

        ``AdapterError`` if they do not go with the base's weights.
        """
        if self._settling is not None:
            num_pages = self._settling(num_pages)
        if self._source is not None:
            first = self.arrival.num_arrived
            self.image[first:num_pages] = self._source[first:num_pages]
            if num_pages == len(self._source):
                self._source = None
        self.arrival.advance(num_pages)


class PinnedMemory:
    """Page-locked memory for images, in large chunks that are kept: none is rounded up, and few wait for the driver.

    For one thread at a time. A part is free again once no tensor of it is left, on whatever thread that happens.
    ``allocate`` returns so many bytes.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        self._allocate = allocate
        self._chunks: list[NDArray[np.uint8]] = []
        self._free: list[tuple[int, int, int]] = []  # chunk, first byte and one past the last, in order
        self._freed: deque[tuple[int, int, int]] = deque()

    def empty_like(self, source: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape and type of ``source``, not initialised."""
        num_bytes = -(-source.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        chunk, first = self._take(num_bytes)
        part = self._chunks[chunk][first : first + source.nbytes]
        # A tensor keeps the array that it was made of, and so do its views.
        weakref.finalize(part, self._freed.append, (chunk, first, first + num_bytes)).atexit = False
        return torch.from_numpy(part).view(source.dtype).view(source.shape)

    def _take(self, num_bytes: int) -> tuple[int, int]:
        """Return the chunk and the first byte of a part, which is not free from now on."""
        self._merge()
        for place, (chunk, first, last) in enumerate(self._free):
            if last - first >= num_bytes:
                self._free[place : place + 1] = [(chunk, first + num_bytes, last)] * (last - first > num_bytes)
                return chunk, first
        size = max(CHUNK_BYTES, num_bytes)
        self._chunks.append(self._allocate(size).numpy())
        self._free += [(len(self._chunks) - 1, num_bytes, size)] * (size > num_bytes)
        return len(self._chunks) - 1, 0

    def _merge(self) -> None:
        """Put what was freed meanwhile among the free parts, and neighbours together."""
        while self._freed:
            self._free.append(self._freed.popleft())
        merged: list[tuple[int, int, int]] = []
        for chunk, first, last in sorted(self._free):
            if merged and merged[-1][0] == chunk and merged[-1][2] == first:
                first = merged.pop()[1]
            merged.append((chunk, first, last))
        self._free = merged


class HostTier:
    """Packed adapters by key, page-locked if ``is_pinned``, so that copies to a GPU run beside its work.

    The directory of the base's groups is for table-driven kernels. ``settle`` begins to settle an image that needs the
    base's numbers.
    """

    def __init__(
        self, *, is_pinned: bool, directory: GroupDirectory | None = None, settle: Settle | None = None
    ) -> None:
        self._settle = settle
        self._directory = directory
        self._pinned = PinnedMemory(partial(torch.empty, dtype=torch.uint8, pin_memory=True)) if is_pinned else None
        self._lock = threading.Lock()
        self._adapters: dict[AdapterKey, HostAdapter] = {}

    def put(self, packed: PackedAdapter) -> HostAdapter:
        """Keep an adapter and return the kept one; the same content again changes nothing.

        ``AdapterError`` if it does not go with the base's weights.
        """
        adapter = self.begin(packed)
        if not adapter.arrival.is_complete:
            try:
                adapter.advance(packed.version.num_pages)
            except AdapterError as error:
                self.fail(packed.version.key, adapter, error.reason)
                raise
        return adapter

    def begin(self, packed: PackedAdapter) -> HostAdapter:
        """Keep an adapter whose image is still empty, and return it; or the kept one, if that is complete."""
        key = packed.version.key
        if (kept := self.get(key)) is not None and kept.arrival.is_complete:
            return kept
        source = image_tensor(packed.image)
        template = make_template(packed.layout, self._directory) if self._directory is not None else None
        # Page-locked memory is of our own making, so pages are copied once more as they come.
        image = source
        if self._pinned is not None:
            with self._lock:
                image = self._pinned.empty_like(source)
        arrival = Arrival(len(source))
        settling = None
        if packed.layout.needs_base:
            assert self._settle is not None, "a tier without a base has only adapters that need none"
            settling = self._settle(packed.version.source, packed.layout, source)
        adapter = HostAdapter(packed.layout, image, arrival, template, None if image is source else source, settling)
        with self._lock:
            self._adapters[key] = adapter
        return adapter

    def fail(self, key: AdapterKey, adapter: HostAdapter, error: str) -> None:
        """Forget an adapter whose read failed, and pass the error to the loads that wait for it."""
        with self._lock:
            if self._adapters.get(key) is adapter:
                del self._adapters[key]
        adapter.arrival.fail(error)

    def get(self, key: AdapterKey) -> HostAdapter | None:
        """Return the adapter, which may still be arriving; ``None`` when it is not in the host tier."""
        with self._lock:
            return self._adapters.get(key)

    def drop(self, key: AdapterKey) -> HostAdapter | None:
        """Drop an adapter and return it; its memory is freed once no copy and no step in flight reads it."""
        with self._lock:
            return self._adapters.pop(key, None)
