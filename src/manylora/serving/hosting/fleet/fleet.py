"""The engines of a service behind one interface, for routes, the offline API and load tests.

A router picks the engine of each request, as in a simulation with replicas. Adapters are loaded on all engines. Each
engine is restarted by itself, and its requests go on elsewhere meanwhile.

::

    submit ---> FleetRequests ---> EngineKeeper 0 ---> EngineClient ---> link ---> engine
                   |     ^
                   |     +--- Resumer: requests of lost engines, with their answers so far
                   +-------------> EngineKeeper 1 ---> EngineClient ---> link ---> engine
    adapters.load, pin ... -+--->
                            +-> AdapterBook: recorded after all engines, read by an engine that restarts
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from random import Random
from typing import TypeVar

from manylora.core.errors import AdapterError, CapacityError, EngineDead, ManyloraError, RequestError, SnapshotFailed
from manylora.core.routing import DEFAULT_ROUTER, Dispatcher, FallbackRouter, ReplicaReport, Router, RouterContext
from manylora.core.routing import make_router as router_named
from manylora.core.scaling import LoadWatch, ScalingController, ScalingDecision, ScalingPolicy, WatchedDispatcher
from manylora.core.types import Request
from manylora.serving.hosting.fleet.adapter_book import AdapterBook, LoraModule
from manylora.serving.hosting.fleet.adapters import FleetAdapters
from manylora.serving.hosting.fleet.engines import ENDED, FleetEngines
from manylora.serving.hosting.fleet.keeper import EngineKeeper, EngineState, RestartPolicy
from manylora.serving.hosting.fleet.replica import Replica, describe
from manylora.serving.hosting.fleet.requests import FleetRequests
from manylora.serving.hosting.fleet.resumption import ResumePolicy, ResumeStats
from manylora.serving.hosting.fleet.scaling import FleetScaling
from manylora.serving.hosting.fleet.snapshot import Snapshot, merge_snapshots
from manylora.serving.hosting.links.client import EngineClient
from manylora.serving.hosting.links.in_flight import OutputStream
from manylora.serving.hosting.links.link import EngineLink
from manylora.serving.hosting.protocol import EngineInfo, Observations

__all__ = ["Fleet"]

T = TypeVar("T")

logger = logging.getLogger(__name__)

UNAVAILABLE = {
    EngineState.STARTING: ("The server is starting; please try again.", 5),
    EngineState.RESTARTING: ("The engine died and is being restarted; please try again.", 5),
    EngineState.DRAINING: ("The server is shutting down and takes no new requests.", 10),
    EngineState.STOPPED: ("The server is shutting down and takes no new requests.", 10),
    EngineState.IDLE: ("The server is starting; please try again.", 5),
}
"""The reason why no engine serves, and ``Retry-After`` in seconds."""

REPORT_EVERY_S = 1.0
"""Seconds between two reports of an engine to the router."""

BEST_FIRST = (
    EngineState.SERVING,
    EngineState.RESTARTING,
    EngineState.STARTING,
    EngineState.DRAINING,
    EngineState.STOPPED,
    EngineState.IDLE,
)

SNAPSHOT_S = 5.0
"""Longest wait for the snapshot of one of several engines."""


class Fleet:
    """One or several engines of one configuration. For the event loop's thread alone.

    Args:
        links: For each engine, a function that returns the link to a new one; with ``scaling`` as many as it allows.
        served_name: The base model's name, which no adapter may have.
        observe: Called with the engines' observations.
        epoch_s: Returns the time in seconds since the epoch.
        restarts: When to restart an engine and when to give it up.
        hang_timeout_s: Seconds without progress after which an engine counts as hung; ``None`` for never.
        start_timeout_s: Time for an engine to start, in seconds; ``None`` for any.
        make_router: Returns the router of several engines, given the adapters' ranks by name; ``None`` for the default.
        resumes: When requests of a lost engine go on elsewhere; ``None`` for never.
        seed: Seeds the draws of requests without a seed of their own, made here where they outlive an engine; ``None``
            leaves the draws to the engine.
        scaling: Starts and drains engines by the load; ``None`` for a fixed number.
        drain_timeout_s: Seconds that requests of an engine have to end when scaling drains it, before they move on.
        keeps_required: Whether an engine that starts again needs the adapters required at the start; if not, one that
            it cannot load is unloaded.
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
        start_timeout_s: float | None = None,
        make_router: Callable[[Mapping[str, int]], Router] | None = None,
        resumes: ResumePolicy | None = None,
        seed: int | None = None,
        scaling: ScalingPolicy | None = None,
        drain_timeout_s: float = 30.0,
        keeps_required: bool = False,
    ) -> None:
        assert scaling is None or scaling.max_replicas == len(links)
        self.served_name = served_name
        self._book = AdapterBook(served_name=served_name, epoch_s=epoch_s)
        self.adapters = FleetAdapters(self._book, self._serving, num_engines=len(links))
        self._required: frozenset[str] | None = None  # while starting, or for ever
        self._keeps_required = keeps_required
        self._dispatcher: Dispatcher | None = None  # none for one engine, which saves its counting
        if len(links) > 1:
            ranks = self._book.ranks
            context = RouterContext(rng=Random(0), base_name=served_name, ranks=ranks)
            router = FallbackRouter(
                router_named(DEFAULT_ROUTER, context) if make_router is None else make_router(ranks)
            )
            if scaling is None:
                self._dispatcher = Dispatcher(router, len(links), ranks)
            else:
                watch = LoadWatch(scaling.ttft_s)
                self._dispatcher = WatchedDispatcher(router, len(links), ranks, watch=watch, now=time.monotonic)
                controller = ScalingController(scaling, self._dispatcher.views, watch)

        self._requests = FleetRequests(
            self._serving,
            self._going_on,
            lambda: [keeper.client for keeper in self._keepers if keeper.client is not None],
            route=None if self._dispatcher is None else self._dispatcher.dispatch,
            seed=seed,
            resumes=resumes or ResumePolicy(max_resumes=0),
        )

        def make_client(engine: int, make_link: Callable[[], EngineLink]) -> EngineClient:
            dispatcher, lost = self._dispatcher, self._requests.lost
            if dispatcher is None:
                return EngineClient(make_link(), observe=observe, on_lost=lost)
            dispatcher.restarted(engine)
            return EngineClient(
                make_link(), observe=observe, on_started=dispatcher.started, on_ended=dispatcher.ended, on_lost=lost
            )

        self._keepers = [
            EngineKeeper(
                partial(make_client, engine, make_link),
                self._book,
                lose=self._lose,
                restarts=restarts or RestartPolicy(),
                hang_timeout_s=hang_timeout_s,
                start_timeout_s=start_timeout_s,
                on_change=self._requests.wake,
                is_alone=lambda keeper: self._engines.is_alone(keeper),
                state=EngineState.STARTING if scaling is None or engine < scaling.min_replicas else EngineState.IDLE,
            )
            for engine, make_link in enumerate(links)
        ]
        self._engines = FleetEngines(self._keepers)
        self._scaling: FleetScaling | None = None
        if scaling is not None and len(links) > 1:
            self._scaling = FleetScaling(
                controller,
                self._keepers,
                watch=self._engines.watch,
                drain=partial(self._engines.give_back, timeout_s=drain_timeout_s),
            )
        self._num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
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
        raise _unavailable(EngineState.STARTING)

    @property
    def num_replicas(self) -> int:
        """Engines of the fleet, whether they serve or not."""
        return len(self._keepers)

    @property
    def num_restarts(self) -> int:
        """Restarts of all engines."""
        return sum(keeper.num_restarts for keeper in self._keepers)

    @property
    def resumes(self) -> ResumeStats:
        """Counters of requests that went on after the loss of an engine."""
        return self._requests.resumes

    @property
    def num_in_flight(self) -> int:
        """Number of answers in progress; see ``in_flight``."""
        return self._num_in_flight

    @property
    def pids(self) -> list[int | None]:
        """The process of each engine; ``None`` before it has started."""
        return [None if keeper.client is None else keeper.client.pid for keeper in self._keepers]

    def hidden_from(self, tenant: str) -> frozenset[str]:
        """Return nothing: every tenant may call every adapter."""
        return frozenset()

    def check_serving(self) -> None:
        """Raise ``CapacityError``, with the reason and ``Retry-After``, unless requests are accepted."""
        if self.state is not EngineState.SERVING:
            raise _unavailable(self.state)

    def check_room(self) -> None:
        """Raise ``CapacityError`` unless an engine may take a new request; a submission is checked by its engine again.

        It costs next to nothing, so that a request beyond all room is refused before its body is read.
        """
        self._requests.check_room()

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self, modules: Sequence[LoraModule] = ()) -> None:
        """Start the engines and load the adapters given at start.

        Of several engines one may fail, for any other reason than these; ``run`` tries it again.

        Raises:
            ManyloraError: An engine refused its configuration, or a required adapter, named in the message. Or no
                engine came up.
        """
        self._book.open(modules)
        self._required = frozenset(module.name for module in modules if module.is_required)
        await self._engines.start()
        if not self._keeps_required:
            self._required = None

    async def run(self) -> None:
        """Watch the engines and restart those that die, until drained or stopped.

        Raises:
            EngineDead: An engine died too often, and no other serves or may soon.
        """
        beside = [self._report(), self.adapters.retry()]
        await self._engines.run(beside if self._scaling is None else [*beside, self._scaling.run()])

    def drain(self) -> None:
        """Refuse new requests from now on; those in flight may finish, on any engine."""
        if self._scaling is not None:
            self._scaling.close()
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

    async def stop(self, error: ManyloraError | None = None) -> None:
        """End the engines; requests and calls in flight fail with ``error``, by default ``EngineDead``."""
        error = error or EngineDead("The server is shutting down.")
        self._requests.close(error)
        await asyncio.gather(*(keeper.stop(error) for keeper in self._keepers))

    # -- requests ----------------------------------------------------------------------------------------------------

    async def submit(self, requests: Sequence[Request]) -> OutputStream:
        """Add requests, all or none, and return the stream of their outputs once the engines have accepted them.

        Raises:
            RequestError: A request is invalid.
            CapacityError: The queue is full, or no engine serves.
            EngineDead: An engine died before it had answered.
        """
        for model in {one.model for one in requests} if self.adapters.unavailable else ():
            self.adapters.check_available(model.removeprefix(f"{self.served_name}:"))
        stream = OutputStream()
        await self._requests.submit(requests, stream, each=False)
        return stream

    async def submit_each(self, requests: Sequence[Request], stream: OutputStream) -> dict[str, ManyloraError]:
        """Add the valid requests, with outputs on an existing stream; return the errors of the others by request id.

        Raises:
            CapacityError: No engine serves.
            EngineDead: An engine died before it had answered; no request is left.
        """
        return await self._requests.submit(requests, stream, each=True)

    def cancel(self, request_ids: Sequence[str], *, stopped: bool = False) -> None:
        """Cancel requests, as ``EngineClient.cancel``."""
        self._requests.cancel(request_ids, stopped=stopped)

    async def snapshot(
        self, num_adapters: int | None = None, *, only_in_use: bool = False, name: str | None = None
    ) -> Snapshot:
        """Return the counters of all engines and the state of every adapter, or of some as of ``TakeSnapshot``.

        Raises:
            CapacityError: No engine serves.
            EngineDead: The engines died before they had answered.
            SnapshotFailed: The state of no engine could be read.
        """
        parts = await self.snapshots(num_adapters, only_in_use=only_in_use, name=name)
        return merge_snapshots(list(parts.values()), num_adapters)

    async def snapshots(
        self, num_adapters: int | None = None, *, only_in_use: bool = False, name: str | None = None
    ) -> dict[int, Snapshot]:
        """Return the snapshot of each engine that serves and answers, by number; otherwise as ``snapshot``.

        Of several engines each reports all adapters, because their counters are summed.
        """
        clients = self._serving()
        limit = num_adapters if len(clients) == 1 or num_adapters == 0 else None

        def take(client: EngineClient) -> Awaitable[Snapshot]:
            return client.snapshot(limit, only_in_use=only_in_use, name=name)

        if len(clients) == 1:
            return {index: await take(client) for index, client in clients.items()}
        # An engine that hangs must not hide the others.
        taking = [asyncio.wait_for(take(client), SNAPSHOT_S) for client in clients.values()]
        taken = dict(zip(clients, await asyncio.gather(*taking, return_exceptions=True), strict=True))
        parts = {index: part for index, part in taken.items() if not isinstance(part, BaseException)}
        for part in taken.values():
            is_of_one = isinstance(part, EngineDead | SnapshotFailed | TimeoutError)
            if isinstance(part, BaseException) and not (parts and is_of_one):
                raise part
        return parts

    def replicas(self) -> list[Replica]:
        """Return the state of each engine in use, as the API process knows it."""
        return describe(self._keepers)

    def num_by_state(self) -> Counter[EngineState]:
        """Return the number of engines in each state, with those that scaling has not started."""
        return Counter(keeper.state for keeper in self._keepers)

    @property
    def scaling(self) -> ScalingDecision | None:
        """The last decision about the number of engines; ``None`` if it is fixed, and before the first."""
        return None if self._scaling is None else self._scaling.controller.decision

    async def drain_replica(self, index: int, timeout_s: float) -> None:
        """End one engine for good: its requests may finish for ``timeout_s`` seconds, then they go on elsewhere.

        Raises:
            RequestError: There is no such engine, or no other serves.
        """
        if not 0 <= index < len(self._keepers):
            raise RequestError(f"Got replica {index}, expected 0 to {len(self._keepers) - 1}", param="replica")
        if self._keepers[index].state is not EngineState.SERVING:
            raise RequestError(f"Got replica {index}, which does not serve", param="replica")
        if len(self._serving()) == 1:
            raise RequestError(f"Got replica {index}, the only one that serves", param="replica")
        await self._keepers[index].retire(timeout_s)
        logger.warning("replica_drained replica=%d", index)

    # -- the engines -------------------------------------------------------------------------------------------------

    def _serving(self) -> dict[int, EngineClient]:
        """Return the engines that serve, by number.

        Raises:
            CapacityError: None does.
            EngineDead: All are dead, and are not watched and restarted.
        """
        clients = {
            index: keeper.client
            for index, keeper in enumerate(self._keepers)
            if keeper.state is EngineState.SERVING and keeper.client is not None
        }
        if not clients:
            raise _unavailable(self.state)
        alive = {index: client for index, client in clients.items() if client.loss is None}
        for index, client in clients.items():
            if not alive and client.loss is not None:
                raise _unavailable(EngineState.RESTARTING) if self._engines.is_watched(index) else client.loss.error
        return alive

    def _going_on(self) -> dict[int, EngineClient]:
        """Return the engines that take the rest of answers, by number; ``EngineDead`` if none will again."""
        if all(keeper.state in ENDED for keeper in self._keepers):
            raise EngineDead("Every engine has stopped.")
        return {
            index: keeper.client
            for index, keeper in enumerate(self._keepers)
            if keeper.is_up and keeper.client is not None and keeper.client.loss is None
        }

    async def _report(self) -> None:
        """Tell the router, about once a second, what the engines report."""
        dispatcher = self._dispatcher

        async def report(engine: int, keeper: EngineKeeper) -> None:
            if (
                dispatcher is None
                or keeper.state is not EngineState.SERVING
                or keeper.client is None
                or keeper.info is None
            ):
                return
            with contextlib.suppress(ManyloraError, TimeoutError):  # it died or hangs: its keeper sees to that
                async with asyncio.timeout(REPORT_EVERY_S):
                    stats, _ = await keeper.client.snapshot(0)
                dispatcher.report(engine, ReplicaReport.of(stats, keeper.info.block_size))

        while dispatcher is not None:
            await asyncio.sleep(REPORT_EVERY_S)
            # At once: engines that hang must not hold up the reports of the others.
            await asyncio.gather(*(report(engine, keeper) for engine, keeper in enumerate(self._keepers)))

    async def _lose(self, error: AdapterError) -> None:
        """Unload an adapter that an engine could not load; raise ``error`` if the start requires the adapter."""
        if self._required is not None and error.adapter in self._required:
            raise error
        event = "adapter_lost" if self._required is None else "adapter_left_out"
        logger.error("%s name=%s reason=%s", event, error.adapter, error.reason)
        await self.adapters.lose(error)


def _unavailable(state: EngineState) -> CapacityError:
    reason, retry_after_s = UNAVAILABLE[state]
    return CapacityError(reason, retry_after_s=retry_after_s, status=503)
