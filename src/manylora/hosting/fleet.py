"""The engines of a service behind one interface, for routes, the offline API and load tests.

A router picks the engine of each request, as in a simulation with replicas. Adapters are loaded on all engines. Each
engine is restarted by itself, and its death fails its own requests alone. The server runs a fleet of one engine.

::

    submit ---> Dispatcher ---> EngineKeeper 0 ---> EngineClient ---> link ---> engine
    adapters.load, pin ... -+-> EngineKeeper 1 ---> EngineClient ---> link ---> engine
                            |
                            +-> AdapterBook: recorded after all engines, read by an engine that restarts
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from random import Random
from typing import TypeVar

from manylora.engine.status import AdapterStatus, EngineStats
from manylora.errors import AdapterError, CapacityError, EngineDead, ManyloraError
from manylora.hosting.adapter_book import AdapterBook, LoraModule
from manylora.hosting.client import EngineClient, OutputStream
from manylora.hosting.engine_keeper import EngineKeeper, RestartPolicy, State
from manylora.hosting.fleet_adapters import FleetAdapters, successes
from manylora.hosting.link import EngineLink
from manylora.hosting.protocol import EngineInfo, Observations
from manylora.hosting.snapshot import busiest, merge_stats, merge_statuses
from manylora.routing import DEFAULT_ROUTER, Dispatcher, ReplicaReport, Router, RouterContext
from manylora.routing import make_router as router_named
from manylora.types import Request

__all__ = ["Fleet"]

T = TypeVar("T")

logger = logging.getLogger(__name__)

UNAVAILABLE = {
    State.STARTING: ("The server is starting; please try again.", 5),
    State.RESTARTING: ("The engine died and is being restarted; please try again.", 5),
    State.DRAINING: ("The server is shutting down and takes no new requests.", 10),
    State.STOPPED: ("The server is shutting down and takes no new requests.", 10),
}
"""The reason why no engine serves, and ``Retry-After`` in seconds."""

REPORT_EVERY_S = 1.0
"""Seconds between two reports of an engine to the router."""

BEST_FIRST = (State.SERVING, State.RESTARTING, State.STARTING, State.DRAINING, State.STOPPED)


class Fleet:
    """One or several engines of one configuration. For the event loop's thread alone.

    Args:
        links: For each engine, a function that returns the link to a new one.
        served_name: The base model's name, which no adapter may have.
        observe: Called with the engines' observations.
        epoch_s: Returns the time in seconds since the epoch.
        restarts: When to restart an engine and when to give it up.
        hang_timeout_s: Seconds without progress after which an engine counts as hung; ``None`` for never.
        make_router: Returns the router of several engines, given the adapters' ranks by name; ``None`` for the default.
    """

    def __init__(
        self,
        links: Sequence[Callable[[], EngineLink]],
        *,
        served_name: str,
        observe: Callable[[Observations], None],
        epoch_s: Callable[[], float] = time.time,
        restarts: RestartPolicy | None = None,
        hang_timeout_s: float | None = None,
        make_router: Callable[[Mapping[str, int]], Router] | None = None,
    ) -> None:
        self.served_name = served_name
        self._book = AdapterBook(served_name=served_name, epoch_s=epoch_s)
        self.adapters = FleetAdapters(self._book, self._serving, num_engines=len(links))
        self._required: frozenset[str] | None = None  # while starting
        self._dispatcher: Dispatcher | None = None  # none for one engine, which saves its counting
        if len(links) > 1:
            ranks = self._book.ranks
            context = RouterContext(rng=Random(0), base_name=served_name, ranks=ranks)
            router = router_named(DEFAULT_ROUTER, context) if make_router is None else make_router(ranks)
            self._dispatcher = Dispatcher(router, len(links), ranks)

        def make_client(engine: int, make_link: Callable[[], EngineLink]) -> EngineClient:
            dispatcher = self._dispatcher
            if dispatcher is None:
                return EngineClient(make_link(), observe=observe)
            dispatcher.restarted(engine)
            return EngineClient(make_link(), observe=observe, on_started=dispatcher.started, on_ended=dispatcher.ended)

        self._keepers = [
            EngineKeeper(
                partial(make_client, engine, make_link),
                self._book,
                lose=self._lose,
                restarts=restarts or RestartPolicy(),
                hang_timeout_s=hang_timeout_s,
            )
            for engine, make_link in enumerate(links)
        ]
        self._num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """The state of the fleet: that of its best engine."""
        states = [keeper.state for keeper in self._keepers]
        return next(state for state in BEST_FIRST if state in states)

    @property
    def info(self) -> EngineInfo:
        """Limits and sizes of an engine; the same for every engine of one configuration.

        Raises:
            CapacityError: No engine has started yet.
        """
        for keeper in self._keepers:
            if keeper.info is not None:
                return keeper.info
        raise _unavailable(State.STARTING)

    @property
    def num_restarts(self) -> int:
        """Restarts of all engines."""
        return sum(keeper.num_restarts for keeper in self._keepers)

    @property
    def num_in_flight(self) -> int:
        """Number of answers in progress; see ``in_flight``."""
        return self._num_in_flight

    @property
    def pids(self) -> list[int | None]:
        """The process of each engine; ``None`` before it has started."""
        return [None if keeper.client is None else keeper.client.pid for keeper in self._keepers]

    def check_serving(self) -> None:
        """Raise ``CapacityError``, with the reason and ``Retry-After``, unless requests are accepted."""
        if self.state is not State.SERVING:
            raise _unavailable(self.state)

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self, modules: Sequence[LoraModule] = ()) -> None:
        """Start the engines and load the adapters given at start.

        Raises:
            ManyloraError: An engine refused its configuration, or a required adapter, named in the message.
        """
        self._book.open(modules)
        self._required = frozenset(module.name for module in modules if module.is_required)
        await asyncio.gather(*(keeper.start() for keeper in self._keepers))
        self._required = None

    async def run(self) -> None:
        """Watch the engines and restart those that die, until drained or stopped.

        Raises:
            EngineDead: Every engine died too often.
        """
        reporting = asyncio.create_task(self._report())
        try:
            await asyncio.gather(*(self._keep(keeper) for keeper in self._keepers))
        finally:
            reporting.cancel()

    def drain(self) -> None:
        """Refuse new requests from now on."""
        for keeper in self._keepers:
            keeper.drain()

    async def idle(self) -> None:
        """Wait until no answer is in progress."""
        while self._num_in_flight:
            await self._idle.wait()

    @contextlib.contextmanager
    def in_flight(self) -> Iterator[None]:
        """Count an answer as in progress while inside: to its last byte."""
        self._num_in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_in_flight -= 1
            if not self._num_in_flight:
                self._idle.set()

    async def stop(self, reason: str = "The server is shutting down.") -> None:
        """End the engines; requests and calls in flight fail with ``reason``."""
        await asyncio.gather(*(keeper.stop(EngineDead(reason)) for keeper in self._keepers))

    # -- requests ----------------------------------------------------------------------------------------------------

    async def submit(self, requests: Sequence[Request]) -> OutputStream:
        """Add requests, all or none, and return the stream of their outputs once the engines have accepted them.

        Raises:
            RequestError: A request is invalid.
            CapacityError: The queue is full, or no engine serves.
            EngineDead: An engine died before it had answered.
        """
        stream = OutputStream()
        await self._dispatch(requests, stream, each=False)
        return stream

    async def submit_each(self, requests: Sequence[Request], stream: OutputStream) -> dict[str, ManyloraError]:
        """Add the valid requests, with outputs on an existing stream; return the errors of the others by request id.

        Raises:
            CapacityError: No engine serves.
            EngineDead: An engine died before it had answered; no request is left.
        """
        return await self._dispatch(requests, stream, each=True)

    def cancel(self, request_ids: Sequence[str], *, stopped: bool = False) -> None:
        """Cancel requests, as ``EngineClient.cancel``."""
        for keeper in self._keepers:
            if keeper.client is not None:
                keeper.client.cancel(request_ids, stopped=stopped)

    async def snapshot(
        self, num_adapters: int | None = None, *, only_in_use: bool = False, name: str | None = None
    ) -> tuple[EngineStats, tuple[AdapterStatus, ...]]:
        """Return the counters of all engines and the state of every adapter, or of some as of ``TakeSnapshot``.

        Raises:
            CapacityError: No engine serves.
            EngineDead: The engines died before they had answered.
        """
        clients = list(self._serving().values())
        if len(clients) == 1:
            return await clients[0].snapshot(num_adapters, only_in_use=only_in_use, name=name)
        # Counters of an adapter are summed over engines, so each reports all adapters.
        asked = None if num_adapters != 0 else 0
        taken = await asyncio.gather(
            *(client.snapshot(asked, only_in_use=only_in_use, name=name) for client in clients), return_exceptions=True
        )
        parts = successes(taken)
        statuses = merge_statuses([statuses for _, statuses in parts])
        if num_adapters is not None:
            statuses = busiest(statuses, num_adapters)
        return merge_stats([stats for stats, _ in parts]), statuses

    # -- the engines -------------------------------------------------------------------------------------------------

    def _serving(self) -> dict[int, EngineClient]:
        """Return the engines that serve, by number; ``CapacityError`` if none does."""
        clients = {
            index: keeper.client
            for index, keeper in enumerate(self._keepers)
            if keeper.state is State.SERVING and keeper.client is not None
        }
        if not clients:
            raise _unavailable(self.state)
        return clients

    async def _dispatch(
        self, requests: Sequence[Request], stream: OutputStream, *, each: bool
    ) -> dict[str, ManyloraError]:
        """Submit every request to its engine."""
        clients = self._serving()
        if self._dispatcher is None:
            return await clients[0].submit(requests, stream, each=each)
        shares: dict[int, list[Request]] = {}
        for request in requests:
            shares.setdefault(self._dispatcher.dispatch(request, clients), []).append(request)
        submitted = [clients[engine].submit(share, stream, each=each) for engine, share in shares.items()]
        refused: dict[str, ManyloraError] = {}
        try:
            for errors in await asyncio.gather(*submitted):
                refused |= errors
        except BaseException:
            self.cancel([request.request_id for request in requests])
            raise
        return refused

    async def _report(self) -> None:
        """Tell the router, about once a second, what the engines report."""
        dispatcher = self._dispatcher
        while dispatcher is not None:
            await asyncio.sleep(REPORT_EVERY_S)
            for engine, keeper in enumerate(self._keepers):
                if keeper.state is not State.SERVING or keeper.client is None or keeper.info is None:
                    continue
                with contextlib.suppress(ManyloraError, TimeoutError):  # it died or hangs: its keeper sees to that
                    async with asyncio.timeout(REPORT_EVERY_S):
                        stats, _ = await keeper.client.snapshot(0)
                    dispatcher.report(engine, ReplicaReport.of(stats, keeper.info.block_size))

    async def _lose(self, error: AdapterError) -> None:
        """Unload an adapter that an engine could not load; raise ``error`` if the start requires the adapter."""
        if self._required is not None and error.adapter in self._required:
            raise error
        event = "adapter_lost" if self._required is None else "adapter_left_out"
        logger.error("%s name=%s reason=%s", event, error.adapter, error.reason)
        await self.adapters.lose(error.adapter)

    async def _keep(self, keeper: EngineKeeper) -> None:
        try:
            await keeper.run()
        except EngineDead as error:
            if all(one.state is State.STOPPED for one in self._keepers):
                raise
            logger.error("engine_given_up engine=%d error=%s", self._keepers.index(keeper), error)


def _unavailable(state: State) -> CapacityError:
    reason, retry_after_s = UNAVAILABLE[state]
    return CapacityError(reason, retry_after_s=retry_after_s, status=503)
