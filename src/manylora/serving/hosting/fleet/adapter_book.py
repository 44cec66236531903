"""The adapters of a fleet, by name: the state that survives an engine.

A change is recorded once the engines have made it, and an engine that starts loads the recorded adapters. Changes of
one name wait for each other; changes of different names do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

from manylora.core.adapters.sources import is_url, pinned
from manylora.core.engine.adapters.registry import is_label
from manylora.core.engine.status import AdapterStatus
from manylora.core.errors import AdapterError, AdapterExists, AdapterNotFound, CapacityError, ConfigError, ManyloraError
from manylora.serving.hosting.links.client import EngineClient
from manylora.serving.hosting.protocol import AdapterIdentity

__all__ = ["AdapterBook", "LoadedAdapter", "LoraModule", "UnavailableAdapter"]


logger = logging.getLogger(__name__)

FIRST_RETRY_S = 1.0
"""Wait before the first further try of an adapter whose registry did not answer; it doubles with each."""
MAX_RETRY_S = 60.0


@dataclass(frozen=True, slots=True)
class LoraModule:
    """An adapter to load at start: vLLM's ``--lora-modules name=path``."""

    name: str
    path: str  # its directory, or its URL
    # Whether an error in it stops the start. An adapter that was found in a folder is left out with a line in the log:
    # a broken upload of one tenant must not stop the others.
    is_required: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedAdapter:
    """An entry of the book; a change replaces it."""

    path: str  # directory of the adapter
    is_pinned: bool = False
    loaded_at: int = 0  # time of its first load, in seconds since the epoch: ``created`` in ``/v1/models``
    num_loads: int = 1  # loads under its name; a replacement may have the path of the version before it


@dataclass(frozen=True, slots=True, kw_only=True)
class UnavailableAdapter:
    """An adapter whose registry did not answer when an engine started; it is tried again."""

    entry: LoadedAdapter  # its entry, which it gets back
    reason: str  # the error of the last try
    num_tries: int  # tries so far
    retry_at: float  # time of the next try, on the event loop's clock


