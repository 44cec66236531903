"""Adapters of a fleet, by name: a change is made on every engine, and then recorded in the book."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from manylora.core.engine.adapters.registry import is_label
from manylora.core.engine.status import AdapterStatus
from manylora.core.errors import AdapterError, AdapterUnavailable, CapacityError, EngineDead, ManyloraError
from manylora.serving.hosting.fleet.adapter_book import AdapterBook, LoadedAdapter, LoraModule, UnavailableAdapter
from manylora.serving.hosting.fleet.engines import FleetEngines
from manylora.serving.hosting.fleet.fleet_versions import AS_LOADED, FleetVersions, PublicationTerms
from manylora.serving.hosting.fleet.versions import NumberedVersion, name_of
from manylora.serving.hosting.links.client import EngineClient

__all__ = ["FleetAdapters"]

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
        versions = self.versions = FleetVersions(book, engines)
        self.take, self.give, self.find, self.versions_of = versions.take, versions.give, versions.find, versions.of
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

    async def load(
        self, name: str, path: str, *, replace_existing: bool = False, by_header: bool = False
    ) -> AdapterStatus:
        """Load an adapter on every engine, and on those that start later.

        Requests that arrive afterwards use the new weights; earlier ones finish on the old. An adapter that one engine
        cannot load is loaded on none, and a replacement takes over on all at once. With ``by_header`` a single engine
        reads its weights when a request needs them; several read them now, to know that they have the same.

        ``AdapterExists`` if the name is taken; ``AdapterError`` if the adapter cannot be served, or engines read
        different versions of it; ``CapacityError`` if no engine serves, or there is no room.
        """
        self.versions.check_name(name)
        async with self._book.free(name, may_replace=replace_existing):
            is_by_header = by_header and len(self._engines.serving()) == 1
            _, status = await self.versions.put(name, path, replace(AS_LOADED, is_by_header=is_by_header))
            return status

    async def publish(self, name: str, path: str, terms: PublicationTerms) -> tuple[NumberedVersion, AdapterStatus]:
        """Load a version and move its name to it on every engine at once; return the version and its state.

        Errors are those of ``load``, besides ``AdapterExists`` for a number that is not above the last one.
        """
        self.versions.check_name(name)
        async with self._book.free(name, may_replace=True):
            return await self.versions.put(name, path, terms)

    async def unload(self, name: str) -> None:
        """Unload an adapter, or raise ``AdapterNotFound``; requests in flight finish on it."""
        if name not in self._book.adapters and (version := self.versions.numbered.labelled(name)) is not None:
            self.versions.end(version)
            return
        async with self._book.known(name):
            await self.versions.settled(name)
            if name not in self.unavailable:
                await self._engines.everywhere(lambda client: client.unload_adapter(name))
            self._book.forget(name)
            self.versions.close(name)
            logger.info("adapter_unloaded name=%s", name)

    async def pin(self, name: str, pinned: bool) -> AdapterStatus:
        """Pin or unpin an adapter on every engine, and on those that start later.

        ``CapacityError`` if there is no room to pin it, or no engine serves.
        """
        given, name = name, self.versions.engine_name(name)
        async with self._book.known(name):
            self.check_available(name)
            await self.versions.settled(name_of(given))
            is_change = self._book.is_pinned(name) != pinned
            undo = partial(EngineClient.pin_adapter, name=name, pinned=not pinned) if is_change else None
            statuses = await self._engines.everywhere(lambda client: client.pin_adapter(name, pinned), undo=undo)
            self._book.note_pin(name, pinned)
            self.versions.note_pin(name, pinned)
            return replace(statuses[0], name=given)

    async def warm(self, name: str) -> AdapterStatus:
        """Start to copy an adapter to the device of every engine; ``CapacityError`` if there is no room."""
        given, name = name, self.versions.engine_name(name)
        async with self._book.known(name):
            self.check_available(name)
            statuses = await self._engines.everywhere(lambda client: client.warm_adapter(name))
            return replace(statuses[0], name=given)

    async def lose(self, error: AdapterError) -> None:
        """Remove an adapter that one engine could not load: every engine serves the same names.

        An adapter whose registry did not answer comes back by ``retry``. If the start requires it, ``error`` is raised.
        """
        name = error.adapter
        if self._required is not None and name in self._required:
            raise error
        event = "adapter_lost" if self._required is None else "adapter_left_out"
        logger.error("%s name=%s reason=%s", event, name, error.reason)
        if isinstance(error, AdapterUnavailable) and not is_label(name):
            self._set_aside(name, error.reason)
        elif is_label(name):
            self._book.forget_label(name)
        else:
            self._book.forget(name)
        self.versions.lose(name)
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
        self.versions.close(name)
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
