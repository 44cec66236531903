"""Adapters of the whole fleet: placed on demand on single backends, and changed on every backend as one operation.

On demand, an adapter that one backend lists is loaded on another of the same base, from its path. ``max_placed`` bounds
the adapters that the router keeps on a backend by itself. The least recently used of them without requests is unloaded
to make room; an adapter that the router did not place is never unloaded.

The log holds the changes that were made through this router. A backend that joins or returns makes those that it missed
before it gets requests; one that cannot load an adapter joins without it. A backend that failed on a change gets no
requests for that adapter until it has made the change, which is tried again.
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
from manylora.route.fleet.changes import AdapterAccount, BackendChanges, Change
from manylora.route.fleet.members import Backends
from manylora.serving.http.errors import HttpError

__all__ = ["AdapterPlacement", "RoutedAdapters"]

MAX_BACK = 64  # changes that are made at once on a backend that lost them
MAX_AGAIN = 4  # failed changes that are tried again on one backend at one poll

logger = logging.getLogger(__name__)

Answers = dict[Backend, tuple[int, str]]  # status and text by backend


@dataclass(slots=True, eq=False)
class AdapterPlacement:
    """Loads adapters on backends where requests want them. For the event loop's thread alone."""

    config: ProxyConfig  # its ``max_placed`` bounds the adapters that are loaded on demand on a backend
    backends: Backends  # read their lists of models after a load
    changes: BackendChanges  # makes the changes of the log, which go before lists of models
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
            elif most:
                most -= 1
                self.place_again(account.backend, name)

    def place_again(self, backend: Backend, name: str) -> None:
        """Begin to make the last change of an adapter on a backend, unless the next one is under way."""
        if name != self._blocked:
            self.place(backend, name)

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


@dataclass(slots=True, eq=False)
class RoutedAdapters:
    """Loads and unloads adapters on all backends. For the event loop's thread alone."""

    backends: Backends
    changes: BackendChanges  # makes changes on single backends
    placement: AdapterPlacement  # loads adapters on demand, and holds off while an adapter changes
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def load(self, name: str, path: str, *, in_place: bool) -> None:
        """Load an adapter on every backend that is up.

        The change enters the log if one backend succeeds; the others that were up get no requests for the adapter until
        they have it.

        ``HttpError`` if all have it (400), or some failed: the status of one, and a line for each; ``CapacityError`` if
        none is up.
        """

        def lacks(backend: Backend) -> bool:
            return in_place or name not in backend.cards or name in backend.outdated

        async with self._one_at_a_time, self.placement.blocked(name):
            up, known = self._up(), self.changes.log.get(name)
            is_other = known is not None and known.path not in (None, path) and not in_place
            if not any(map(lacks, up)) or (is_other and not all(map(lacks, up))):
                raise HttpError(
                    400,
                    f"The lora adapter '{name}' has already been loaded. "
                    "If you want to load the adapter in place, set 'load_inplace' to True.",
                    param="lora_name",
                    kind="InvalidUserInput",
                )
            is_same = known is not None and known.path == path and not in_place
            change = known if known is not None and is_same else self.changes.log.next(path)
            answers = await self._everywhere(name, change, lacks, in_place=in_place)
            self._enter(name, change, answers)

    async def unload(self, name: str) -> None:
        """Unload an adapter from every backend that has it.

        ``HttpError`` if none has it (404), or one failed, with its status; ``CapacityError`` if none is up.
        """

        def holds(backend: Backend) -> bool:
            return name in backend.cards

        async with self._one_at_a_time, self.placement.blocked(name):
            known = self.changes.log.get(name)
            if not any(map(holds, self._up())) and (known is None or known.path is None):
                raise HttpError(404, f"The lora adapter '{name[:200]}' cannot be found.", param="lora_name")
            change = self.changes.log.next(None)
            self._enter(name, change, await self._everywhere(name, change, holds))

    async def prepare(self, backend: Backend) -> bool:
        """Make the changes that a backend has missed; return whether it may have requests.

        It may have them without an adapter that it cannot load, for which it then gets none. On a backend that is up,
        try failed changes again, unless it has restarted between two polls.
        """
        account = self.changes.account_of(backend)
        self.changes.note_current(backend)
        if backend.health.is_up:
            if backend.has_restarted or self.changes.has_lost_one(backend):
                self._bring_back(backend)
            self.placement.try_again(account, MAX_AGAIN)
            return True
        await self.placement.ended(lambda other, name: other is backend)
        account.rejoin()
        if missed := self.changes.missed(backend):
            await self.changes.make(backend, missed, in_place=True)
        backend.has_restarted = False
        return not self.changes.missed(backend)  # the log may have changed meanwhile

    def _bring_back(self, backend: Backend) -> None:
        """Make the changes that a backend has lost while it was up; until then it gets no requests for them."""
        missed = self.changes.missed(backend)
        for name, _ in missed:
            self.backends.catalog.hide(backend, name)
        for name, _ in missed[:MAX_BACK]:
            self.placement.place_again(backend, name)
        # A change that is under way may have been made there before: it is not in the log yet.
        backend.has_restarted = bool(missed) or self._one_at_a_time.locked()

    async def _everywhere(
        self, name: str, change: Change, concerns: Callable[[Backend], bool], *, in_place: bool = False
    ) -> Answers:
        """Make a change on every backend that is up and that it concerns, and on those that come up meanwhile.

        When this returns, every such backend has been asked: the caller enters the change into the log before the
        event loop runs on, and backends that come up later get it from there.
        """
        answers: Answers = {}
        asked: dict[Backend, int] = {}  # and the number of times that it had joined
        while pending := [
            one
            for one in self.backends
            if one.health.is_up and asked.get(one) != one.health.num_joins and concerns(one)
        ]:
            asked |= {one: one.health.num_joins for one in pending}
            done = await asyncio.gather(
                *(self.changes.make(one, [(name, change)], in_place=in_place) for one in pending)
            )
            answers |= {one: answer for one, (answer,) in zip(pending, done, strict=True)}
        return {backend: answer for backend, answer in answers.items() if not backend.is_leaving}

    def _enter(self, name: str, change: Change, answers: Answers) -> None:
        """Enter a change into the log, unless all backends failed on it.

        ``HttpError`` if some or all backends failed.
        """
        failed = [(backend, status, text) for backend, (status, text) in answers.items() if status != 200]
        if not failed or len(failed) < len(answers):
            dropped = self.changes.log.enter(name, change)
            for backend, _, _ in failed:
                self.backends.catalog.hide(backend, name)
            for account in self.changes.accounts:
                account.placed.pop(name, None)
                if dropped is not None:
                    account.forget(dropped)
                    self.backends.catalog.show(account.backend, dropped)
        if failed:
            lines = "; ".join(f"{backend.url}: {status} {text[:200]}" for backend, status, text in failed)
            status = failed[0][1]
            raise HttpError(
                status if 400 <= status < 600 else 502,
                f"{len(failed)} of {len(answers)} backends failed on adapter '{name[:200]}': {lines}",
            )

    def _up(self) -> list[Backend]:
        up = [backend for backend in self.backends if backend.health.is_up]
        if not up:
            raise self.backends.none_up()
        return up