class AdapterBook:
    """The adapters that every engine must hold, by name. For the event loop's thread alone."""

    def __init__(self, *, served_name: str, epoch_s: Callable[[], float] = time.time) -> None:
        self.served_name = served_name
        self.adapters: dict[str, LoadedAdapter] = {}
        self.labels: dict[str, LoadedAdapter] = {}
        """Versions that every engine must hold beside the current ones, by label."""
        self.unavailable: dict[str, UnavailableAdapter] = {}
        """Adapters that no engine holds until their registry answers again, by name."""
        self.num_changes = 0  # changes of names and paths; equal numbers mean equal lists
        self.ranks: dict[str, int] = {}  # rank of each adapter that an engine has loaded, by name; for routers
        self._identities: dict[str, AdapterIdentity] = {}  # as the first engine registered them
        self._epoch_s = epoch_s
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def open(self, modules: Iterable[LoraModule]) -> None:
        """Record the adapters given at start, before an engine loads the model.

        ``ConfigError`` if two required models have one name, ``AdapterNotFound`` if a required one has no directory.
        """
        for module in modules:
            if module.name in self.adapters or module.name == self.served_name:
                if not module.is_required:
                    logger.warning("adapter_skipped name=%a reason='another model has the name'", module.name)
                    continue
                raise ConfigError(f"Got the name {module.name!r} twice, expected every model to have its own")
            if module.is_required and not is_url(module.path) and not os.path.isdir(module.path):
                raise AdapterNotFound(module.name, f"there is no directory {module.path!r}")
            self.adapters[module.name] = LoadedAdapter(path=module.path, loaded_at=int(self._epoch_s()))
        self.num_changes += 1

    @contextlib.asynccontextmanager
    async def free(self, name: str, *, may_replace: bool) -> AsyncIterator[LoadedAdapter | None]:
        """Lock a name for a load while inside, or raise ``AdapterExists``; yield the entry that is replaced, if any."""
        if name == self.served_name:
            raise AdapterExists(name, "this is the name of the base model")
        async with self.lock(name):
            before = self.adapters.get(name)
            if before is not None and not may_replace:
                raise AdapterExists(name, "it is loaded already")
            yield before

    @contextlib.asynccontextmanager
    async def known(self, name: str) -> AsyncIterator[None]:
        """Lock an adapter that is loaded while inside, or raise ``AdapterNotFound``."""
        async with self.lock(name):
            if name not in self.adapters and name not in self.unavailable and name not in self.labels:
                raise AdapterNotFound(name, "no adapter of this name is loaded")
            yield

    def note_load(self, name: str, path: str, status: AdapterStatus) -> None:
        """Record a load; a replacement keeps the pin and ``loaded_at``."""
        aside = self.unavailable.pop(name, None)
        before = self.adapters.get(name) or (None if aside is None else aside.entry)
        self.num_changes += 1
        version = status.version
        self.ranks[name] = version.rank
        self._identities[name] = AdapterIdentity(version.rank, version.key, version.file_key, version.source)
        if before is None:
            self.adapters[name] = LoadedAdapter(path=path, loaded_at=int(self._epoch_s()))
        else:
            self.adapters[name] = replace(before, path=path, num_loads=before.num_loads + 1)

    def note_label(self, label: str, name: str) -> None:
        """Record a label for an adapter's present version, which stays when the adapter is replaced."""
        self.labels[label] = replace(self.adapters[name], is_pinned=False)
        self._identities[label] = self._identities[name]

    def forget_label(self, label: str) -> None:
        """Remove a label."""
        self.labels.pop(label, None)
        self._identities.pop(label, None)

    def identity(self, name: str) -> AdapterIdentity | None:
        """Return the version that engines have registered under a name; ``None`` before one has."""
        return self._identities.get(name)

    def is_pinned(self, name: str) -> bool:
        """Whether an adapter or a label is pinned, or was before its registry ceased to answer."""
        aside = self.unavailable.get(name)
        entry = self._entry(name) if aside is None else aside.entry
        return entry is not None and entry.is_pinned

    def note_pin(self, name: str, is_pinned: bool) -> None:
        """Record a pin or an unpin."""
        entries = self.labels if name in self.labels else self.adapters
        entries[name] = replace(entries[name], is_pinned=is_pinned)

    def forget(self, name: str) -> None:
        """Remove a name."""
        self.num_changes += 1
        self.adapters.pop(name, None)
        self.ranks.pop(name, None)
        self._identities.pop(name, None)
        self.unavailable.pop(name, None)

    def set_aside(self, name: str, reason: str, now: float) -> None:
        """Remove a name until its registry answers again, and put off the next try, each time for longer."""
        aside = self.unavailable.get(name)
        entry = self.adapters.get(name) if aside is None else aside.entry
        if entry is None:  # it was unloaded meanwhile
            return
        num_tries = 1 if aside is None else aside.num_tries + 1
        self.forget(name)
        retry_at = now + min(MAX_RETRY_S, FIRST_RETRY_S * 2.0 ** min(num_tries - 1, 30))
        self.unavailable[name] = UnavailableAdapter(entry=entry, reason=reason, num_tries=num_tries, retry_at=retry_at)

    async def bring_up(self, client: EngineClient, held: dict[str, LoadedAdapter]) -> list[AdapterError]:
        """Register the adapters of the book on an engine, without reading their weights.

        ``held`` are the entries that the engine has loaded, by name, and is updated. Return the errors of adapters that
        could not be loaded; an error that does not concern one adapter is raised. Without errors ``held`` equals the
        book, until the caller next awaits.
        """
        errors: list[AdapterError] = []
        while not errors:
            stale = [
                name for name in {**self.adapters, **self.labels, **held} if self._entry(name) is not held.get(name)
            ]
            if not stale:
                break
            async with contextlib.AsyncExitStack() as locks:
                # One order for all: none waits in a circle. A publication holds its name when it frees a label.
                for name in sorted(stale, key=lambda name: (is_label(name), name)):
                    await locks.enter_async_context(self.lock(name))
                errors += await self._bring(client, held, stale)
        return errors

    async def _bring(
        self, client: EngineClient, held: dict[str, LoadedAdapter], names: Iterable[str]
    ) -> list[AdapterError]:
        """Make an engine hold the book's entries of these names, which are locked; return the errors."""
        wanted = {name: entry for name in names if (entry := self._entry(name)) is not None}
        for name in [name for name in names if name not in wanted and name in held]:
            del held[name]
            await client.unload_adapter(name)
        if not wanted:
            return []
        adapters = [(name, entry.path, name in held, self._identities.get(name)) for name, entry in wanted.items()]
        registered, refused = await client.load_adapters(adapters)
        errors = [_about(name, error) for name, error in refused.items()]
        for name, identity in registered.items():
            if name in self.adapters:
                self.ranks[name] = identity.rank
            self._identities[name] = identity
            before, entry = held.get(name), self._pin(name, wanted[name], identity.source)
            held[name] = entry
            if entry.is_pinned or (before is not None and before.is_pinned):
                try:
                    await client.pin_adapter(name, entry.is_pinned)
                except (AdapterError, CapacityError) as error:
                    errors.append(_about(name, error))
        return errors

    def _pin(self, name: str, entry: LoadedAdapter, source: str) -> LoadedAdapter:
        """Keep to the commit of a hub that the first engine has read, whatever its branch or tag names later."""
        if (path := pinned(entry.path, source)) != entry.path:
            logger.info("adapter_pinned name=%s url=%s", name, path)
            entry = replace(entry, path=path)
            (self.adapters if name in self.adapters else self.labels)[name] = entry
            self.num_changes += 1
        return entry

    def _entry(self, name: str) -> LoadedAdapter | None:
        """Return what engines must hold under a name or label."""
        return self.adapters.get(name) or self.labels.get(name)

    def lock(self, name: str) -> asyncio.Lock:
        """Return the lock that orders the changes of one name."""
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock


def _about(name: str, error: ManyloraError) -> AdapterError:
    """Return an adapter's error; raise one that does not concern a single adapter."""
    if isinstance(error, AdapterError):
        return error
    if isinstance(error, CapacityError):
        return AdapterError(name, str(error))
    raise error
