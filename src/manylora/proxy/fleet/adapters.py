"""Adapters of the whole fleet: loaded, replaced and unloaded on every backend as one operation, and placed on demand.

The book holds the adapters that were loaded through this router; a backend that joins or returns gets them before it
gets requests. On demand, an adapter that one backend lists is loaded on another of the same base, from the same path.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from manylora.errors import CapacityError
from manylora.proxy.backends.backend import Backend
from manylora.proxy.backends.report import Kind
from manylora.proxy.config import ProxyConfig
from manylora.proxy.fleet.catalog import Catalog
from manylora.proxy.fleet.members import Backends
from manylora.proxy.upstream.fetch import FetchFailed, fetch
from manylora.proxy.upstream.head import request_head
from manylora.server.errors import HttpError

__all__ = ["FleetAdapters"]

MAX_ANSWER_BYTES = 64 * 1024
MAX_LOADS_AT_ONCE = 4
"""Loads at one backend at once, when it gets the book."""
AGAIN_S = 30.0
"""Time between two tries to place an adapter on a backend that could not load it, in seconds."""
MAX_FAILED = 100_000

logger = logging.getLogger(__name__)


class FleetAdapters:
    """Loads and unloads adapters on backends.

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
        self._book: dict[str, str] = {}
        self._placing: dict[tuple[Backend, str], asyncio.Task[bool]] = {}
        self._placed: dict[Backend, dict[str, float]] = {}  # when each was last asked for; the oldest first
        self._failed_at: dict[tuple[Backend, str], float] = {}
        self._changing = asyncio.Lock()

    async def load(self, name: str, path: str, *, in_place: bool) -> None:
        """Load an adapter on every backend that is up.

        Raises:
            HttpError: 400, all have it; otherwise the status of a backend that failed, with a line for each that did.
            CapacityError: No backend is up.
        """
        async with self._changing:
            up = self._up()
            missing = [backend for backend in up if in_place or name not in backend.cards]
            if not missing:
                raise HttpError(
                    400,
                    f"The lora adapter '{name}' has already been loaded. "
                    "If you want to load the adapter in place, set 'load_inplace' to True.",
                    param="lora_name",
                    kind="InvalidUserInput",
                )
            await self._on_all(missing, lambda backend: self._load_on(backend, name, path, in_place=in_place), name)
            self._book[name] = path

    async def unload(self, name: str) -> None:
        """Unload an adapter from every backend that has it.

        Raises:
            HttpError: 404, none has it; otherwise the status of a backend that failed.
            CapacityError: No backend is up.
        """
        async with self._changing:
            holders = [backend for backend in self._up() if name in backend.cards]
            known = self._book.pop(name, None)
            if not holders and known is None:
                raise HttpError(404, f"The lora adapter '{name[:200]}' cannot be found.", param="lora_name")
            await self._on_all(holders, lambda backend: self._unload_on(backend, name), name)
            for placed in self._placed.values():
                placed.pop(name, None)

    async def prepare(self, backend: Backend) -> bool:
        """Load the adapters of the book that a backend lacks; return whether it has them all."""
        missing = [(name, path) for name, path in self._book.items() if name not in backend.cards]
        if not missing:
            return True
        places = asyncio.Semaphore(MAX_LOADS_AT_ONCE)

        async def load(name: str, path: str) -> int:
            async with places:
                return (await self._load_on(backend, name, path, in_place=False))[0]

        statuses = await asyncio.gather(*(load(name, path) for name, path in missing))
        await self._backends.read_models(backend)
        return all(status == 200 for status in statuses)

    def wants(self, backend: Backend, name: str) -> bool:
        """Whether an adapter can be placed on a backend: it is not there, its path is known, it did not just fail."""
        failed_at = self._failed_at.get((backend, name))
        if failed_at is not None and self._now() - failed_at < AGAIN_S:
            return False
        return name not in backend.cards and self._path(name) is not None

    def place(self, backend: Backend, name: str) -> asyncio.Task[bool]:
        """Load an adapter on a backend; the task returns whether that worked. Calls at once share a task."""
        task = self._placing.get((backend, name))
        if task is None:
            task = self._placing[backend, name] = asyncio.create_task(self._place(backend, name))
            task.add_done_callback(lambda _: self._placing.pop((backend, name), None))
        return task

    def used(self, backend: Backend, name: str) -> None:
        """Learn that a request for an adapter went to a backend."""
        placed = self._placed.get(backend)
        if placed is not None and name in placed:
            del placed[name]
            placed[name] = self._now()

    def left(self, backend: Backend) -> None:
        """Forget a backend."""
        self._placed.pop(backend, None)
        self._failed_at = {key: at for key, at in self._failed_at.items() if key[0] is not backend}

    async def _place(self, backend: Backend, name: str) -> bool:
        path = self._path(name)
        if path is None:
            return False
        placed = self._placed.setdefault(backend, {})
        most = self._config.max_placed
        while most is not None and len(placed) >= most:
            idle = next((one for one in placed if not backend.in_flight_by_adapter[one]), None)
            if idle is None:
                return False
            del placed[idle]
            await self._unload_on(backend, idle)
        status, text = await self._load_on(backend, name, path, in_place=False)
        if status == 200:
            placed[name] = self._now()
            await self._backends.read_models(backend)
        else:
            if len(self._failed_at) >= MAX_FAILED:
                self._failed_at.clear()
            self._failed_at[backend, name] = self._now()
        logger.info("adapter_placed adapter=%s url=%s status=%d answer=%r", name, backend.url, status, text[:200])
        return status == 200

    def _path(self, name: str) -> str | None:
        return self._book.get(name) or self._catalog.source(name)

    def _up(self) -> list[Backend]:
        up = [backend for backend in self._backends if backend.health.is_up]
        if not up:
            raise CapacityError("No backend is up; please try again.", retry_after_s=self._config.poll_s, status=503)
        return up

    async def _on_all(
        self, backends: Iterable[Backend], call: Callable[[Backend], Awaitable[tuple[int, str]]], name: str
    ) -> None:
        """Call every backend, then read their models; raise with the failures if there are any."""
        backends = list(backends)
        answers = await asyncio.gather(*(call(backend) for backend in backends))
        await asyncio.gather(*(self._backends.read_models(backend) for backend in backends))
        failed = [(one, status, text) for one, (status, text) in zip(backends, answers, strict=True) if status != 200]
        if failed:
            lines = "; ".join(f"{backend.url}: {status} {text[:200]}" for backend, status, text in failed)
            status = failed[0][1]
            raise HttpError(
                status if 400 <= status < 600 else 502,
                f"{len(failed)} of {len(backends)} backends failed on adapter '{name[:200]}': {lines}",
            )

    async def _load_on(self, backend: Backend, name: str, path: str, *, in_place: bool) -> tuple[int, str]:
        body: dict[str, object] = {"lora_name": name, "lora_path": path}
        if in_place:
            body["load_inplace"] = True
        return await self._call(backend, b"load_lora_adapter", body)

    async def _unload_on(self, backend: Backend, name: str) -> tuple[int, str]:
        return await self._call(backend, b"unload_lora_adapter", {"lora_name": name})

    async def _call(self, backend: Backend, route: bytes, body: dict[str, object]) -> tuple[int, str]:
        """Return the status and text of a backend's answer; status 502 without one."""
        prefix = b"/" if backend.kind is Kind.SGLANG else b"/v1/"
        sent = msgspec.json.encode(body)
        key = self._config.backend_key
        head = request_head(
            backend.address,
            b"POST",
            prefix + route,
            num_body_bytes=len(sent),
            headers=[(b"content-type", b"application/json")],
            authorization=None if key is None else b"Bearer " + key.encode(),
        )
        try:
            status, answer = await fetch(
                backend.pool, head, sent, timeout_s=self._config.place_timeout_s, max_bytes=MAX_ANSWER_BYTES
            )
        except FetchFailed as error:
            return 502, str(error)
        return status, answer.decode(errors="replace").strip()
