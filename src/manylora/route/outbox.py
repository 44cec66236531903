"""What one worker of a router tells the others: requests at backends, tenants' places, backends that were added.

Messages of one turn of the event loop leave together. Requests and places under way are kept, and told again to a
worker that comes up or is connected anew: so no message need arrive for good, and a lost worker takes its own along.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from itertools import count

import msgspec

from manylora.core.routing.view import Sent

__all__ = [
    "Asked",
    "Begun",
    "Ended",
    "Hello",
    "Listed",
    "Message",
    "MetricsTold",
    "PlaceTaken",
    "Said",
    "Started",
    "WorkerOutbox",
]

MOST_UNREAD_BYTES = 16 << 20
"""Bytes that may wait for a worker that does not read; beyond them it is left, and told all that is open later."""

logger = logging.getLogger(__name__)


class _Told(msgspec.Struct, array_like=True, tag=True):
    pass


class Begun(_Told):
    """A request counts at a backend from now on; ``blocks`` are those of its prompt."""

    serial: int
    url: str
    adapter: str | None
    rank: int
    num_prompt_tokens: int
    num_cached_tokens: int
    blocks: list[int]


class Started(_Told):
    """The prompt of a request has run."""

    serial: int


class PlaceTaken(_Told):
    """A tenant has a place, and took so many tokens."""

    serial: int
    caller: str
    adapter: str | None
    num_tokens: int


class Ended(_Told):
    """A request has left its backend, or a tenant its place after an answer of so many tokens."""

    serial: int
    num_tokens: int = 0


class Said(_Told):
    """A backend was added by the admin routes, with its key (empty for the common one), or removed (``None``)."""

    url: str
    key: str | None
    at: float  # when, in monotonic seconds: of two changes of one backend the later one counts


class Listed(_Told):
    """The last change of each backend; of those that were removed, and are in no source since, its time by URL."""

    said: list[Said]
    gone: dict[str, float]


class Hello(_Told):
    """The first message: who speaks, since when (monotonic seconds), its backends by place, and what tenants took.

    The latter are requests and tokens of the last minute, by caller, with those of the places that are told with it.
    """

    worker: int
    since: float
    places: list[str | None]
    listed: Listed
    taken: Mapping[str, tuple[float, float]]


class Asked(_Told):
    """The speaker asks for the metrics of this worker."""

    serial: int


class MetricsTold(_Told):
    """The answer, as Prometheus text."""

    serial: int
    text: bytes


Message = Begun | Started | PlaceTaken | Ended | Said | Hello | Asked | MetricsTold


class WorkerOutbox:
    """Tells the other workers. For the event loop's thread alone."""

    def __init__(self) -> None:
        self._serials = count(1)
        self._open: dict[int, list[Message]] = {}  # what a new listener is told of each that is open
        self._unsent: list[Message] = []
        self._listeners: dict[int, asyncio.WriteTransport] = {}  # by number of the worker
        self._encode = msgspec.msgpack.Encoder().encode

    @property
    def listeners(self) -> list[int]:
        """The workers that are connected."""
        return list(self._listeners)

    def begun(self, url: str, sent: Sent, blocks: Seq[int]) -> int:
        """Tell of a request at a backend; return its number here."""
        serial = next(self._serials)
        begun = Begun(
            serial, url, sent.adapter, sent.rank, sent.num_prompt_tokens, sent.num_cached_tokens, list(blocks)
        )
        return self._opened(serial, begun)

    def taken(self, caller: str, adapter: str | None, num_tokens: int) -> int:
        """Tell of a tenant's place; return its number here."""
        serial = next(self._serials)
        return self._opened(serial, PlaceTaken(serial, caller, adapter, num_tokens))

    def started(self, serial: int) -> None:
        """Tell that a prompt has run."""
        message = Started(serial)
        self._open[serial].append(message)
        self.tell(message)

    def ended(self, serial: int, num_tokens: int = 0) -> None:
        """Tell that a request or a place has ended."""
        del self._open[serial]
        self.tell(Ended(serial, num_tokens))

    def tell(self, message: Message) -> None:
        """Tell all workers, at the end of this turn of the event loop."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(message)

    def send(self, worker: int, message: Message) -> None:
        """Tell one worker, if it is connected."""
        if worker in self._listeners:
            self._write([worker], [message])

    def join(self, worker: int, listener: asyncio.WriteTransport, hello: Hello) -> None:
        """Begin to tell a worker: first all that is open."""
        self._flush()  # it is open, or has ended: not told twice
        self._listeners[worker] = listener
        self._write([worker], [hello, *(one for messages in self._open.values() for one in messages)])

    def leave(self, worker: int) -> None:
        """Tell a worker no more."""
        self._listeners.pop(worker, None)

    def _opened(self, serial: int, message: Message) -> int:
        self._open[serial] = [message]
        self.tell(message)
        return serial

    def _flush(self) -> None:
        messages, self._unsent = self._unsent, []
        if messages:
            self._write(self.listeners, messages)

    def _write(self, workers: Iterable[int], messages: list[Message]) -> None:
        text = self._encode(messages)
        for worker in workers:
            listener = self._listeners[worker]
            if listener.is_closing():  # it has ended, and its connection is noticed next: a write would be an error
                self.leave(worker)
                continue
            listener.write(len(text).to_bytes(4, "big") + text)
            if listener.get_write_buffer_size() > MOST_UNREAD_BYTES:
                logger.warning("worker_does_not_read worker=%d", worker)
                self.leave(worker)
                listener.abort()
