"""A process that asks registries, so that the reader of adapters needs no network, and the engine no time.

::

    engine ----- settings, adapters ----->  reader           confined: parses what tenants wrote
           <---- layers in order ---------    |  ^
                                         URL, range  bytes
                                              v  |
                                            this process     asks registries; looks at no byte of the content

The reader may have been taken over by a file. Its questions are decoded as one of two structs, and a URL outside the
registries that the operator allowed is refused here. The process is not confined itself: it must reach hosts.
"""

from __future__ import annotations

import logging
import threading
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

from manylora.core.adapters.remote import RemoteHead
from manylora.core.errors import AdapterError, AdapterUnavailable
from manylora.core.isolation.confine import start_on_pipe
from manylora.core.logs import configure_logging
from manylora.execution.storage.reader_messages import AdapterRefused, ReaderSettings

if TYPE_CHECKING:
    import subprocess

    from manylora.execution.storage.registry_cache import CachedRegistry

__all__ = ["REGISTRY_FOLDER", "PipedRegistry", "RegistryTerms", "main", "start_registry"]

REGISTRY_FOLDER = "registry-files-1"  # name of the cache's folder; another number for another format
MAX_MESSAGE_BYTES = 4 * 1024 * 1024


class RegistryTerms(NamedTuple):
    """How registries are asked."""

    prefixes: tuple[str, ...]  # the URLs that are allowed
    limit_s: float = 120.0  # time for one question
    cache: str | None = None  # folder of files from registries; ``None`` for none
    cache_bytes: int = 0
    is_offline: bool = False  # whether files are read from there alone

    @classmethod
    def of(cls, settings: ReaderSettings) -> RegistryTerms:
        """Return the terms in the settings of a reader."""
        cache = settings.registry_cache, settings.registry_cache_bytes, settings.is_offline
        return cls(settings.registries, settings.limit_s, *cache)

    def open(self) -> CachedRegistry:
        """Return a registry, in this process."""
        from manylora.execution.storage.http_registry import HttpRegistry  # here, since a reader has no use for it
        from manylora.execution.storage.registry_cache import CachedRegistry

        http = HttpRegistry(self.prefixes, limit_s=self.limit_s)
        return CachedRegistry(http, self.cache, self.cache_bytes, is_offline=self.is_offline)


class _Pin(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The question for a folder of a hub in its present commit."""

    name: str
    url: str


class _Pinned(msgspec.Struct, frozen=True, tag=True, array_like=True):
    url: str


class _Open(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The question for the head of a file."""

    name: str
    url: str
    max_bytes: int


class _RangeRead(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The question for a range; answered by as many parts as it takes."""

    name: str
    url: str
    head: RemoteHead
    offset: int
    length: int


class _Opened(msgspec.Struct, frozen=True, tag=True, array_like=True):
    head: RemoteHead


_Question: TypeAlias = _Pin | _Open | _RangeRead
_Answer: TypeAlias = _Pinned | _Opened | bytes | AdapterRefused  # bytes are a part of a range

_encode = msgspec.msgpack.Encoder().encode
_decode_question = msgspec.msgpack.Decoder(_Question).decode
_decode_answer = msgspec.msgpack.Decoder(_Answer).decode


class PipedRegistry:
    """A ``Registry`` at the other end of a pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def pin(self, name: str, url: str) -> str:
        """Return a folder of a hub in its present commit; see ``Registry.pin``."""
        with self._lock:
            answer = self._ask(name, _Pin(name, url))
        assert isinstance(answer, _Pinned)
        return answer.url

    def open(self, name: str, url: str, max_bytes: int) -> RemoteHead:
        """Return the head of a file; see ``Registry.open``."""
        with self._lock:
            answer = self._ask(name, _Open(name, url, max_bytes))
        assert isinstance(answer, _Opened)
        return answer.head

    def read(self, name: str, url: str, head: RemoteHead, offset: int, length: int) -> bytes:
        """Return a range of a file; see ``Registry.read``."""
        content = bytearray()
        with self._lock:
            answer = self._ask(name, _RangeRead(name, url, head, offset, length))
            while True:
                assert isinstance(answer, bytes)
                content += answer
                if len(content) >= length:
                    return bytes(content)
                answer = self._answer(name)

    def _ask(self, name: str, question: _Question) -> _Answer:
        try:
            self._pipe.send_bytes(_encode(question))
        except OSError as error:
            raise _lost(name) from error
        return self._answer(name)

    def _answer(self, name: str) -> _Answer:
        try:
            answer: _Answer = _decode_answer(self._pipe.recv_bytes(MAX_MESSAGE_BYTES))
        except (OSError, EOFError) as error:
            raise _lost(name) from error
        if isinstance(answer, AdapterRefused):
            raise answer.to_error()
        return answer


def start_registry(terms: RegistryTerms) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a process that asks registries; return it, and the end of its pipe for a ``PipedRegistry``.

    ``OSError`` if the process could not be started.
    """
    process, pipe = start_on_pipe(__name__)
    try:
        pipe.send(terms)
    except OSError:
        pipe.close()
        raise
    return process, pipe


def main(descriptor: int) -> None:
    """Run the process at the other end of a pipe."""
    configure_logging(logging.WARNING, "registry")
    pipe = Connection(descriptor)
    try:
        terms: RegistryTerms = pipe.recv()  # from the engine; all else is from the reader
        registry = terms.open()
        while True:
            question: _Question = _decode_question(pipe.recv_bytes(MAX_MESSAGE_BYTES))
            try:
                if isinstance(question, _Pin):
                    pipe.send_bytes(_encode(_Pinned(registry.pin(question.name, question.url))))
                elif isinstance(question, _Open):
                    pipe.send_bytes(_encode(_Opened(registry.open(question.name, question.url, question.max_bytes))))
                else:
                    asked = question.name, question.url, question.head, question.offset, question.length
                    for part in registry.parts(*asked):
                        pipe.send_bytes(_encode(part))
            except AdapterError as error:
                pipe.send_bytes(_encode(AdapterRefused.of(error)))
    except (EOFError, OSError):  # the reader has ended
        return


def _lost(name: str) -> AdapterUnavailable:
    return AdapterUnavailable(name, "the process that asks registries died while it read this one")
