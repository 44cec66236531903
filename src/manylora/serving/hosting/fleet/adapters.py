"""Adapters of a fleet, by name: a change is made on every engine, and then recorded in the book."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from manylora.core.engine.status import AdapterStatus
from manylora.core.errors import AdapterError, AdapterUnavailable, CapacityError, EngineDead, ManyloraError
from manylora.serving.hosting.fleet.adapter_book import AdapterBook, LoadedAdapter, LoraModule, UnavailableAdapter
from manylora.serving.hosting.fleet.engines import FleetEngines
from manylora.serving.hosting.links.client import EngineClient
from manylora.serving.hosting.protocol import Fault

__all__ = ["FleetAdapters"]

T = TypeVar("T")

logger = logging.getLogger(__name__)

RETRY_CHECK_S = 0.25
RETRIED_TOGETHER = 8


class FleetAdapters:
    """Loads, unloads, pins and warms adapters on all engines. For the event loop's thread alone.

    With ``keeps_required`` an adapter that the start requires is required of engines that start later as well.
    """

    def __init__(self, book: AdapterBook, engines: FleetEngines, *, keeps_required: bool) -> None:
        self.loaded: Mapping[str, LoadedAdapter] = book.adapters  # the adapters that are loaded, by name
        self.unavailable: Mapping[str, UnavailableAdapter] = book.unavailable
        """Adapters that are tried again since their registry did not answer, by name."""
        self._book = book
        self._engines = engines
        self._keeps_required = keeps_required
        self._required: frozenset[str] | None = None  # while starting, or for ever
        self._is_any_unavailable = asyncio.Event()

    @property
    def num_changes(self) -> int:
        """Number of changes of ``loaded`` so far: readers compare it with the number at their last look."""
        return self._book.num_changes

    @contextlib.contextmanager
    def opened(self, modules: Sequence[LoraModule]) -> Iterator[None]:
        """Register the adapters given at start for engines that start in this context.

        A required adapter that fails ends the start.

        Errors are those of ``AdapterBook.open``.
        """
        self._book.open(modules)
        self._required = frozenset(module.name for module in modules if module.is_required)
        yield
        if not self._keeps_required:
            self._required = None

    def check_available(self, model: str) -> None:
        """Raise ``CapacityError`` for a model whose adapter is unavailable: its registry does not answer."""
        name = model.removeprefix(f"{self._book.served_name}:")
        if (aside := self.unavailable.get(name)) is not None:
            wait_s = max(1.0, aside.retry_at - asyncio.get_running_loop().time())
            reason = f"adapter {name!r} is unavailable: {aside.reason}; next try in {wait_s:.0f} s"
            raise CapacityError(reason, retry_after_s=wait_s, status=503)

    async def load(self, name: str, path: str, *, replace_existing: bool = False) -> AdapterStatus:
        """Load an adapter on every engine, and on those that start later.

        Requests that arrive afterwards use the new weights; earlier ones finish on the old. A new adapter that one
        engine cannot load is loaded on none; a replacement stays where it succeeded, and the error names the engines
        that still have the old one.

        Raises:
            AdapterExists: The name is taken.
            AdapterError: The adapter cannot be served, or engines read different versions of it.
            CapacityError: No engine serves, or no room.
        """
        async with self._book.free(name, may_replace=replace_existing) as before:
            load = partial(EngineClient.load_adapter, name=name, path=path, replace=replace_existing)
            undo = None if before is not None else partial(EngineClient.unload_adapter, name=name)
            statuses = await self._everywhere(load, undo=undo)
            status = statuses[0]
            if len({one.version.key for one in statuses}) > 1:  # it was written while engines read it
                if before is None:
                    await self._everywhere(lambda client: client.unload_adapter(name))
                raise AdapterError(name, "its files changed while engines read them; load it again")
            self._book.note_load(name, path, status)
            if self._book.adapters[name].is_pinned and not status.is_pinned:
                status = (await self._everywhere(lambda client: client.pin_adapter(name, True)))[0]
            logger.info("adapter_loaded name=%s path=%s generation=%d", name, path, status.generation)
            return status

    async def unload(self, name: str) -> None:
        """Unload an adapter, or raise ``AdapterNotFound``; requests in flight finish on it."""
        async with self._book.known(name):
            if name not in self.unavailable:
                await self._everywhere(lambda client: client.unload_adapter(name))
            self._book.forget(name)
            logger.info("adapter_unloaded name=%s", name)

    async def pin(self, name: str, pinned: bool) -> AdapterStatus:
        """Pin or unpin an adapter on every engine, and on those that start later.

        ``CapacityError`` if there is no room to pin it, or no engine serves.
        """
        async with self._book.known(name):
            self.check_available(name)
            is_change = self._book.adapters[name].is_pinned != pinned
            undo = partial(EngineClient.pin_adapter, name=name, pinned=not pinned) if is_change else None
            statuses = await self._everywhere(lambda client: client.pin_adapter(name, pinned), undo=undo)
            self._book.note_pin(name, pinned)
            return statuses[0]

    async def warm(self, name: str) -> AdapterStatus:
        """Start to copy an adapter to the device of every engine; ``CapacityError`` if there is no room."""
        async with self._book.known(name):
            self.check_available(name)
            return (await self._everywhere(lambda client: client.warm_adapter(name)))[0]

    async def lose(self, error: AdapterError) -> None:
        """Remove an adapter that one engine could not load: every engine serves the same names.

        An adapter whose registry did not answer comes back by ``retry``. If the start requires it, ``error`` is raised.
        """
        name = error.adapter
        if self._required is not None and name in self._required:
            raise error
        event = "adapter_lost" if self._required is None else "adapter_left_out"
        logger.error("%s name=%s reason=%s", event, name, error.reason)
        if isinstance(error, AdapterUnavailable):
            self._set_aside(name, error.reason)
        else:
            self._book.forget(name)
        with contextlib.suppress(CapacityError, EngineDead):
            unloads = [client.unload_adapter(name) for client in self._engines.serving().values()]
            await asyncio.gather(*unloads, return_exceptions=True)

    async def retry(self) -> None:
        """Load unavailable adapters again, each at its time; runs until it is cancelled."""
        now = asyncio.get_running_loop().time
        while True:
            await self._is_any_unavailable.wait()
            due = [name for name, aside in self.unavailable.items() if aside.retry_at <= now()]
            await asyncio.gather(*map(self._retry, due[:RETRIED_TOGETHER]))
            if self.unavailable:
                await asyncio.sleep(RETRY_CHECK_S)
            else:
                self._is_any_unavailable.clear()

    def _set_aside(self, name: str, reason: str) -> None:
        self._book.set_aside(name, reason, asyncio.get_running_loop().time())
        self._is_any_unavailable.set()

    async def _retry(self, name: str) -> None:
        aside = self.unavailable.get(name)
        if aside is None:
            return
        try:
            await self.load(name, aside.entry.path)
        except ManyloraError as error:
            if self.unavailable.get(name) is not aside:  # it was loaded or unloaded meanwhile
                return
            if isinstance(error, AdapterError) and not isinstance(error, AdapterUnavailable):
                self._book.forget(name)
                logger.error("adapter_lost name=%s reason=%s", name, error.reason)
                return
            reason = error.reason if isinstance(error, AdapterError) else str(error)
            self._set_aside(name, reason)
            logger.warning("adapter_unavailable name=%s tries=%d reason=%s", name, aside.num_tries + 1, reason)

    async def _everywhere(
        self,
        act: Callable[[EngineClient], Awaitable[T]],
        *,
        undo: Callable[[EngineClient], Awaitable[object]] | None = None,
    ) -> list[T]:
        """Make a change on every engine that serves, and on those that start to serve meanwhile.

        The error of an engine that dies is ignored if another succeeds: the book brings its successor up to date.
        Another error is raised, after ``undo`` has reverted the change where it succeeded; of several engines it names
        those that failed.

        Returns:
            The results of the engines that are alive, at least one.
        """
        results: dict[int, T | BaseException] = {}
        clients: dict[int, EngineClient] = {}
        serving = self._engines.serving()
        while pending := {index: one for index, one in serving.items() if clients.get(index) is not one}:
            clients |= pending
            done = await asyncio.gather(*map(act, pending.values()), return_exceptions=True)
            results |= dict(zip(pending, done, strict=True))
            with contextlib.suppress(CapacityError, EngineDead):
                serving = self._engines.serving()
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
        num_engines = len(self._engines.keepers)
        if num_engines == 1 or not isinstance(error, ManyloraError):
            return error
        where = f"{'engine' if len(engines) == 1 else 'engines'} {', '.join(map(str, engines))} of {num_engines}"
        fault = Fault.of(error)
        return msgspec.structs.replace(
            fault, message=f"{where}: {fault.message}", reason=f"{where}: {fault.reason}"
        ).to_error()


def _successes(results: Sequence[T | BaseException]) -> list[T]:
    """Return the results of the engines that are alive; raise ``EngineDead`` if none is."""
    succeeded = [result for result in results if not isinstance(result, BaseException)]
    for result in results:
        if isinstance(result, BaseException) and not (succeeded and isinstance(result, EngineDead)):
            raise result
    return succeeded
