"""Check, read and pack the files of adapters, in whichever process it is.

By default that is a reader process (``reader_service``). ``InlineReader`` does it in the engine's own process, where
none may be started: an isolated function. A hostile file then meets only the process of its own tenant, and steps
wait for the interpreter lock while it is parsed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from manylora.core.adapters.hash_cache import HashCache, KnownContent
from manylora.core.adapters.identity import provisional_key
from manylora.core.adapters.packed import Allocate, PackedAdapter, image_of, own_memory
from manylora.core.adapters.read import HeaderReader, MatchedShapes, ReadRules, read_adapter
from manylora.core.adapters.read_layers import LayerReader
from manylora.core.adapters.remote import Registry
from manylora.core.adapters.sources import is_moving
from manylora.core.errors import AdapterError
from manylora.core.ports import check_each
from manylora.core.types import AdapterVersion
from manylora.execution.storage.reader_messages import ReaderSettings

__all__ = ["AdapterFiles", "InlineReader"]


class AdapterFiles:
    """The files of adapters for one base; for one thread at a time.

    Without a registry no URL is allowed. ``hashes`` keeps the content of files that were read.
    """

    def __init__(
        self, settings: ReaderSettings, registry: Registry | None = None, hashes: HashCache | None = None
    ) -> None:
        self._rules: ReadRules = replace(settings, registry=registry)
        self._hashes = hashes
        self._shapes = MatchedShapes(settings.base)
        self._headers = HeaderReader(self._rules, (lambda file_key: None) if hashes is None else hashes.get)

    def check(self, name: str, path: str) -> AdapterVersion:
        """Return the version of an adapter from its header.

        ``AdapterError`` if the adapter cannot be served on this base.
        """
        return self._headers.read(name, self._pin(name, path))

    def read(self, name: str, path: str, allocate: Allocate = own_memory) -> PackedAdapter:
        """Return the adapter in ``path``, packed in memory of ``allocate``.

        ``AdapterError`` if the adapter cannot be served on this base, or its files changed meanwhile.
        """
        path = self._pin(name, path)
        file_key, changed_at = self._file_key(name, path)
        packed = read_adapter(name, path, self._rules, allocate)
        if self._file_key(name, path)[0] != file_key:
            raise AdapterError(name, "its files changed while they were read; register it again")
        version = replace(packed.version, file_key=file_key)
        assert version.dtype is not None
        self._keep(file_key, KnownContent(version.key, version.dtype, version.layer_digests), changed_at)
        return replace(packed, version=version)

    def read_layers(
        self,
        version: AdapterVersion,
        begin: Callable[[PackedAdapter], None],
        advance: Callable[[int, bytes], None],
        allocate: Allocate = own_memory,
    ) -> None:
        """Read a registered version, layer by layer.

        Args:
            version: The version.
            begin: Takes the adapter while its image is still empty; called once, first.
            advance: Takes the number of pages that are full, counted from the first; in the end of all pages, with the
                digests of the layers if the version is read for the first time.
            allocate: Returns the memory for the image.

        Raises:
            AdapterError: The adapter is another version now, or it cannot be read.
        """
        with LayerReader(version, self._rules, self._shapes) as reader:
            image = image_of(allocate(version.host_bytes), reader.layout, self._rules.base.page)
            begin(PackedAdapter(version, reader.layout, image))
            for num_full in reader.pack(image):
                first = reader.first_content
                if first is not None and self._hashes is not None:
                    file_key, changed_at = self._file_key(version.source, version.source)
                    if provisional_key(file_key) == version.key:
                        self._keep(file_key, first, changed_at)
                advance(num_full, b"" if first is None else first.layer_digests)

    def _pin(self, name: str, path: str) -> str:
        """Return a path, in a commit if it is a URL of a hub without one: all that is read is of one commit."""
        registry = self._rules.registry
        if registry is None or not is_moving(path):
            return path
        url, mark, digest = path.partition("#")
        return f"{registry.pin(name, url)}{mark}{digest}"

    def _file_key(self, name: str, path: str) -> tuple[str, float]:
        """Return the identity of an adapter's files, and the time of their last change."""
        return self._rules.file_key_of(self._rules.open(name, path))

    def _keep(self, file_key: str, content: KnownContent, changed_at: float) -> None:
        if self._hashes is not None:
            self._hashes.put(file_key, content, age_s=time.time() - changed_at)


class InlineReader:
    """The methods of ``ReaderProcess`` without a process; safe from any thread, all reads at one priority."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def configure(self, settings: ReaderSettings) -> None:
        """Set the settings; once, first."""
        self._files = AdapterFiles(settings)

    def check(self, adapters: Sequence[tuple[str, str]]) -> list[AdapterVersion | AdapterError]:
        """Return the version of each adapter by its header; see ``ReaderProcess.check``."""
        with self._lock:
            return check_each(self._files.check, adapters)

    def read(self, name: str, path: str, folder: object = None) -> PackedAdapter:
        """Return the adapter in ``path``, which no other engine packs for this one; see ``AdapterFiles.read``."""
        return self._files.read(name, path)

    def read_layers(
        self,
        version: AdapterVersion,
        begin: Callable[[PackedAdapter], None],
        advance: Callable[[int], None],
        *,
        is_urgent: bool = False,
    ) -> bytes:
        """Read a registered version, layer by layer; see ``ReaderProcess.read_layers``."""
        digests = b""

        def take(num_full: int, layer_digests: bytes) -> None:
            nonlocal digests
            digests = layer_digests
            advance(num_full)

        self._files.read_layers(version, begin, take)
        return digests

    def close(self) -> None:
        """Do nothing: there is no process."""
