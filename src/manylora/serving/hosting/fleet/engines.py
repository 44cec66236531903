"""The engines of a fleet over its life: started together, watched, and none ends the others.

::

    start: every first engine ---> it serves, and is watched while others still start
                 |  |
                 |  +-- it died, or found no place ---> tried again, as after a death, if another came up;
                 |                                      of none an idle one of another device is started
                 +----- it refused its configuration, or a required adapter ---> the start fails
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from manylora.core.errors import CapacityError, EngineDead, ManyloraError, RequestError, SnapshotFailed
from manylora.serving.hosting.fleet.keeper import SCARCITY, EngineKeeper, EngineState
from manylora.serving.hosting.fleet.snapshot import Snapshot
from manylora.serving.hosting.links.client import EngineClient
from manylora.serving.hosting.protocol import EngineInfo, Fault

__all__ = ["FleetEngines", "Replica"]

T = TypeVar("T")

logger = logging.getLogger(__name__)

UNAVAILABLE = {
    EngineState.RESTARTING: ("The engine died and is being restarted; please try again.", 5),
    EngineState.STARTING: ("The server is starting; please try again.", 5),
    EngineState.DRAINING: ("The server is shutting down and takes no new requests.", 10),
    EngineState.STOPPED: ("The server is shutting down and takes no new requests.", 10),
    EngineState.IDLE: ("The server is starting; please try again.", 5),
}
"""The reason why no engine serves, and ``Retry-After`` in seconds; the state nearest to service first."""

BEST_FIRST = (EngineState.SERVING, *UNAVAILABLE)

ENDED = (EngineState.STOPPED, EngineState.IDLE)  # states of engines that will not serve by themselves
SNAPSHOT_S = 5.0  # longest wait for the snapshot of one of several engines


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One engine of a fleet, as the API process knows it."""

    index: int  # its number, from 0
    state: EngineState  # its state; idle for an engine that scaling has not started
    pid: int | None = None  # its process; ``None`` before it has started
    node: str | None = None  # the node of a cluster that it runs on; ``None`` for this machine
    num_restarts: int = 0  # engines started in its place after the first
    num_in_flight: int = 0  # requests that it works on


