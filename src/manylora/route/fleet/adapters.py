"""Adapters of the whole fleet: loaded, replaced and unloaded on every backend as one operation, and placed on demand.

The book holds the changes that were made through this router. A backend that joins or returns makes those that it
missed before it gets requests; one that cannot load an adapter joins without it. A backend that failed on a change gets
no requests for that adapter until it has made the change, which is tried again. On demand, an adapter that one backend
lists is loaded on another of the same base, from the same path.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from manylora.core.errors import CapacityError
from manylora.route.backends.backend import Backend
from manylora.route.config import ProxyConfig
from manylora.route.fleet.admin_calls import AdminCalls
from manylora.route.fleet.book import Book, Change
from manylora.route.fleet.catalog import Catalog
from manylora.route.fleet.members import Backends
from manylora.route.fleet.placed_adapters import PlacedAdapters
from manylora.serving.http.errors import HttpError

__all__ = ["BackendAdapters"]

MAX_AGAIN = 4
"""Failed changes that are tried again on one backend at one poll."""

logger = logging.getLogger(__name__)

Answers = dict[Backend, tuple[int, str]]
"""Status and text by backend."""


class BackendAdapters:
    """Loads and unloads adapters on backends. For the event loop's thread alone.

    Args:
        config: Times, the key and limits.
        backends: All of them.
        catalog: Their models.
        now: Returns the time in seconds.
    """

    def __init__(self, config: ProxyConfig, backends: Backends, catalog: Catalog, now: Callable[[], float]) -> None:
        self._config = config
        self._backends = backends
        self._catalog = catalog
        self._now = now
        self._calls = AdminCalls(config)
        self._book = Book()
        self._shelves: dict[Backend, PlacedAdapters] = {}
        self._placing: dict[tuple[Backend, str], asyncio.Task[bool]] = {}
        self._lock = asyncio.Lock()
        self._changing: str | None = None

    # -- changes of the whole fleet ----------------------------------------------------------------------------------

    async def load(self, name: str, path: str, *, in_place: bool) -> None:
        """Load an adapter on every backend that is up.

        It enters the book if one backend succeeds; the others that were up get no requests for it until they have it.

        Raises:
            HttpError: 400, all have it; otherwise the status of a backend that failed, with a line for each that did.
            CapacityError: No backend is up.
        """

        def lacks(backend: Backend) -> bool:
            return in_place or name not in backend.cards or name in backend.outdated

        async with self._change(name):
            up, known = self._up(), self._book.get(name)
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
            change = known if known is not None and is_same else self._book.next(path)
            answers = await self._everywhere(name, change, lacks, in_place=in_place)
            self._enter(name, change, answers)

    async def unload(self, name: str) -> None:
        """Unload an adapter from every backend that has it.

        Raises:
            HttpError: 404, none has it; otherwise the status of a backend that failed.
            CapacityError: No backend is up.
        """

        def holds(backend: Backend) -> bool:
            return name in backend.cards

        async with self._change(name):
            known = self._book.get(name)
            if not any(map(holds, self._up())) and (known is None or known.path is None):
                raise HttpError(404, f"The lora adapter '{name[:200]}' cannot be found.", param="lora_name")
            change = self._book.next(None)
            self._enter(name, change, await self._everywhere(name, change, holds))

    @contextlib.asynccontextmanager
    async def _change(self, name: str) -> AsyncIterator[None]:
        """Hold off other changes, and loads and unloads of this adapter on demand."""
        async with self._lock:
            self._changing = name
            try:
                await self._settled(lambda key: key[1] == name)
                for shelf in list(self._shelves.values()):
                    if shelf.leaving == name:
                        async with shelf.room:
                            pass
                yield
            finally:
                self._changing = None

    async def _everywhere(
        self, name: str, change: Change, concerns: Callable[[Backend], bool], *, in_place: bool = False
    ) -> Answers:
        """Make a change on every backend that is up and that it concerns, and on those that come up meanwhile.

        When this returns, every such backend has been asked: the caller enters the change into the book before the
        event loop runs on, and backends that come up later get it from there.
        """
        answers: Answers = {}
        asked: dict[Backend, int] = {}  # and how often it had joined
        while pending := [
            one
            for one in self._backends
            if one.health.is_up and asked.get(one) != one.health.num_joins and concerns(one)
        ]:
            asked |= {one: one.health.num_joins for one in pending}
            done = await asyncio.gather(*(self._make(one, [(name, change)], in_place=in_place) for one in pending))
            answers |= {one: answer for one, (answer,) in zip(pending, done, strict=True)}
        return {backend: answer for backend, answer in answers.items() if not backend.is_leaving}

    def _enter(self, name: str, change: Change, answers: Answers) -> None:
        """Enter a change into the book, unless all backends failed on it; raise with the failures if there are any."""
        failed = [(backend, status, text) for backend, (status, text) in answers.items() if status != 200]
        if not failed or len(failed) < len(answers):
            dropped = self._book.note(name, change)
            for backend, _, _ in failed:
                self._catalog.hide(backend, name)
            for backend, shelf in self._shelves.items():
                shelf.placed.pop(name, None)
                if dropped is not None:
                    shelf.forget(dropped)
                    self._catalog.show(backend, dropped)
        if failed:
            lines = "; ".join(f"{backend.url}: {status} {text[:200]}" for backend, status, text in failed)
            status = failed[0][1]
            raise HttpError(
                status if 400 <= status < 600 else 502,
                f"{len(failed)} of {len(answers)} backends failed on adapter '{name[:200]}': {lines}",
            )

    # -- one backend -------------------------------------------------------------------------------------------------

    async def prepare(self, backend: Backend) -> bool:
        """Make the changes of the book that a backend has missed; return whether it may have requests.

        It may have them without an adapter that it cannot load, for which it then gets none. On a backend that has
        requests already, try failed changes again.
        """
        shelf = self._shelf(backend)
        if backend.health.is_up:
            self._try_again(backend, shelf)
            return True
        await self._settled(lambda key: key[0] is backend)
        shelf.rejoins(backend)
        if missed := self._missed(backend, shelf):
            await self._make(backend, missed, in_place=True)
        return not self._missed(backend, shelf)  # the book may have changed meanwhile

    def left(self, backend: Backend) -> None:
        """Forget a backend."""
        self._shelves.pop(backend, None)

    def _missed(self, backend: Backend, shelf: PlacedAdapters) -> list[tuple[str, Change]]:
        return [
            (name, change)
            for name, change in self._book
            if not shelf.has(backend, name, change) and not shelf.is_left_out(name)
        ]

    def _try_again(self, backend: Backend, shelf: PlacedAdapters) -> None:
        num_left = MAX_AGAIN
        for name in shelf.due(self._now()):
            change = self._book.get(name)
            if change is None or shelf.has(backend, name, change):
                shelf.note_over(name)
            elif name != self._changing and num_left:
                num_left -= 1
                self.place(backend, name)

    async def _make(
        self, backend: Backend, changes: Sequence[tuple[str, Change]], *, in_place: bool
    ) -> list[tuple[int, str]]:
        """Make changes on a backend, read its models, and note the changes that it has made.

        Args:
            backend: The backend.
            changes: Names and their changes.
            in_place: Whether to replace adapters also where the backend is not known to have them.
        """
        shelf = self._shelf(backend)

        async def call(name: str, change: Change) -> tuple[int, str]:
            async with shelf.calls:
                if change.path is None:
                    return await self._calls.unload(backend, name)
                is_there = in_place or name in backend.cards
                return await self._calls.load(backend, name, change.path, in_place=is_there)

        answers = await asyncio.gather(*(call(name, change) for name, change in changes))
        await self._backends.read_models(backend)
        for (name, change), (status, text) in zip(changes, answers, strict=True):
            if status == 200 and (name in backend.cards) == (change.path is not None):
                shelf.note_made(backend, name, change)
                self._catalog.show(backend, name)
                continue
            shelf.note_failed(name, status, self._now())
            if self._book.get(name) is change:
                self._catalog.hide(backend, name)
            logger.warning(
                "adapter_failed adapter=%s url=%s status=%d answer=%r", name, backend.url, status, text[:200]
            )
        return answers

    def is_current(self, backend: Backend, name: str) -> bool:
        """Whether a backend has made the last change of an adapter; true for models that were never changed."""
        change = self._book.get(name)
        return change is None or self._shelf(backend).has(backend, name, change)

    # -- on demand ---------------------------------------------------------------------------------------------------

    def wants(self, backend: Backend, name: str) -> bool:
        """Whether an adapter can be placed on a backend: it is not there, its path is known, it did not just fail."""
        shelf = self._shelf(backend)
        if (name in backend.cards and name not in backend.outdated) or name in (self._changing, shelf.leaving):
            return False
        return shelf.is_due(name, self._now()) and self._path(name) is not None

    def place(self, backend: Backend, name: str) -> asyncio.Task[bool]:
        """Load an adapter on a backend; the task returns whether that worked. Calls at once share a task."""
        task = self._placing.get((backend, name))
        if task is None:
            task = self._placing[backend, name] = asyncio.create_task(self._place(backend, name))
            task.add_done_callback(lambda _: self._placing.pop((backend, name), None))
        return task

    def used(self, backend: Backend, name: str) -> None:
        """Learn that a request for an adapter went to a backend."""
        shelf = self._shelves.get(backend)
        if shelf is not None and name in shelf.placed:
            del shelf.placed[name]
            shelf.placed[name] = self._now()

    async def _place(self, backend: Backend, name: str) -> bool:
        change, shelf = self._book.get(name), self._shelf(backend)
        if change is not None:
            ((status, _),) = await self._make(backend, [(name, change)], in_place=True)
            return status == 200 and shelf.has(backend, name, change)
        path = self._catalog.source(name)
        if path is None or not await self._reserve(backend, shelf, name):
            return False
        async with shelf.calls:
            status, text = await self._calls.load(backend, name, path, in_place=False)
        await self._backends.read_models(backend)
        if status != 200:
            shelf.note_failed(name, status, self._now())
            if name not in backend.cards:
                shelf.placed.pop(name, None)
        logger.info("adapter_placed adapter=%s url=%s status=%d answer=%r", name, backend.url, status, text[:200])
        return status == 200

    async def _reserve(self, backend: Backend, shelf: PlacedAdapters, name: str) -> bool:
        """Count an adapter among those placed on a backend, after others were unloaded; return whether it has room."""
        most = self._config.max_placed
        async with shelf.room:
            while most is not None and len(shelf.placed) >= most:
                idle = next((one for one in shelf.placed if self._is_idle(backend, one)), None)
                if idle is None:
                    return False
                status, text = await self._take_away(backend, shelf, idle)
                if status != 200 or idle in backend.cards:
                    shelf.placed[idle] = shelf.placed.pop(idle)  # it still takes a place; another one is next
                    shelf.note_failed(name, status, self._now())
                    logger.warning("adapter_kept adapter=%s url=%s answer=%r", idle, backend.url, text[:200])
                    return False
                del shelf.placed[idle]
            shelf.placed[name] = self._now()
            return True

    async def _take_away(self, backend: Backend, shelf: PlacedAdapters, name: str) -> tuple[int, str]:
        """Unload an adapter; no request for it goes there meanwhile."""
        shelf.leaving = name
        self._catalog.hide(backend, name)
        try:
            answer = await self._calls.unload(backend, name)
            await self._backends.read_models(backend)
            return answer
        finally:
            shelf.leaving = None
            self._catalog.show(backend, name)

    def _is_idle(self, backend: Backend, name: str) -> bool:
        is_used = backend.in_flight_by_adapter[name] or (backend, name) in self._placing
        return not is_used and name != self._changing

    def _path(self, name: str) -> str | None:
        change = self._book.get(name)
        return self._catalog.source(name) if change is None else change.path

    async def _settled(self, concerns: Callable[[tuple[Backend, str]], bool]) -> None:
        """Wait for loads on demand that are under way."""
        tasks = [task for key, task in self._placing.items() if concerns(key)]
        await asyncio.gather(*tasks, return_exceptions=True)

    def _shelf(self, backend: Backend) -> PlacedAdapters:
        shelf = self._shelves.get(backend)
        if shelf is None:
            shelf = PlacedAdapters()
            if not backend.is_leaving:
                self._shelves[backend] = shelf
        return shelf

    def _up(self) -> list[Backend]:
        up = [backend for backend in self._backends if backend.health.is_up]
        if not up:
            raise CapacityError("No backend is up; please try again.", retry_after_s=self._config.poll_s, status=503)
        return up
