"""One book for the workers of a router: each hears what the others have under way, and counts it as its own.

::

    worker 0   chooses by its own book  --- begun, started, ended; taken --->  worker 1   counts them in its book
               the same at any moment,  <---------------------------------                as the others' requests
               but for what is under way between two processes

So a choice costs no question, and each worker is a whole router: it polls backends and judges their health itself.
Each worker connects to all others, to tell, and is connected to by all, to hear. Where a connection ends, the requests
and places that came over it are counted no more. A worker that starts where others run hears them before it accepts
requests: backends may have been added and removed since, and tenants have taken of their limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from itertools import count
from time import monotonic

import msgspec

from manylora.route.choice import Choice, Ticket
from manylora.route.fleet.members import Backends
from manylora.route.fleet.sources import Sources
from manylora.route.metrics import ProxyMetrics, is_of_book
from manylora.route.outbox import (
    Asked,
    Begun,
    Ended,
    Hello,
    Message,
    MetricsTold,
    PlaceTaken,
    Said,
    Started,
    WorkerOutbox,
)
from manylora.route.relay.tenants import RoutedTenants
from manylora.route.workers import RouteWorker
from manylora.serving.http.room import Places
from manylora.serving.metrics.merged import merged_text

__all__ = ["Peers"]

AGAIN_S = 0.05  # time between two tries to reach a worker that is not there, in seconds
HEARD_S = 1.0  # longest wait of a worker that starts for the others, which may start themselves, in seconds
METRICS_S = 1.0  # time that a worker has to tell its metrics; those of one that does not are left out

logger = logging.getLogger(__name__)


class Peers:
    """The other workers. For the event loop's thread alone.

    Args:
        worker: This one.
        outbox: Tells the others.
        choice: Counts their requests.
        backends: The backends, by URL.
        sources: Takes backends in and out.
        metrics: This worker's.
        tenants: Counts places; ``None`` without tenants.
    """

    def __init__(
        self,
        worker: RouteWorker,
        outbox: WorkerOutbox,
        choice: Choice,
        backends: Backends,
        sources: Sources,
        metrics: ProxyMetrics,
        tenants: RoutedTenants | None,
    ) -> None:
        self._worker, self._outbox = worker, outbox
        self._choice, self._backends, self._sources = choice, backends, sources
        self._metrics, self._tenants = metrics, tenants
        self._since = monotonic()
        self._questions = count()
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._decode = msgspec.msgpack.Decoder(list[Message]).decode
        self._server: asyncio.Server | None = None
        self._telling: list[asyncio.Task[None]] = []
        self._unheard = set(worker.others)
        self._has_heard_all = asyncio.Event()

    async def start(self) -> None:
        """Hear the others, and tell them; return once all that run have told of what is open."""
        path = self._worker.path(self._worker.number)
        self._server = await asyncio.start_unix_server(self._hear, path)
        self._telling = [asyncio.create_task(self._keep_telling(number)) for number in self._worker.others]
        if self._worker.is_again:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARD_S):
                    await self._has_heard_all.wait()

    async def stop(self) -> None:
        """Leave the others: they count nothing of this worker any more."""
        if self._server is not None:
            self._server.close()
        for task in self._telling:
            task.cancel()
        await asyncio.gather(*self._telling, return_exceptions=True)

    async def metrics(self) -> bytes:
        """Return the metrics of all workers: gauges of this one, which has the book of all, and each one's counters."""
        asked = {number: (next(self._questions), number) for number in self._outbox.listeners}
        for question, number in asked.values():
            self._asked[question] = asyncio.get_running_loop().create_future()
            self._outbox.send(number, Asked(question))
        if asked:
            await asyncio.wait([self._asked[question] for question, _ in asked.values()], timeout=METRICS_S)
        texts = {str(self._worker.number): self._metrics.render(self._backends)}
        for question, number in asked.values():
            answer = self._asked.pop(question)
            if answer.done():
                texts[str(number)] = answer.result()
        return merged_text(texts, "worker", is_of_book)

    async def _keep_telling(self, number: int) -> None:
        while True:
            with contextlib.suppress(OSError):  # it is not there yet, or has ended
                reader, writer = await asyncio.open_unix_connection(self._worker.path(number))
                try:
                    taken = {} if self._tenants is None else self._tenants.room.taken()
                    places, listed = self._choice.places(), self._sources.listed()
                    hello = Hello(self._worker.number, self._since, places, listed, taken)
                    self._outbox.join(number, writer.transport, hello)
                    await reader.read()  # it says nothing here: returns when it has gone
                finally:
                    self._outbox.leave(number)
                    writer.close()
            await asyncio.sleep(AGAIN_S)

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Count what one worker tells, as long as it is connected."""
        counted: dict[int, Ticket | Places] = {}
        speaker = -1
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4), "big")
                messages = self._decode(await reader.readexactly(size))
                if is_first := isinstance(messages[0], Hello):
                    speaker = messages[0].worker
                for message in messages:
                    self._take(message, speaker, counted, is_first=is_first)
                self._unheard.discard(speaker)
                if not self._unheard:
                    self._has_heard_all.set()
        except (asyncio.IncompleteReadError, OSError, asyncio.CancelledError):  # the last: this worker ends itself
            logger.info("worker_left worker=%d", speaker)
        finally:
            for one in counted.values():
                _end(one)
            writer.close()

    def _take(self, message: Message, speaker: int, counted: dict[int, Ticket | Places], *, is_first: bool) -> None:
        match message:
            case Begun():
                ticket = self._choice.count(message)
                if ticket is not None:
                    counted[message.serial] = ticket
            case Started():
                if isinstance(one := counted.get(message.serial), Ticket):
                    one.started()
            case PlaceTaken():
                if self._tenants is not None:
                    counted[message.serial] = self._tenants.count(message, is_new=not is_first)
            case Ended():
                if (one := counted.pop(message.serial, None)) is not None:
                    _end(one, message.num_tokens)
            case Hello():
                self._sources.adopt(message.listed)
                if message.since < self._since:  # it knows the backends' places, this one has just begun
                    self._choice.arrange(message.places)
                if self._tenants is not None:
                    self._tenants.room.adopt(message.taken)
            case Said():
                self._sources.heed(message)
            case Asked():
                self._outbox.send(speaker, MetricsTold(message.serial, self._metrics.render(self._backends)))
            case MetricsTold():
                if (asked := self._asked.get(message.serial)) is not None and not asked.done():
                    asked.set_result(message.text)


def _end(one: Ticket | Places, num_tokens: int = 0) -> None:
    if isinstance(one, Ticket):
        one.end()
    else:
        one.close(num_tokens)