class FleetEngines:
    """Starts, watches and ends the engines of one fleet, and finds those that serve.

    It is made before its engines, which report to the parts of the fleet that look for engines here: each is added once
    it is made. For the event loop's thread alone.
    """

    def __init__(self) -> None:
        self.keepers: list[EngineKeeper] = []
        self._watching: dict[int, asyncio.Task[None]] = {}  # by the engine's number; of drained ones the last
        self._has_news = asyncio.Event()  # a task has ended

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """The state of the fleet, which is the state of its best engine."""
        states = [keeper.state for keeper in self.keepers]
        return next(state for state in BEST_FIRST if state in states)

    @property
    def info(self) -> EngineInfo:
        """Limits and sizes of an engine, the same for all; ``CapacityError`` before one has started."""
        for keeper in self.keepers:
            if keeper.info is not None:
                return keeper.info
        raise _unavailable(EngineState.STARTING)

    @property
    def num_serving(self) -> int:
        """Number of engines that serve."""
        return sum(keeper.state is EngineState.SERVING for keeper in self.keepers)

    @property
    def num_restarts(self) -> int:
        """Restarts of all engines."""
        return sum(keeper.num_restarts for keeper in self.keepers)

    def replicas(self) -> list[Replica]:
        """Return every engine, as the API process knows it."""
        replicas = []
        for index, keeper in enumerate(self.keepers):
            one = Replica(index=index, state=keeper.state, num_restarts=keeper.num_restarts)
            if (client := keeper.client) is not None:
                one = replace(one, pid=client.link.pid, node=client.link.node, num_in_flight=client.num_requests)
            replicas.append(one)
        return replicas

    def clients(self) -> list[EngineClient]:
        """Return every engine that may hold requests."""
        return [keeper.client for keeper in self.keepers if keeper.client is not None]

    def serving(self) -> dict[int, EngineClient]:
        """Return the engines that serve, by number.

        ``CapacityError`` if none does; ``EngineDead`` if all are dead, and are not watched and restarted.
        """
        clients = {
            index: keeper.client
            for index, keeper in enumerate(self.keepers)
            if keeper.state is EngineState.SERVING and keeper.client is not None
        }
        if not clients:
            raise _unavailable(self.state)
        alive = {index: client for index, client in clients.items() if client.loss is None}
        for index, client in clients.items():
            if not alive and client.loss is not None:
                raise _unavailable(EngineState.RESTARTING) if index in self._watching else client.loss.error
        return alive

    def going_on(self) -> dict[int, EngineClient]:
        """Return the engines that take the rest of answers, by number; ``EngineDead`` if none will again."""
        if all(keeper.state in ENDED for keeper in self.keepers):
            raise EngineDead("Every engine has stopped.")
        return {
            index: keeper.client
            for index, keeper in enumerate(self.keepers)
            if keeper.is_up and keeper.client is not None and keeper.client.loss is None
        }

    def check_serving(self) -> None:
        """Raise ``CapacityError``, with the reason and ``Retry-After``, unless requests are accepted."""
        if self.state is not EngineState.SERVING:
            raise _unavailable(self.state)

    async def snapshots(
        self, num_adapters: int | None = None, *, only_in_use: bool = False, name: str | None = None
    ) -> dict[int, Snapshot]:
        """Return the snapshot of each engine that serves and answers, by number; arguments as in ``TakeSnapshot``.

        Of several engines each reports all adapters, because their counters are summed.

        Errors are those of ``serving``; ``SnapshotFailed`` if the state of none could be read.
        """
        clients = self.serving()
        limit = num_adapters if len(clients) == 1 or num_adapters == 0 else None
        if len(clients) == 1:
            return {
                index: await client.snapshot(limit, only_in_use=only_in_use, name=name)
                for index, client in clients.items()
            }
        # An engine that hangs must not hide the others.
        taking = [
            asyncio.wait_for(client.snapshot(limit, only_in_use=only_in_use, name=name), SNAPSHOT_S)
            for client in clients.values()
        ]
        taken = dict(zip(clients, await asyncio.gather(*taking, return_exceptions=True), strict=True))
        parts = {index: part for index, part in taken.items() if not isinstance(part, BaseException)}
        for part in taken.values():
            is_of_one = isinstance(part, EngineDead | SnapshotFailed | TimeoutError)
            if isinstance(part, BaseException) and not (parts and is_of_one):
                raise part
        return parts

    # -- changes -----------------------------------------------------------------------------------------------------

    async def everywhere(
        self,
        act: Callable[[EngineClient], Awaitable[T]],
        *,
        undo: Callable[[EngineClient], Awaitable[object]] | None = None,
    ) -> list[T]:
        """Make a change on every engine that serves, and on those that start to serve meanwhile.

        The error of an engine that dies is ignored if another succeeds: the book brings its successor up to date.
        Another error is raised, after ``undo`` has reverted the change where it succeeded; of several engines it names
        those that failed.

        Return the results of the engines that are alive, at least one. Until the caller next awaits, no engine serves
        that has not made the change.
        """
        results: dict[int, T | BaseException] = {}
        clients: dict[int, EngineClient] = {}
        serving = self.serving()
        while pending := {index: one for index, one in serving.items() if clients.get(index) is not one}:
            clients |= pending
            done = await asyncio.gather(*map(act, pending.values()), return_exceptions=True)
            results |= dict(zip(pending, done, strict=True))
            with contextlib.suppress(CapacityError, EngineDead):
                serving = self.serving()
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
        return _successes(list(results.values()))

    def _named(self, error: BaseException, engines: Sequence[int]) -> BaseException:
        """Return an error that names its engines, if the fleet has several."""
        num_engines = len(self.keepers)
        if num_engines == 1 or not isinstance(error, ManyloraError):
            return error
        where = f"{'engine' if len(engines) == 1 else 'engines'} {', '.join(map(str, engines))} of {num_engines}"
        fault = Fault.of(error)
        return msgspec.structs.replace(
            fault, message=f"{where}: {fault.message}", reason=f"{where}: {fault.reason}"
        ).to_error()

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self, num_devices: int = 1) -> None:
        """Start the first engines; if none came up, idle ones of the other devices, which engines have in turn.

        With several, each is watched as soon as it serves: its requests must not wait for the start of the others. The
        engine of a fleet that has no other is watched by ``run`` alone, so a program without ``run`` sees its death.

        An error if an engine refused its configuration or a required adapter, or none came up: that of the first, or
        ``OSError`` for lack of room.
        """
        starting = [engine for engine, keeper in enumerate(self.keepers) if keeper.state is EngineState.STARTING]
        errors = await asyncio.gather(*map(self._start, starting))
        for engine, keeper in enumerate(self.keepers[:num_devices]):
            if all(errors) and keeper.state is EngineState.IDLE:
                keeper.state = EngineState.STARTING
                starting.append(engine)
                errors.append(await self._start(engine))
        for engine, error in zip(starting, errors, strict=True):
            if error is not None and all(errors):
                raise error
            if error is not None and self.keepers[engine].state is EngineState.STARTING:
                self.keepers[engine].state = EngineState.RESTARTING  # by ``run``

    async def run(self, beside: Iterable[Coroutine[Any, Any, None]]) -> None:
        """Watch the engines and restart those that die, until all are drained or stopped.

        ``beside`` is other work of the fleet, for as long. ``EngineDead`` if an engine died too often, and no other
        serves or may soon.
        """
        for engine, keeper in enumerate(self.keepers):
            if keeper.state is not EngineState.IDLE and engine not in self._watching:
                self.watch(engine)
        others = [self._task(one) for one in beside]
        try:
            while True:
                self._has_news.clear()
                for task in [*others, *self._watching.values()]:
                    if task.done():
                        task.result()
                if all(keeper.state in ENDED for keeper in self.keepers):
                    return
                await self._has_news.wait()
        finally:
            for task in [*others, *self._watching.values()]:
                task.cancel()

    def watch(self, engine: int) -> None:
        """Watch an engine and restart it, until it is drained."""
        keeper = self.keepers[engine]
        self._watching[engine] = self._task(
            keeper.run(lambda: any(one.may_serve for one in self.keepers if one is not keeper))
        )

    async def drain_replica(self, index: int, timeout_s: float) -> None:
        """End one engine for good: its requests may finish for ``timeout_s`` seconds, then they go on elsewhere.

        ``RequestError`` if there is no such engine, or no other serves.
        """
        if not 0 <= index < len(self.keepers):
            raise RequestError(f"Got replica {index}, expected 0 to {len(self.keepers) - 1}", param="replica")
        if self.keepers[index].state is not EngineState.SERVING:
            raise RequestError(f"Got replica {index}, which does not serve", param="replica")
        if len(self.serving()) == 1:
            raise RequestError(f"Got replica {index}, the only one that serves", param="replica")
        await self.keepers[index].retire(timeout_s)
        logger.warning("replica_drained replica=%d", index)

    async def give_back(self, engine: int, timeout_s: float) -> None:
        """End a watched engine whose place may be filled again; its requests may finish for a time, or move on."""
        await self.keepers[engine].retire(timeout_s)
        await self._watching[engine]

    async def stop(self, error: ManyloraError) -> None:
        """End every engine; requests and calls in flight fail with ``error``."""
        await asyncio.gather(*(keeper.stop(error) for keeper in self.keepers))

    async def _start(self, engine: int) -> Exception | None:
        """Start an engine; return the error of one that may be tried again."""
        try:
            await self.keepers[engine].start()
        except (EngineDead, CapacityError, *SCARCITY) as error:
            logger.error("engine_start_failed engine=%d error=%r", engine, error)
            return error
        if len(self.keepers) > 1:
            self.watch(engine)
        return None

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(lambda task: self._has_news.set())
        return task


def _unavailable(state: EngineState) -> CapacityError:
    reason, retry_after_s = UNAVAILABLE[state]
    return CapacityError(reason, retry_after_s=retry_after_s, status=503)


def _successes(results: Sequence[T | BaseException]) -> list[T]:
    """Return the results of the engines that are alive; raise ``EngineDead`` if none is."""
    succeeded = [result for result in results if not isinstance(result, BaseException)]
    for result in results:
        if isinstance(result, BaseException) and not (succeeded and isinstance(result, EngineDead)):
            raise result
    return succeeded
