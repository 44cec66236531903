"""Read adapters in the engine's own process, where none may be started: an isolated function.

A hostile file then meets the process of its own tenant alone. Steps wait for the interpreter lock while it is parsed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from manylora.core.adapters.identity import stamp_files
from manylora.core.adapters.packed import PackedAdapter, image_of, own_memory
from manylora.core.adapters.read import HeaderReader, MatchedShapes, read_adapter
from manylora.core.adapters.read_layers import LayerReader
from manylora.core.adapters.sources import open_folder
from manylora.core.errors import AdapterError
from manylora.core.ports import check_each
from manylora.core.types import AdapterVersion
from manylora.execution.storage.reader_messages import ReaderSettings

__all__ = ["InlineReader"]


class InlineReader:
    """The methods of ``ReaderProcess``, without a process and without a hash cache; safe from any thread."""

    def __init__(self) -> None:
        self._settings: ReaderSettings | None = None
        self._headers: HeaderReader | None = None
        self._shapes: MatchedShapes | None = None
        self._lock = threading.Lock()

    def configure(self, settings: ReaderSettings) -> None:
        """Set the settings; once."""
        self._settings = settings
        self._shapes = MatchedShapes(settings.base)
        self._headers = HeaderReader(
            settings.base,
            max_bytes=settings.max_bytes,
            max_pages=settings.max_pages,
            roots=settings.roots,
            dtype=settings.dtype,
        )

    def check(self, adapters: Sequence[tuple[str, str]]) -> list[AdapterVersion | AdapterError]:
        """Return the version of each adapter from its header alone, or the reason against it."""
        assert self._headers is not None, "configure comes first"
        with self._lock:
            return check_each(self._headers.read, adapters)

    def read(self, name: str, path: str) -> PackedAdapter:
        """Return the adapter in ``path``.

        Raises:
            AdapterError: It cannot be served on this base.
        """
        settings = self._given
        dtype = settings.dtype or settings.base.page.dtype
        folder = open_folder(name, path, settings.roots)
        stamp, _ = stamp_files(folder, settings.base, dtype, settings.max_bytes)
        packed = read_adapter(
            name,
            path,
            settings.base,
            max_bytes=settings.max_bytes,
            max_pages=settings.max_pages,
            roots=settings.roots,
            dtype=dtype,
        )
        if stamp_files(folder, settings.base, dtype, settings.max_bytes)[0] != stamp:
            raise AdapterError(name, "its files changed while they were read; register it again")
        return replace(packed, version=replace(packed.version, stamp=stamp))

    def read_layers(
        self,
        version: AdapterVersion,
        begin: Callable[[PackedAdapter], None],
        advance: Callable[[int], None],
        *,
        is_urgent: bool = False,
    ) -> bytes:
        """Read a registered version, layer by layer, as of ``ReaderProcess.read_layers``; always at one priority.

        Raises:
            AdapterError: It is another version now, or it cannot be read.
        """
        settings = self._given
        with LayerReader(
            version,
            settings.base,
            max_bytes=settings.max_bytes,
            roots=settings.roots,
            asked_dtype=settings.dtype,
            shapes=self._shapes,
        ) as reader:
            image = image_of(own_memory(version.host_bytes), reader.layout, settings.base.page)
            begin(PackedAdapter(version, reader.layout, image))
            for num_full in reader.pack(image):
                advance(num_full)
            return b"" if reader.first_content is None else reader.first_content.layer_digests

    def close(self) -> None:
        """Do nothing: there is no process."""

    @property
    def _given(self) -> ReaderSettings:
        assert self._settings is not None, "configure comes first"
        return self._settings
