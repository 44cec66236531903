"""Adapters of a fleet, by name: a change is made on every engine, and then recorded in the book."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from manylora.core.engine.status import AdapterStatus
from manylora.core.errors import AdapterError, AdapterUnavailable, CapacityError, EngineDead, ManyloraError
from manylora.serving.hosting.fleet.adapter_book import AdapterBook, LoadedAdapter, UnavailableAdapter
from manylora.serving.hosting.links.client import EngineClient
from manylora.serving.hosting.protocol import Fault

__all__ = ["FleetAdapters"]

T = TypeVar("T")

logger = logging.getLogger(__name__)

RETRY_CHECK_S = 0.25
RETRIED_TOGETHER = 8


class FleetAdapters:
    """Loads, unloads, pins and warms adapters on all engines. For the event loop's thread alone.

    Args:
        book: The adapters that engines hold.
        serving: Returns the engines that serve, by number; raises ``CapacityError`` if none does.
        num_engines: Engines in the fleet, for messages.
    """

    def __init__(self, book: AdapterBook, serving: Callable[[], dict[int, EngineClient]], *, num_engines: int) -> None:
        self._book = book
        self._serving = serving
        self._num_engines = num_engines

    @property
    def loaded(self) -> Mapping[str, LoadedAdapter]:
        """The adapters that are loaded, by name."""
        return self._book.adapters

    @property
    def unavailable(self) -> Mapping[str, UnavailableAdapter]:
        """Adapters that are tried again since their registry did not answer, by name."""
        return self._book.unavailable

    def check_available(self, name: str) -> None:
        """Raise ``CapacityError`` for an adapter whose registry does not answer."""
        if (aside := self._book.unavailable.get(name)) is not None:
            wait_s = max(1.0, aside.retry_at - asyncio.get_running_loop().time())
            reason = f"adapter {name!r} is unavailable: {aside.reason}; next try in {wait_s:.0f} s"
            raise CapacityError(reason, retry_after_s=wait_s, status=503)

    @property
    def num_changes(self) -> int:
        """Changes of the names and paths in ``loaded`` so far."""
        return self._book.num_changes

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
        """Unload an adapter; requests in flight finish on it.

        Raises:
            AdapterNotFound: No such name.
            CapacityError: No engine serves.
        """
        async with self._book.known(name):
            if name not in self._book.unavailable:
                await self._everywhere(lambda client: client.unload_adapter(name))
            self._book.forget(name)
            logger.info("adapter_unloaded name=%s", name)

    async def pin(self, name: str, pinned: bool) -> AdapterStatus:
        """Pin or unpin an adapter on every engine, and on those that start later.

        Raises:
            AdapterNotFound: No such name.
            CapacityError: No engine serves, or no room to pin.
        """
        async with self._book.known(name):
            self.check_available(name)
            is_change = self._book.adapters[name].is_pinned != pinned
            undo = partial(EngineClient.pin_adapter, name=name, pinned=not pinned) if is_change else None
            statuses = await self._everywhere(lambda client: client.pin_adapter(name, pinned), undo=undo)
            self._book.note_pin(name, pinned)
            return statuses[0]

    async def warm(self, name: str) -> AdapterStatus:
        """Start to copy an adapter to the device of every engine.

        Raises:
            AdapterNotFound: No such name.
            CapacityError: No engine serves, or no room.
        """
        async with self._book.known(name):
            self.check_available(name)
            return (await self._everywhere(lambda client: client.warm_adapter(name)))[0]

    async def lose(self, error: AdapterError) -> None:
        """Remove an adapter that one engine could not load: every engine serves the same names.

        One whose registry did not answer comes back by ``retry``.
        """
        name = error.adapter
        if isinstance(error, AdapterUnavailable):
            self._book.set_aside(name, error.reason, asyncio.get_running_loop().time())
        else:
            self._book.forget(name)
        with contextlib.suppress(CapacityError, EngineDead):
            unloads = [client.unload_adapter(name) for client in self._serving().values()]
            await asyncio.gather(*unloads, return_exceptions=True)

    async def retry(self) -> None:
        """Load adapters again whose registry did not answer; runs until it is cancelled."""
        while True:
            await asyncio.sleep(RETRY_CHECK_S)
            now = asyncio.get_running_loop().time()
            due = [name for name, aside in self._book.unavailable.items() if aside.retry_at <= now]
            await asyncio.gather(*map(self._retry, due[:RETRIED_TOGETHER]))

    async def _retry(self, name: str) -> None:
        aside = self._book.unavailable.get(name)
        if aside is None:
            return
        try:
            await self.load(name, aside.entry.path)
        except ManyloraError as error:
            if self._book.unavailable.get(name) is not aside:  # it was loaded or unloaded meanwhile
                return
            if isinstance(error, AdapterError) and not isinstance(error, AdapterUnavailable):
                self._book.forget(name)
                logger.error("adapter_lost name=%s reason=%s", name, error.reason)
                return
            reason = error.reason if isinstance(error, AdapterError) else str(error)
            self._book.set_aside(name, reason, asyncio.get_running_loop().time())
            logger.warning("adapter_unavailable name=%s tries=%d reason=%s", name, aside.num_tries + 1, reason)

    async def _everywhere(
        self,
        act: Callable[[EngineClient], Awaitable[T]],
        *,
        undo: Callable[[EngineClient], Awaitable[object]] | None = None,
    ) -> list[T]:
        """Make a change on every engine that serves, and on those that start to serve meanwhile.

        The error of an engine that dies is ignored if another succeeds: the book brings its successor up to date.

        Args:
            act: The change.
            undo: Reverts the change where it succeeded, if it failed elsewhere.

        Returns:
            The results of the engines that are alive, at least one.

        Raises:
            ManyloraError: The change failed on an engine; of several engines the message names those that failed.
        """
        results: dict[int, T | BaseException] = {}
        clients: dict[int, EngineClient] = {}
        serving = self._serving()
        while pending := {index: one for index, one in serving.items() if clients.get(index) is not one}:
            clients |= pending
            done = await asyncio.gather(*map(act, pending.values()), return_exceptions=True)
            results |= dict(zip(pending, done, strict=True))
            with contextlib.suppress(CapacityError, EngineDead):
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
        return _successes(list(results.values()))

    def _named(self, error: BaseException, engines: Sequence[int]) -> BaseException:
        """Return an error that names its engines, if the fleet has several."""
        if self._num_engines == 1 or not isinstance(error, ManyloraError):
            return error
        where = f"{'engine' if len(engines) == 1 else 'engines'} {', '.join(map(str, engines))} of {self._num_engines}"
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
