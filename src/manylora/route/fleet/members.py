"""The set of backends, and their lists of models."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from time import monotonic

from manylora.route.backend import Backend
from manylora.route.choice import Choice
from manylora.route.config import ProxyConfig
from manylora.route.fleet.catalog import Catalog
from manylora.route.report import read_models
from manylora.route.upstream.address import Address
from manylora.route.upstream.pool import FetchFailed

__all__ = ["Backends"]

REFRESH_S = 1.0
"""Least time between two reads of all lists of models for requests with unknown names."""
MAX_BACKENDS = 256
"""Further addresses are ignored."""
MAX_MODELS_BYTES = 32 * 1024 * 1024

logger = logging.getLogger(__name__)


class Backends:
    """The backends, in the order in which they joined, and the ``catalog`` of their models.

    For the event loop's thread alone.

    Args:
        config: Times and limits.
        choice: Gives them slots.
    """

    def __init__(self, config: ProxyConfig, choice: Choice[Backend]) -> None:
        self._config = config
        self.catalog = Catalog()
        self._choice = choice
        self._by_url: dict[str, Backend] = {}
        self._refreshed_at = 0.0
        self._refreshing: asyncio.Task[None] | None = None

    def __iter__(self) -> Iterator[Backend]:
        """Iterate over a copy: backends may join and leave meanwhile."""
        return iter(list(self._by_url.values()))

    def __len__(self) -> int:
        """Return their number."""
        return len(self._by_url)

    @property
    def num_up(self) -> int:
        """The number of backends that get requests."""
        return sum(backend.health.is_up for backend in self._by_url.values())

    def join(self, address: Address, *, is_warm: bool) -> Backend | None:
        """Take in an address; return its backend, or ``None`` if it is there already or there are too many.

        Args:
            address: The address.
            is_warm: As for ``Health``.
        """
        if address.url in self._by_url:
            return None
        if len(self._by_url) >= MAX_BACKENDS:
            logger.warning("backend_ignored url=%s reason=%r", address.url, "too many backends")
            return None
        backend = self._by_url[address.url] = Backend(address, self._config, is_warm=is_warm)
        self._choice.join(backend)
        logger.info("backend_joins url=%s", backend.url)
        return backend

    def leave(self, backend: Backend) -> None:
        """Take a backend out; its requests under way go on to their end."""
        logger.info("backend_leaves url=%s in_flight=%d", backend.url, backend.num_in_flight)
        backend.is_leaving = True
        del self._by_url[backend.url]
        self._choice.leave(backend)
        self.catalog.update(backend, {}, {})
        backend.pool.close()

    async def read_models(self, backend: Backend, *, younger_than_s: float = 0.0) -> None:
        """Read a backend's list of models, unless that was done less than ``younger_than_s`` seconds ago.

        Raises:
            FetchFailed: There is no such list.
        """
        async with backend.reading_models:
            if monotonic() - backend.models_read_at < younger_than_s:
                return
            backend.models_read_at = monotonic()
            status, body = await backend.call(
                b"/v1/models", timeout_s=self._config.poll_timeout_s, max_bytes=MAX_MODELS_BYTES
            )
            if status != 200:
                raise FetchFailed(f"/v1/models answered {status}")
            if backend.is_leaving:
                return
            if body != backend.models_body:
                try:
                    cards, raw, backend.kind = read_models(body)
                except ValueError as error:
                    raise FetchFailed(f"/v1/models: {error}") from None
                self.catalog.update(backend, cards, raw)
                backend.models_body = body
            backend.needs_models = False

    async def update_models(self, backend: Backend) -> None:
        """Read a backend's list of models now; a failure is left to its next poll."""
        with contextlib.suppress(FetchFailed):
            await self.read_models(backend)

    def refresh(self) -> asyncio.Task[None]:
        """Begin to read all lists of models, once a second at most; return the last such task.

        It is for requests with unknown names, however many there are: shield it when it is awaited.
        """
        is_old = monotonic() - self._refreshed_at >= REFRESH_S
        if self._refreshing is None or (is_old and self._refreshing.done()):
            self._refreshed_at = monotonic()
            self._refreshing = asyncio.create_task(self._read_all())
        return self._refreshing

    async def _read_all(self) -> None:
        up = [backend for backend in self if backend.health.is_up]
        await asyncio.gather(*(self.read_models(one, younger_than_s=REFRESH_S) for one in up), return_exceptions=True)
