"""Which adapters are loaded from where: all that survives an engine.

The book says what every engine of a fleet shall hold. A change is written down once the engines have carried it out,
and an engine that starts is brought up to the book. Changes of one name wait for each other, those of different names
do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

from manylora.engine.status import AdapterStatus
from manylora.errors import AdapterError, AdapterExists, AdapterNotFound, CapacityError, ConfigError
from manylora.hosting.client import EngineClient

__all__ = ["AdapterBook", "LoadedAdapter", "LoraModule"]


@dataclass(frozen=True, slots=True)
class LoraModule:
    """An adapter to load at start: vLLM's ``--lora-modules name=path``.

    Args:
        name: Its name in requests.
        path: Its directory.
        is_required: Whether the server may not start without it. One that was merely found in a folder is left out
            when it is bad, with a line in the log: one tenant's broken upload must not keep the others from starting.
    """

    name: str
    path: str
    is_required: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedAdapter:
    """An entry of the book; every change makes a new one.

    Args:
        path: Its directory.
        is_pinned: Whether it was pinned.
        loaded_at: When it was first loaded, in seconds since the epoch: its ``created`` in ``/v1/models``.
    """

    path: str
    is_pinned: bool = False
    loaded_at: int = 0


class AdapterBook:
    """The adapters that every engine shall hold, by name. Belongs to the event loop's thread.

    Args:
        served_name: The base model's name, which no adapter may take.
        epoch_s: Tells the time for people, in seconds since the epoch.
    """

    def __init__(self, *, served_name: str, epoch_s: Callable[[], float]) -> None:
        self.adapters: dict[str, LoadedAdapter] = {}
        self.ranks: dict[str, int] = {}
        """Rank of each adapter by name, as far as an engine has told; for routers."""
        self._served_name = served_name
        self._epoch_s = epoch_s
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def open(self, modules: Iterable[LoraModule]) -> None:
        """Write down the adapters given at start, before there is an engine.

        Raises:
            ConfigError: Two models have one name.
            AdapterNotFound: A required one has no directory; better known before a model is loaded.
        """
        for module in modules:
            if module.name in self.adapters or module.name == self._served_name:
                raise ConfigError(f"Got the name {module.name!r} twice, expected every model to have its own")
            if module.is_required and not os.path.isdir(module.path):
                raise AdapterNotFound(module.name, f"there is no directory {module.path!r}")
            self.adapters[module.name] = LoadedAdapter(path=module.path, loaded_at=int(self._epoch_s()))

    @contextlib.asynccontextmanager
    async def free(self, name: str, *, may_replace: bool) -> AsyncIterator[LoadedAdapter | None]:
        """Keep a name for a load while inside; yield the entry that it will replace, if there is one.

        Raises:
            AdapterExists: The name is taken.
        """
        if name == self._served_name:
            raise AdapterExists(name, "this is the name of the base model")
        async with self._lock(name):
            before = self.adapters.get(name)
            if before is not None and not may_replace:
                raise AdapterExists(name, "it is loaded already")
            yield before

    @contextlib.asynccontextmanager
    async def known(self, name: str) -> AsyncIterator[None]:
        """Keep an adapter from other changes while inside.

        Raises:
            AdapterNotFound: No such name.
        """
        async with self._lock(name):
            if name not in self.adapters:
                raise AdapterNotFound(name, "no adapter of this name is loaded")
            yield

    def note_load(self, name: str, path: str, status: AdapterStatus) -> None:
        """Write a load down; a replacement stays pinned, and as old as the name."""
        before = self.adapters.get(name)
        self.ranks[name] = status.version.rank
        if before is None:
            self.adapters[name] = LoadedAdapter(path=path, loaded_at=int(self._epoch_s()))
        else:
            self.adapters[name] = replace(before, path=path)

    def note_pin(self, name: str, is_pinned: bool) -> None:
        """Write a pin down, or its end."""
        self.adapters[name] = replace(self.adapters[name], is_pinned=is_pinned)

    def forget(self, name: str) -> None:
        """Strike a name out."""
        self.adapters.pop(name, None)
        self.ranks.pop(name, None)

    async def bring_up(self, client: EngineClient, held: dict[str, LoadedAdapter]) -> list[AdapterError]:
        """Give an engine the adapters of the book.

        Args:
            client: The engine.
            held: The entries that it was brought to, by name; empty for a new engine. Kept up to date.

        Returns:
            The adapters that it could not be given, if any. If there are none, ``held`` is the book, until the caller
            next awaits something.

        Raises:
            ManyloraError: Something that is no adapter's fault.
        """
        errors: list[AdapterError] = []

        async def bring(name: str) -> None:
            async with self._lock(name):
                wanted = self.adapters.get(name)
                try:
                    if wanted is None:
                        del held[name]
                        await client.unload_adapter(name)
                        return
                    status = await client.load_adapter(name, wanted.path, replace=name in held)
                    held[name] = wanted
                    self.ranks[name] = status.version.rank
                    if wanted.is_pinned != status.is_pinned:
                        await client.pin_adapter(name, wanted.is_pinned)
                except AdapterError as error:
                    errors.append(error)
                except CapacityError as error:
                    errors.append(AdapterError(name, str(error)))

        while not errors:
            stale = [name for name in {**self.adapters, **held} if self.adapters.get(name) is not held.get(name)]
            if not stale:
                break
            await asyncio.gather(*map(bring, stale))
        return errors

    def _lock(self, name: str) -> asyncio.Lock:
        """Return the lock that puts the changes of one name in a row."""
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock
