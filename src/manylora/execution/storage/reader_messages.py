"""The messages between an engine and a reader process.

Questions go to the reader as pickles, for it trusts the engine. Answers are decoded as one of the structs below and
nothing else: the reader may have been taken over by a file that it read.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import NamedTuple, TypeAlias

import msgspec

from manylora.core import errors
from manylora.core.adapters.layout import AdapterLayout, Replacements, Vectors
from manylora.core.adapters.read import ReadRules
from manylora.core.adapters.sources import is_url
from manylora.core.errors import AdapterError
from manylora.core.isolation.confine import receive_answer
from manylora.core.types import AdapterKey, AdapterVersion

__all__ = [
    "AdapterRefused",
    "Again",
    "Answer",
    "Check",
    "Checked",
    "Identity",
    "Packed",
    "Pages",
    "ReaderSettings",
    "ask",
    "receive",
    "send",
]

MAX_ANSWER_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSettings(ReadRules):
    """The settings of every reader of an engine."""

    urgent_root: str | None = None  # folder of adapters that are read at the priority of steps; ``None`` for none
    registries: tuple[str, ...] = ()  # URLs below which adapters may be read from servers; empty for no such adapters
    registry_cache: str | None = None  # folder of files from there; ``None`` for none
    registry_cache_bytes: int = 0  # most bytes in it
    is_offline: bool = False  # whether files are read from there alone
    hashes: str | None = None  # file of the hash cache; ``None`` for none
    limit_s: float = 60.0  # time for the next part of an adapter; an adapter that takes longer is refused
    memory_bytes: int = 4 * 1024**3  # memory that a reader may add once it runs


class Again(NamedTuple):
    """The question for a version that was registered."""

    version: AdapterVersion
    is_urgent: bool


class Check(NamedTuple):
    """The question for adapters by name and path, from their headers.

    It is answered by an empty ``Checked``, then in order by one for each with ``is_each``, else for some at a time.
    """

    adapters: Sequence[tuple[str, str]]
    is_each: bool


class Packed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer without the image, which follows as a descriptor."""

    version: AdapterVersion  # the version
    ranks: tuple[tuple[str, int], ...]  # ranks by module; this and the next three are the arguments of ``lay_out``
    dtype: str  # type of the weights
    vectors: Vectors  # vectors by module
    replaced: Replacements  # modules that take the place of the base's

    @classmethod
    def of(cls, version: AdapterVersion, layout: AdapterLayout) -> Packed:
        """Return the answer for an adapter of a layout."""
        parts = [part for group in layout.groups.values() for part in group.modules]
        ranks = tuple((part.module.name, part.rank) for part in parts)
        vectors = tuple((part.module.name, tuple(kind for kind, _ in part.vectors)) for part in parts if part.vectors)
        replaced = tuple((part.module.name, part.replaces) for part in parts if part.replaces is not None)
        return cls(version, ranks, layout.dtype, vectors, replaced)


class Pages(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A further answer: so many of the image's pages are full.

    The last has the digests of the layers, if the version was read for the first time.
    """

    num_full: int
    layer_digests: bytes = b""


class Identity(NamedTuple):
    """The fields of a version that differ among versions of one shape."""

    key: AdapterKey
    layer_digests: bytes
    file_key: str
    url: str  # in the commit that it was read from, if its path is a URL of a hub; else empty


class AdapterRefused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The reason why an adapter cannot be served; the engine's process raises it again."""

    error: str
    adapter: str
    reason: str

    @classmethod
    def of(cls, error: AdapterError) -> AdapterRefused:
        """Return an error as an answer."""
        return cls(type(error).__name__, error.adapter, error.reason)

    def to_error(self) -> AdapterError:
        """Return the error."""
        kind = getattr(errors, self.error, AdapterError)
        if not (isinstance(kind, type) and issubclass(kind, AdapterError)):
            kind = AdapterError
        return kind(self.adapter, self.reason)


class Checked(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Adapters by header."""

    shapes: list[AdapterVersion]  # the versions that differ in more than their content
    shape_of: list[int]  # for each adapter the number of its shape, or -1 if it was refused
    identities: list[Identity]  # identities of those that were not refused, in order
    refused: list[AdapterRefused]  # the refusals, in order

    @classmethod
    def of(cls, found: Sequence[AdapterVersion | AdapterError]) -> Checked:
        """Return versions and refusals as an answer, in which versions of one shape share most of it."""
        numbers: dict[AdapterVersion, int] = {}
        checked = cls([], [], [], [])
        for one in found:
            if isinstance(one, AdapterError):
                checked.shape_of.append(-1)
                checked.refused.append(AdapterRefused.of(one))
            else:
                shape = replace(one, key=AdapterKey(""), source="", layer_digests=b"", file_key="")
                checked.shape_of.append(numbers.setdefault(shape, len(numbers)))
                url = one.source if is_url(one.source) else ""
                checked.identities.append(Identity(one.key, one.layer_digests, one.file_key, url))
        checked.shapes.extend(numbers)
        return checked


Answer: TypeAlias = Packed | Pages | Checked | AdapterRefused

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Answer).decode


def send(pipe: Connection, answer: Answer) -> None:
    """Send an answer to the engine."""
    pipe.send_bytes(_encode(answer))


def ask(pipe: Connection, question: Check | Again | tuple[str, str] | ReaderSettings, limit_s: float) -> None:
    """Send a question to a reader, or its settings; ``Connection.send`` would wait without an end for one that hangs.

    Raises:
        TimeoutError: The reader does not take it within ``limit_s`` seconds.
        OSError: The reader died.
    """
    content = ForkingPickler.dumps(question)
    with socket.socket(fileno=os.dup(pipe.fileno())) as channel:
        channel.settimeout(limit_s)
        try:
            channel.sendall(struct.pack("!i", len(content)) + bytes(content))  # as ``Connection.recv`` takes it
        finally:
            channel.settimeout(None)  # the pipe's own as well


def receive(pipe: Connection, limit_s: float) -> Answer:
    """Return the next answer of a reader.

    ``TimeoutError`` if there is none within ``limit_s`` seconds; ``OSError`` if the reader died, or its answer cannot
    be read.
    """
    answer: Answer = receive_answer(pipe, limit_s, _decode, max_bytes=MAX_ANSWER_BYTES)
    return answer
