"""Adapters placed on demand: an adapter that one backend lists is loaded on another of the same base, from its path.

``max_placed`` bounds the adapters that the router keeps on a backend by itself. The least recently used one without
requests is unloaded to make room; an adapter that the router did not place is never unloaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from time import monotonic

from manylora.route.backend import Backend
from manylora.route.config import ProxyConfig
from manylora.route.fleet.changes import AdapterAccount, BackendChanges
from manylora.route.fleet.members import Backends

__all__ = ["AdapterPlacement"]

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class AdapterPlacement:
    """Loads adapters on backends where requests want them. For the event loop's thread alone.

    Args:
        config: The bound.
        backends: Read their lists of models after a load.
        changes: Makes the changes of the log, which go before lists of models.
    """

    config: ProxyConfig
    backends: Backends
    changes: BackendChanges
    _tasks: dict[tuple[Backend, str], asyncio.Task[bool]] = field(default_factory=dict)
    _blocked: str | None = None  # the adapter of a change that is under way

    def can_place(self, backend: Backend, name: str) -> bool:
        """Whether an adapter can be placed on a backend: it is not there, its path is known, it did not just fail."""
        account = self.changes.account_of(backend)
        if (name in backend.cards and name not in backend.outdated) or name in (self._blocked, account.leaving):
            return False
        return account.can_try(name, monotonic()) and self._path(name) is not None

    def place(self, backend: Backend, name: str) -> asyncio.Task[bool]:
        """Load an adapter on a backend; the task returns whether that worked. Calls at once share a task."""
        task = self._tasks.get((backend, name))
        if task is None:
            task = self._tasks[backend, name] = asyncio.create_task(self._place(backend, name))
            task.add_done_callback(lambda _: self._tasks.pop((backend, name), None))
        return task

    def note_used(self, backend: Backend, name: str) -> None:
        """Learn that a request for an adapter went to a backend."""
        placed = self.changes.account_of(backend).placed
        if name in placed:
            del placed[name]
            placed[name] = monotonic()

    def try_again(self, account: AdapterAccount, most: int) -> None:
        """Try changes again that failed on a backend and are due, up to ``most`` of them."""
        for name in account.failures_due(monotonic()):
            change = self.changes.log.get(name)
            if change is None or account.has_made(name, change):
                account.forget_failure(name)
            elif name != self._blocked and most:
                most -= 1
                self.place(account.backend, name)

    @contextlib.asynccontextmanager
    async def blocked(self, name: str) -> AsyncIterator[None]:
        """Let loads and unloads of an adapter on demand end, and hold others off; for one adapter at a time."""
        assert self._blocked is None
        self._blocked = name
        try:
            await self.ended(lambda backend, other: other == name)
            for account in self.changes.accounts:
                if account.leaving == name:
                    async with account.making_room:
                        pass
            yield
        finally:
            self._blocked = None

    async def ended(self, concerns: Callable[[Backend, str], bool]) -> None:
        """Wait for the loads under way on the backends and of the adapters that are concerned."""
        tasks = [task for key, task in self._tasks.items() if concerns(*key)]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _place(self, backend: Backend, name: str) -> bool:
        change, account = self.changes.log.get(name), self.changes.account_of(backend)
        if change is not None:
            ((status, _),) = await self.changes.make(backend, [(name, change)], in_place=True)
            return status == 200 and account.has_made(name, change)
        path = self.backends.catalog.source(name)
        if path is None or not await self._reserve(account, name):
            return False
        status, text = await self.changes.load(backend, name, path, in_place=False)
        await self.backends.update_models(backend)
        if status != 200:
            account.note_failed(name, status, monotonic())
            if name not in backend.cards:
                account.placed.pop(name, None)
        logger.info("adapter_placed adapter=%s url=%s status=%d answer=%r", name, backend.url, status, text[:200])
        return status == 200

    async def _reserve(self, account: AdapterAccount, name: str) -> bool:
        """Make room for an adapter on a backend, and count it among the placed; return whether there is room."""
        placed = account.placed
        async with account.making_room:
            while self.config.max_placed is not None and len(placed) >= self.config.max_placed:
                idle = next((one for one in placed if self._is_idle(account.backend, one)), None)
                if idle is None:
                    return False
                status, text = await self._take_away(account, idle)
                if status != 200 or idle in account.backend.cards:
                    placed[idle] = placed.pop(idle)  # it still takes a place; another adapter is next
                    account.note_failed(name, status, monotonic())
                    logger.warning("adapter_kept adapter=%s url=%s answer=%r", idle, account.backend.url, text[:200])
                    return False
                del placed[idle]
            placed[name] = monotonic()
            return True

    async def _take_away(self, account: AdapterAccount, name: str) -> tuple[int, str]:
        """Unload an adapter; no request for it goes to the backend meanwhile."""
        backend = account.backend
        account.leaving = name
        self.backends.catalog.hide(backend, name)
        try:
            answer = await self.changes.unload(backend, name)
            await self.backends.update_models(backend)
            return answer
        finally:
            account.leaving = None
            self.backends.catalog.show(backend, name)

    def _is_idle(self, backend: Backend, name: str) -> bool:
        is_used = backend.view.adapters[name] or (backend, name) in self._tasks
        return not is_used and name != self._blocked

    def _path(self, name: str) -> str | None:
        change = self.changes.log.get(name)
        return self.backends.catalog.source(name) if change is None else change.path
