"""The engines of a service behind one face: what routes, the offline API and load tests talk to.

Requests go to the engine that a router picks, as replicas of a simulation do; adapters are loaded on all engines and
known by name; each engine is kept alive by itself, and its death is felt by its own requests alone. Today's server is
a fleet of one.

::

    submit ---> Dispatcher ---> EngineKeeper 0 ---> EngineClient ---> link ---> engine
    load_adapter, pin ... --+-> EngineKeeper 1 ---> EngineClient ---> link ---> engine
                            |
                            +-> AdapterBook: written when all engines have done it, read when one starts again
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from random import Random
from typing import TypeVar

import msgspec

from manylora.engine.status import AdapterStatus, EngineStats
from manylora.errors import AdapterError, CapacityError, EngineDead, ManyloraError
from manylora.hosting.adapter_book import AdapterBook, LoadedAdapter, LoraModule
from manylora.hosting.client import EngineClient, OutputStream
from manylora.hosting.engine_keeper import EngineKeeper, RestartPolicy, State
from manylora.hosting.link import EngineLink
from manylora.hosting.protocol import EngineInfo, Fault, Observations
from manylora.hosting.snapshot import busiest, merge_stats, merge_statuses
from manylora.routing import Dispatcher, RouterContext, make_router
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
"""Why no engine serves, and when to try again, in seconds."""

BEST_FIRST = (State.SERVING, State.RESTARTING, State.STARTING, State.DRAINING, State.STOPPED)


class Fleet:
    """One or several engines of one configuration. Belongs to the event loop's thread.

    Args:
        links: Makes the link to a new engine; one entry for each engine.
        served_name: The base model's name, which no adapter may take.
        observe: Takes the engines' observations.
        epoch_s: Tells the time for people, in seconds since the epoch.
        restarts: When to restart an engine and when to give it up.
        hang_timeout_s: Seconds without a sign of life after which an engine counts as dead; ``None`` for never.
        router: Which engine serves a request, by name in ``routing.ROUTERS``; or somebody's own.
    """

    def __init__(
        self,
        links: Sequence[Callable[[], EngineLink]],
        *,
        served_name: str,
        observe: Callable[[Observations], None],
        epoch_s: Callable[[], float],
        restarts: RestartPolicy | None = None,
        hang_timeout_s: float | None = None,
        router: str = "affinity",
    ) -> None:
        self.served_name = served_name
        self._book = AdapterBook(served_name=served_name, epoch_s=epoch_s)
        self._required: frozenset[str] = frozenset()
        self._has_started = False
        self._dispatcher: Dispatcher | None = None  # one engine needs none, nor the work of counting for it
        if len(links) > 1:
            context = RouterContext(rng=Random(0), base_name=served_name, ranks=self._book.ranks)
            self._dispatcher = Dispatcher(make_router(router, context), len(links), self._book.ranks)
        on_ended = None if self._dispatcher is None else self._dispatcher.ended

        def make_client(make_link: Callable[[], EngineLink]) -> EngineClient:
            return EngineClient(make_link(), observe=observe, on_ended=on_ended)

        self._keepers = [
            EngineKeeper(
                partial(make_client, make_link),
                self._book,
                lose=self._lose,
                restarts=restarts or RestartPolicy(),
                hang_timeout_s=hang_timeout_s,
            )
            for make_link in links
        ]
        self._num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """The state of the engine that is best off."""
        states = [keeper.state for keeper in self._keepers]
        best = next(state for state in BEST_FIRST if state in states)
        return best if self._has_started or best is not State.SERVING else State.STARTING

    @property
    def info(self) -> EngineInfo:
        """Limits and sizes of an engine; the same for every engine of one configuration.

        Raises:
            CapacityError: None has started yet.
        """
        for keeper in self._keepers:
            if keeper.info is not None:
                return keeper.info
        raise _unavailable(State.STARTING)

    @property
    def adapters(self) -> Mapping[str, LoadedAdapter]:
        """The adapters that are loaded, by name."""
        return self._book.adapters

    @property
    def num_restarts(self) -> int:
        """Engines started after the first of each."""
        return sum(keeper.num_restarts for keeper in self._keepers)

    @property
    def num_in_flight(self) -> int:
        """Answers being given; see ``in_flight``."""
        return self._num_in_flight

    @property
    def pids(self) -> list[int | None]:
        """The process of each engine; ``None`` before there is one."""
        return [None if keeper.client is None else keeper.client.pid for keeper in self._keepers]

    def check_serving(self) -> None:
        """Raise unless a request would be taken now.

        Raises:
            CapacityError: No engine serves; the message says why, and when to try again.
        """
        if self.state is not State.SERVING:
            raise _unavailable(self.state)

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self, modules: Sequence[LoraModule] = ()) -> None:
        """Start the engines and load the adapters given at start.

        Raises:
            ManyloraError: An engine refused its configuration, or a required adapter is bad: the message names it.
        """
        self._book.open(modules)
        self._required = frozenset(module.name for module in modules if module.is_required)
        await asyncio.gather(*(keeper.start() for keeper in self._keepers))
        self._required = frozenset()
        self._has_started = True

    async def run(self) -> None:
        """Watch the engines and restart those that die, until drained or stopped.

        An engine that dies too often is left out, as long as there is another.

        Raises:
            EngineDead: The last one died too often.
        """
        await asyncio.gather(*(self._keep(keeper) for keeper in self._keepers))

    def drain(self) -> None:
        """Take no new requests from now on."""
        for keeper in self._keepers:
            keeper.drain()

    async def idle(self) -> None:
        """Wait until no answer is being given."""
        while self._num_in_flight:
            await self._idle.wait()

    @contextlib.contextmanager
    def in_flight(self) -> Iterator[None]:
        """Count an answer as being given while inside: from its submission to its last byte."""
        self._num_in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_in_flight -= 1
            if not self._num_in_flight:
                self._idle.set()

    async def stop(self, reason: str = "The server is shutting down.") -> None:
        """End the engines; all that is in flight fails with ``reason``."""
        await asyncio.gather(*(keeper.stop(EngineDead(reason)) for keeper in self._keepers))

    # -- requests ----------------------------------------------------------------------------------------------------

    async def submit(self, requests: Sequence[Request], stream: OutputStream | None = None) -> OutputStream:
        """Add requests, all or none, and return the stream of their outputs; once the engines have accepted them.

        Args:
            requests: Each goes to the engine that the router picks.
            stream: Where their outputs shall go; a new one when ``None``.

        Raises:
            RequestError: One of them is wrong.
            CapacityError: No room now, or no engine.
            EngineDead: An engine died before it had answered.
        """
        stream = stream or OutputStream()
        clients = self._serving()
        if len(self._keepers) == 1:
            await clients[0].submit(requests, stream)
            return stream
        shares: dict[int, list[Request]] = {}
        assert self._dispatcher is not None
        for request in requests:
            shares.setdefault(self._dispatcher.dispatch(request, clients), []).append(request)
        try:
            await asyncio.gather(*[clients[engine].submit(share, stream) for engine, share in shares.items()])
        except BaseException:
            self.cancel([request.request_id for request in requests])  # all or none
            raise
        return stream

    def cancel(self, request_ids: Sequence[str], *, stopped: bool = False) -> None:
        """Stop working on requests; nothing more arrives for them.

        Args:
            request_ids: Those that have ended already are ignored.
            stopped: Their text reached a stop string: a good end, not a client that left.
        """
        for keeper in self._keepers:
            if keeper.client is not None:
                keeper.client.cancel(request_ids, stopped=stopped)

    # -- adapters ----------------------------------------------------------------------------------------------------

    async def load_adapter(self, name: str, path: str, *, replace_existing: bool = False) -> AdapterStatus:
        """Load an adapter on every engine, and on those that start later.

        Requests that arrive after this returns use the new weights, those that arrived before finish on the old. A
        new adapter that one engine cannot load is loaded on none; a replacement stays where it succeeded, and the
        error names the engines that still have the old.

        Raises:
            AdapterExists: The name is taken.
            AdapterError: It cannot be served.
            CapacityError: No engine, or no room.
        """
        async with self._book.free(name, may_replace=replace_existing) as before:
            load = partial(EngineClient.load_adapter, name=name, path=path, replace=replace_existing)
            undo = None if before is not None else partial(EngineClient.unload_adapter, name=name)
            status = await self._everywhere(load, undo=undo)
            self._book.note_load(name, path, status)
            if before is not None and before.is_pinned and not status.is_pinned:
                status = await self._everywhere(lambda client: client.pin_adapter(name, True))
            logger.info("adapter_loaded name=%s path=%s generation=%d", name, path, status.generation)
            return status

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter and forget it; requests in flight finish on it.

        Raises:
            AdapterNotFound: No such name.
            CapacityError: No engine.
        """
        async with self._book.known(name):
            await self._everywhere(lambda client: client.unload_adapter(name))
            self._book.forget(name)
            logger.info("adapter_unloaded name=%s", name)

    async def pin_adapter(self, name: str, pinned: bool) -> AdapterStatus:
        """Keep an adapter on the device of every engine, or no longer; engines that start later do the same.

        Raises:
            AdapterNotFound: No such name.
            CapacityError: No engine, or no room to pin.
        """
        async with self._book.known(name):
            is_change = self._book.adapters[name].is_pinned != pinned
            undo = partial(EngineClient.pin_adapter, name=name, pinned=not pinned) if is_change else None
            status = await self._everywhere(lambda client: client.pin_adapter(name, pinned), undo=undo)
            self._book.note_pin(name, pinned)
            return status

    async def warm_adapter(self, name: str) -> AdapterStatus:
        """Begin to copy an adapter to the device of every engine, before a request asks for it.

        Raises:
            AdapterNotFound: No such name.
            CapacityError: No engine, or no room.
        """
        async with self._book.known(name):
            return await self._everywhere(lambda client: client.warm_adapter(name))

    async def snapshot(self, num_adapters: int | None = None) -> tuple[EngineStats, tuple[AdapterStatus, ...]]:
        """Return the counters of all engines and the state of every adapter, or of the busiest ``num_adapters``.

        Raises:
            CapacityError: No engine.
            EngineDead: It died before it had answered.
        """
        clients = list(self._serving().values())
        if len(clients) == 1:
            return await clients[0].snapshot(num_adapters)
        # An adapter's figures are to be added up, so every engine has to tell of all of them.
        asked = None if num_adapters != 0 else 0
        taken = await asyncio.gather(*(client.snapshot(asked) for client in clients), return_exceptions=True)
        parts = _successes(taken)
        statuses = merge_statuses([statuses for _, statuses in parts])
        if num_adapters is not None:
            statuses = busiest(statuses, num_adapters)
        return merge_stats([stats for stats, _ in parts]), statuses

    # -- the engines -------------------------------------------------------------------------------------------------

    def _serving(self) -> dict[int, EngineClient]:
        """Return the engines that serve, by number.

        Raises:
            CapacityError: None does.
        """
        clients = {
            index: keeper.client
            for index, keeper in enumerate(self._keepers)
            if keeper.state is State.SERVING and keeper.client is not None
        }
        if not clients or not self._has_started:
            raise _unavailable(self.state)
        return clients

    async def _everywhere(
        self,
        act: Callable[[EngineClient], Awaitable[T]],
        *,
        undo: Callable[[EngineClient], Awaitable[object]] | None = None,
    ) -> T:
        """Act on every engine that serves, and on those that begin to while others are still at it.

        An engine that dies meanwhile does not count, as long as there is another: the book will bring it up to date.

        Args:
            act: The change.
            undo: Takes it back where it succeeded, if it fails elsewhere.

        Raises:
            ManyloraError: It failed somewhere; of several engines the message names those that have not done it.
        """
        results: dict[int, T | BaseException] = {}
        clients: dict[int, EngineClient] = {}
        serving = self._serving()
        while pending := {index: one for index, one in serving.items() if clients.get(index) is not one}:
            clients |= pending
            done = await asyncio.gather(*map(act, pending.values()), return_exceptions=True)
            results |= dict(zip(pending, done, strict=True))
            with contextlib.suppress(CapacityError):
                serving = self._serving()
        failed = {
            index: result
            for index, result in results.items()
            if isinstance(result, BaseException) and not isinstance(result, EngineDead)
        }
        if failed and undo is not None:
            undone = (undo(one) for index, one in clients.items() if not isinstance(results[index], BaseException))
            await asyncio.gather(*undone, return_exceptions=True)
        if failed:
            raise self._named(next(iter(failed.values())), list(failed))
        return _successes(list(results.values()))[0]

    def _named(self, error: BaseException, engines: Sequence[int]) -> BaseException:
        """Return an error that names the engines it is true of, where there are several."""
        if len(self._keepers) == 1 or not isinstance(error, ManyloraError):
            return error
        where = f"{'engine' if len(engines) == 1 else 'engines'} {', '.join(map(str, engines))} of {len(self._keepers)}"
        fault = Fault.of(error)
        return msgspec.structs.replace(
            fault, message=f"{where}: {fault.message}", reason=f"{where}: {fault.reason}"
        ).to_error()

    async def _lose(self, error: AdapterError) -> None:
        """Strike out an adapter that an engine could not be given: every engine serves the same names.

        Raises:
            AdapterError: The service may not start without it.
        """
        name = error.adapter
        if name in self._required:
            raise error
        # The others should not suffer for it; requests for this one say 404 from now on.
        logger.error(
            "%s name=%s reason=%s", "adapter_lost" if self._has_started else "adapter_left_out", name, error.reason
        )
        self._book.forget(name)
        for keeper in self._keepers:
            if keeper.state is State.SERVING and keeper.client is not None:
                with contextlib.suppress(ManyloraError):
                    await keeper.client.unload_adapter(name)

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


def _successes(results: Sequence[T | BaseException]) -> list[T]:
    """Return the results of the engines that are alive.

    Raises:
        EngineDead: None is.
    """
    succeeded = [result for result in results if not isinstance(result, BaseException)]
    for result in results:
        if isinstance(result, BaseException) and not (succeeded and isinstance(result, EngineDead)):
            raise result
    return succeeded
