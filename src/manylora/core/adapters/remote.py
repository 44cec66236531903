"""An adapter's folder in a *registry*: a static HTTP server, a hub or an object store, read by ranges.

The folder's URL takes the place of its path, and everything behind the opening of a file is the code for disks: the
header, layers in order, digests, file keys. A file is identified by its size, its ETag and ``Last-Modified``. Every
range must come from the file that was opened, by these.

The requests themselves are made elsewhere (``Registry``): the process that parses an adapter has no network.
"""

from __future__ import annotations

from calendar import timegm
from email.utils import parsedate
from math import inf
from typing import Protocol

import msgspec

from manylora.core.adapters.folder import FileIdentity
from manylora.core.errors import AdapterError

__all__ = ["Registry", "RemoteFile", "RemoteFolder", "RemoteHead", "changed_at"]

WEIGHT_FILE = "adapter_model.safetensors"
"""The only kind of weight file that is looked for: a pickle cannot be read by ranges."""


class RemoteHead(msgspec.Struct, frozen=True, array_like=True):
    """A file as its server described it when it was opened."""

    size: int  # its bytes
    etag: str  # its ETag, empty if the server sends none
    modified: str  # its ``Last-Modified``, empty if the server sends none
    first: bytes = b""  # its first bytes: a configuration, or the header of a weight file, needs no second request

    @property
    def is_strong(self) -> bool:
        """Whether the ETag changes with every byte of the content."""
        return self.etag.startswith('"')


class Registry(Protocol):
    """Asks registries that are allowed; blocks, safe from any thread. Messages name the adapter ``name``."""

    def pin(self, name: str, url: str) -> str:
        """Return the URL of the same folder of a hub in the commit that its branch or tag names now.

        ``AdapterNotFound`` if there is no adapter; ``AdapterError`` as for ``open``.
        """

    def open(self, name: str, url: str, max_bytes: int) -> RemoteHead:
        """Return the head of a file.

        ``AdapterNotFound`` if there is no such file; ``AdapterForbidden`` if the URL is not in a registry that is
        allowed; ``AdapterError`` if the file is too large, has no identity, or the server does not answer.
        """

    def read(self, name: str, url: str, head: RemoteHead, offset: int, length: int) -> bytes:
        """Return a range of a file, all of it.

        ``AdapterError`` if the file is another file now than ``head`` describes, or cannot be read.
        """


class RemoteFile:
    """An open file in a registry; an ``OpenFile``."""

    def __init__(self, name: str, url: str, head: RemoteHead, registry: Registry) -> None:
        self._name = name
        self._url = url
        self._head = msgspec.structs.replace(head, first=b"")
        self._first = head.first
        self._registry = registry
        self.size = head.size
        self.is_pinned = head.is_strong

    @property
    def identity(self) -> FileIdentity:
        """The identity at the opening: a range of another file is never returned."""
        head = self._head
        return FileIdentity(self._url, (head.size, head.etag, head.modified), changed_at(head))

    def read(self, offset: int, length: int) -> bytes:
        """Return a range of the file."""
        first = self._first[offset : offset + length]
        if len(first) == length:
            return first
        if offset + length > self.size:
            raise AdapterError(self._name, f"the weight file is damaged: it ends at byte {self.size}")
        rest = self._registry.read(self._name, self._url, self._head, offset + len(first), length - len(first))
        return first + rest

    def close(self) -> None:
        """Do nothing: connections belong to the registry."""


class RemoteFolder:
    """The folder of an adapter in a registry; a ``Folder``.

    Its URL is checked (``sources.resolve_url``), without a slash at its end. A checksum in it is that of the weight
    file.
    """

    def __init__(self, name: str, place: str, registry: Registry) -> None:
        self.name = name
        self.place = place
        self._registry = registry

    def read(self, file: str, max_bytes: int) -> bytes:
        """Return the content of a small file."""
        opened = self.open(file, max_bytes)
        return opened.read(0, opened.size)

    def open(self, file: str, max_bytes: int) -> RemoteFile:
        """Open a file of at most ``max_bytes`` bytes; errors as for ``Registry.open``."""
        folder, mark, digest = self.place.partition("#")
        url = f"{folder}/{file}{mark}{digest}" if file == WEIGHT_FILE else f"{folder}/{file}"
        return RemoteFile(self.name, url, self._registry.open(self.name, url, max_bytes), self._registry)

    def find_weights(self) -> str:
        """Return the name of the weight file."""
        return WEIGHT_FILE

    def identify(self, file: str, max_bytes: int) -> FileIdentity:
        """Return the present identity of a file of at most ``max_bytes`` bytes."""
        return self.open(file, max_bytes).identity


def changed_at(head: RemoteHead) -> float:
    """Return the time after which a change would show, 0 if every change shows, infinite if no time is told.

    Without an ETag that is strong, times count in seconds.
    """
    if head.is_strong:
        return 0.0
    when = parsedate(head.modified)
    try:
        return inf if when is None else float(timegm(when))
    except ValueError:  # of a year that no calendar has
        return inf
