"""The versions of adapters on all engines: loaded under a name of their own, then reached by the adapter's name.

::

    every engine   load name@4 (and pin or copy it to the device, if asked)
    here           name -> name@4                     one assignment: from now on answers take version 4
    every engine   point name to name@4               for requests without a version, metrics and states
                   unload name@3                      once its lease and its last answer have ended
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from manylora.core.adapters.sources import pinned
from manylora.core.engine.adapters.registry import LABEL_MARK, is_label
from manylora.core.engine.status import AdapterStatus
from manylora.core.errors import AdapterError, AdapterExists, CapacityError, EngineDead, ManyloraError
from manylora.core.types import Tier
from manylora.serving.hosting.fleet.adapter_book import AdapterBook
from manylora.serving.hosting.fleet.engines import FleetEngines
from manylora.serving.hosting.fleet.versions import MAX_NUMBER, AdapterVersions, NumberedVersion, VersionTerms, name_of
from manylora.serving.hosting.links.client import EngineClient

__all__ = ["AS_LOADED", "FleetVersions", "PublicationTerms"]

T = TypeVar("T")

logger = logging.getLogger(__name__)

PRELOAD_TIMEOUT_S = 30.0  # time for a version to reach all devices before its name moves to it
LOOK_S = 0.002  # time between two looks at whether it has; an engine answers once in a turn


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationTerms:
    """How a version takes over its name."""

    number: int | None = None  # its number, above the last one; ``None`` for the next
    is_preloaded: bool = False  # whether it is on the devices of all engines before the name moves
    is_pinned: bool = False  # whether its name is pinned from then on
    lease: VersionTerms | None = None  # of the versions that the name leaves; ``None`` for no change
    is_by_header: bool = False  # whether its weights are read once a request needs them
    is_settled: bool = True  # whether the call returns once the engines' own names have moved, too


AS_LOADED = PublicationTerms()
"""A load by path: versions before end with their last answers, unless an earlier publication said otherwise."""


class FleetVersions:
    """Loads versions on all engines, moves names to them, and frees them. For the event loop's thread alone.

    ``on_freed`` is called with the folder of every version that was freed.
    """

    def __init__(
        self, book: AdapterBook, engines: FleetEngines, *, on_freed: Callable[[str], None] = lambda path: None
    ) -> None:
        self.numbered = AdapterVersions()
        self.on_freed = on_freed
        self._book = book
        self._engines = engines
        self._freeing: dict[NumberedVersion, asyncio.Task[None]] = {}
        self._settling: dict[str, asyncio.Task[AdapterStatus]] = {}  # the last one of a name
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    # -- answers -----------------------------------------------------------------------------------------------------

    def take(self, model: str) -> NumberedVersion | None:
        """Count an answer in on the version of a model; ``None`` for the base, and for a name that is not known here.

        The version answers whatever becomes of its name, on any engine, until ``give``.
        """
        if model == self._book.served_name or (version := self.find(model)) is None:
            return None
        version.num_answers += 1
        return version

    def give(self, version: NumberedVersion) -> None:
        """Count an answer out."""
        assert version.num_answers > 0
        version.num_answers -= 1
        if version.superseded_at is not None:
            self.sweep(version.name)

    def of(self, name: str) -> list[NumberedVersion]:
        """Return the versions of an adapter that are not freed, the oldest first."""
        self._current(name)
        return self.numbered.of(name)

    def find(self, model: str) -> NumberedVersion | None:
        """Return the version of a name, ``name@number`` or ``name@digest``, also behind the base's name and a colon."""
        for name in dict.fromkeys((model, model.removeprefix(f"{self._book.served_name}:"))):
            if name in self._book.adapters:  # an exact name wins
                return self._current(name)
            self._current(name_of(name))
            if (version := self.numbered.find(name)) is not None:
                return version
        return None

    def _current(self, name: str) -> NumberedVersion | None:
        """Return the version of a name; the first of a name gets its number when it is first asked for."""
        current, entry = self.numbered.current(name), self._book.adapters.get(name)
        if current is not None or entry is None or (identity := self._book.identity(name)) is None:
            return current
        number = self.numbered.last_number(name) + 1
        return self.numbered.move(name, number, identity.key, entry.path, now=self._now())

    # -- changes; names are locked ------------------------------------------------------------------------------------

    def check_name(self, name: str) -> None:
        """Raise ``AdapterError`` for a name that an adapter's version has, or may have."""
        if is_label(name):
            raise AdapterError(name, f"its name begins with {LABEL_MARK!r}")
        stem = name_of(name)
        if stem != name and name not in self._book.adapters and self.of(stem):
            raise AdapterExists(name, f"names such as this are those of the versions of {stem!r}, which never change")

    async def put(
        self, name: str, path: str, terms: PublicationTerms = AS_LOADED
    ) -> tuple[NumberedVersion, AdapterStatus]:
        """Load a version on every engine, or on none, and move its name to it; return it and its state.

        Errors are those of ``FleetAdapters.load``; ``AdapterExists`` for a number that a version has already as well.
        """
        await self.settled(name)
        before = self._current(name)
        number = self._number(name, terms)
        held_as = name if before is None else f"{LABEL_MARK}{name}@{number}"
        is_pinned = terms.is_pinned or self._book.is_pinned(name)
        if before is None and name in self._book.adapters:
            raise CapacityError(f"no engine has loaded {name!r} yet", status=503)

        async def bring(client: EngineClient) -> AdapterStatus:
            try:
                status = await client.load_adapter(held_as, path, by_header=terms.is_by_header)
            except AdapterError as error:
                raise type(error)(name, error.reason) from None
            try:
                if is_pinned:
                    status = await client.pin_adapter(held_as, True)
                if terms.is_preloaded:
                    status = await _reach_device(client, held_as)
                if before is not None and before.held_as not in self._book.labels:
                    await client.point_adapter(before.held_as, name)
            except ManyloraError:
                await client.unload_adapter(held_as)
                raise
            return status

        async def undo(client: EngineClient) -> None:
            await client.unload_adapter(held_as)
            if before is not None and before.held_as not in self._book.labels:
                await client.unload_adapter(before.held_as)

        statuses = await self._engines.everywhere(bring, undo=undo)
        error: ManyloraError | None = None
        if len({one.version.key for one in statuses}) > 1:  # it was written while engines read it
            error = AdapterError(name, "its files changed while engines read them; load it again")
        elif self.numbered.current(name) is not before:
            error = CapacityError(f"{name!r} was lost meanwhile: an engine that starts cannot load it", status=503)
        if error is not None:
            await self._engines.everywhere(undo)
            raise error
        status = statuses[0]
        path = pinned(path, status.version.source)
        version = self._move(name, number, path, status, before, terms)
        if is_pinned:
            self._book.note_pin(name, True)
        logger.info("adapter_loaded name=%s path=%s version=%d", name, path, number)
        if before is not None:
            settling = self._settling[name] = self._beside(self._settle(version, status))
            if terms.is_settled:
                status = await settling
        return version, status

    def _number(self, name: str, terms: PublicationTerms) -> int:
        """Return the number of a name's next version."""
        last = self.numbered.last_number(name)
        number = last + 1 if terms.number is None else terms.number
        if not last < number <= MAX_NUMBER:
            raise AdapterExists(name, f"version {number} out of range {last + 1}..{MAX_NUMBER}: numbers grow")
        return number

    def _move(
        self,
        name: str,
        number: int,
        path: str,
        status: AdapterStatus,
        before: NumberedVersion | None,
        terms: PublicationTerms,
    ) -> NumberedVersion:
        """Point a name to a version that all engines hold, in one turn of the event loop."""
        if before is not None and before.held_as not in self._book.labels:
            self._book.note_label(before.held_as, name)
        self._book.note_load(name, path, status)
        now = self._now()
        version = self.numbered.move(name, number, status.version.key, path, now=now, terms=terms.lease)
        if before is not None:
            self._book.note_label(version.held_as, name)
        if before is not None and before.path == path:
            self.numbered.end(before, now)  # its files are gone, so it could not be read again
        return version

    async def settled(self, name: str) -> None:
        """Wait until the engines' own names stand for the version of a name: its next change must not come before."""
        if (settling := self._settling.get(name)) is not None:
            await asyncio.wait([settling])

    async def _settle(self, version: NumberedVersion, status: AdapterStatus) -> AdapterStatus:
        """Point the engines' own name to its version, and free the versions that nothing needs any more."""
        name, held_as = version.name, version.held_as

        async def point(client: EngineClient) -> AdapterStatus:
            if self.numbered.current(name) is not version:  # an engine that starts has lost it meanwhile
                return status
            made = await client.point_adapter(name, held_as)
            if self._book.is_pinned(name):
                made = await client.pin_adapter(name, True)
                await client.pin_adapter(held_as, False)
            return made

        try:
            statuses = await self._engines.everywhere(point)
            self.sweep(name)
            await asyncio.gather(*[task for version, task in self._freeing.items() if version.name == name])
            return statuses[0]
        finally:
            del self._settling[name]

    def engine_name(self, name: str) -> str:
        """Return the name by which engines hold an adapter, or a version by its label."""
        version = None if name in self._book.adapters else self.find(name)
        return version.held_as if version is not None and version.held_as in self._book.labels else name

    def note_pin(self, held_as: str, is_pinned: bool) -> None:
        """Learn that a name or label was pinned or unpinned: a version whose label is pinned keeps its lease."""
        version = self.numbered.labelled(held_as.removeprefix(LABEL_MARK)) if is_label(held_as) else None
        if version is not None:
            version.is_pinned = is_pinned and not version.has_ended
            self.sweep(version.name)

    def end(self, version: NumberedVersion) -> None:
        """End the lease of a version; ``AdapterError`` if its name stands for it."""
        if self.numbered.current(version.name) is version:
            raise AdapterError(version.label, f"{version.name!r} stands for it: move that name first, or unload it")
        self.numbered.end(version, self._now())
        self.sweep(version.name)

    def close(self, name: str) -> None:
        """Learn that a name was unloaded: its versions are freed as their last answers end."""
        self.numbered.close(name, self._now())
        self.sweep(name)

    def lose(self, name: str) -> None:
        """Learn that an engine could not load a name or label, which no engine is to hold from now on."""
        version = self.numbered.labelled(name.removeprefix(LABEL_MARK)) if is_label(name) else None
        if not is_label(name):
            self.close(name)
        elif version is not None and self.numbered.current(version.name) is not version:
            self.end(version)

    # -- freeing -----------------------------------------------------------------------------------------------------

    def sweep(self, name: str) -> None:
        """Free the versions of a name that nothing needs any more, beside whatever goes on."""
        now = self._now()
        for version in self.numbered.freeable(name, now):
            if version not in self._freeing:
                self._freeing[version] = self._beside(self._free(version))
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()
        if (ends_at := self.numbered.next_end_at(name)) < math.inf:
            self._timers[name] = asyncio.get_running_loop().call_at(ends_at, self.sweep, name)

    def stop(self) -> None:
        """Free no more."""
        for task in self._tasks:
            task.cancel()
        for timer in self._timers.values():
            timer.cancel()

    def _beside(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Do work beside whatever goes on, until ``stop``."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end_task)
        return task

    def _end_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Engines that live have made the change; those that start take it from the book.
            logger.warning("versions_not_settled error=%r", error)

    async def _free(self, version: NumberedVersion) -> None:
        try:
            async with self._book.lock(version.held_as):
                if version.held_as in self._book.labels:
                    self._book.forget_label(version.held_as)  # first: an engine that starts must not load it again
                    with contextlib.suppress(AdapterError, CapacityError, EngineDead):
                        await self._engines.everywhere(lambda client: client.unload_adapter(version.held_as))
                self.numbered.drop(version)
            self.on_freed(version.path)
        finally:
            del self._freeing[version]

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


async def _reach_device(client: EngineClient, name: str) -> AdapterStatus:
    """Copy an adapter to an engine's device, and wait until it is there.

    ``AdapterError`` if it cannot be read; ``CapacityError`` if there was no room for it in time.
    """
    reason = CapacityError(f"{name!r} did not reach the device in {PRELOAD_TIMEOUT_S:g} s", status=503)
    deadline = asyncio.get_running_loop().time() + PRELOAD_TIMEOUT_S
    while asyncio.get_running_loop().time() < deadline:
        try:
            status = await client.warm_adapter(name)
        except CapacityError as error:  # others take the room, and may give it back
            reason = error
        else:
            if status.tier is Tier.DEVICE:
                return status
            if status.error is not None:
                raise AdapterError(name, status.error)
        await asyncio.sleep(LOOK_S)
    raise reason
