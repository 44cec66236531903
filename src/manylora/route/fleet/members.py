"""The set of backends: those of URLs are there from the start, those of a DNS name join and leave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator
from random import Random

from manylora.route.backends.backend import Backend
from manylora.route.backends.health import Health, HealthPolicy
from manylora.route.choice import Choice
from manylora.route.config import ProxyConfig
from manylora.route.fleet.catalog import Catalog
from manylora.route.fleet.poller import STALE_POLLS, Poller
from manylora.route.upstream.address import Address, parse_backend
from manylora.route.upstream.connection import Failure
from manylora.route.upstream.fetch import FetchFailed
from manylora.route.upstream.pool import Pool

__all__ = ["Backends", "Resolve", "resolve"]

REFRESH_S = 1.0
"""Least time between two reads of all lists of models for requests with unknown names."""

logger = logging.getLogger(__name__)

Resolve = Callable[[str, int], Awaitable[set[str]]]
"""Returns the IP addresses of a name and port; raises ``OSError``."""


async def resolve(name: str, port: int) -> set[str]:
    """Ask the system's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return {str(address[0]) for *_, address in found}


class Backends:
    """Makes, polls and drops backends. For the event loop's thread alone.

    Args:
        config: Addresses and limits.
        catalog: Their models.
        choice: Their slots.
        on_left: Called when a backend has left.
        rng: Draws the times of polls.
        now: Returns the time in seconds.
        resolve: Looks names up.
    """

    def __init__(
        self,
        config: ProxyConfig,
        catalog: Catalog,
        choice: Choice[Backend],
        *,
        on_left: Callable[[Backend], None],
        rng: Random,
        now: Callable[[], float],
        resolve: Resolve = resolve,
    ) -> None:
        self.prepare: Callable[[Backend], Awaitable[bool]] = _is_ready
        self._config = config
        self._catalog = catalog
        self._choice = choice
        self._on_left = on_left
        self._rng = rng
        self._now = now
        self._resolve = resolve
        self._addresses = [parse_backend(text) for text in config.backends]
        self._pollers: dict[Backend, Poller] = {}
        self._tasks: dict[Backend, asyncio.Task[None]] = {}
        self._by_url: dict[str, Backend] = {}
        self._refreshed_at = -REFRESH_S
        self._refreshing: asyncio.Task[None] | None = None
        self._is_starting = True

    def __iter__(self) -> Iterator[Backend]:
        """Iterate over the backends, in the order in which they joined."""
        return iter(list(self._by_url.values()))

    def __len__(self) -> int:
        """Return their number."""
        return len(self._by_url)

    @property
    def num_up(self) -> int:
        """The number of backends that get requests."""
        return sum(backend.health.is_up for backend in self._by_url.values())

    async def start(self) -> None:
        """Take in all addresses, and poll each backend once."""
        names = [address for address in self._addresses if address.is_name_of_many]
        for address in self._addresses:
            if not address.is_name_of_many:
                self._join(address)
        await asyncio.gather(*(self._look_up(name) for name in names))
        await asyncio.gather(*(poller.poll() for poller in self._pollers.values()))
        self._is_starting = False
        for backend in self._by_url.values():
            self._poll_forever(backend)

    async def run(self) -> None:
        """Look names up again and again, until cancelled."""
        names = [address for address in self._addresses if address.is_name_of_many]
        while True:
            await asyncio.sleep(self._config.resolve_s)
            await asyncio.gather(*(self._look_up(name) for name in names))

    async def stop(self) -> None:
        """Stop to poll, and close every connection."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for backend in self._by_url.values():
            backend.pool.abort()

    def failed(self, backend: Backend, reason: str) -> None:
        """Count a request that a backend did not answer."""
        if backend.health.failed(self._now(), reason) and backend in self._pollers:
            self._pollers[backend].is_out()

    def stalled(self, backend: Backend) -> None:
        """Take a backend out that sent nothing to any request for a whole time limit; they go elsewhere."""
        if backend.health.stalled(self._now(), "no progress") and backend in self._pollers:
            self._pollers[backend].is_out()
            backend.cancel_all(Failure.DOWN)

    async def read_models(self, backend: Backend) -> None:
        """Read a backend's models now; a failure is left to its next poll."""
        with contextlib.suppress(FetchFailed, KeyError):
            await self._pollers[backend].read_models()

    async def refresh(self) -> None:
        """Read all lists of models, at most once a second however many requests ask: for names that are unknown."""
        if self._refreshing is None:
            if self._now() - self._refreshed_at < REFRESH_S:
                return
            self._refreshed_at = self._now()
            self._refreshing = asyncio.create_task(self._read_all())
            self._refreshing.add_done_callback(lambda _: setattr(self, "_refreshing", None))
        await asyncio.shield(self._refreshing)

    async def _read_all(self) -> None:
        up = [poller for backend, poller in self._pollers.items() if backend.health.is_up]
        await asyncio.gather(*(poller.read_models(younger_than_s=REFRESH_S) for poller in up), return_exceptions=True)

    async def _look_up(self, name: Address) -> None:
        """Take in the addresses of a name; on failure the backends stay as they are."""
        try:
            ips = await self._resolve(name.host, name.port)
        except OSError as error:
            logger.warning("lookup_failed name=%s error=%r", name.host, error.strerror or str(error))
            return
        self.update(name, ips)

    def update(self, name: Address, ips: Iterable[str]) -> None:
        """Take in the addresses of a name: new ones join, others of that name leave; none at all changes nothing."""
        found = {address.url: address for address in (name.at(ip) for ip in sorted(ips))}
        if not found:
            return
        fixed = {address.url for address in self._addresses if not address.is_name_of_many}
        for backend in self:
            is_of_name = (backend.address.name, backend.address.port) == (name.name, name.port)
            if is_of_name and backend.url not in found and backend.url not in fixed:
                self._leave(backend)
        for address in found.values():
            self._join(address)

    def _join(self, address: Address) -> None:
        if address.url in self._by_url:
            return
        if len(self._by_url) >= self._config.max_backends:
            logger.warning("backend_ignored url=%s reason=%r", address.url, "too many backends")
            return
        config = self._config
        policy = HealthPolicy(fall=config.fall, rise=config.rise, slow_start_s=config.slow_start_s)
        backend = Backend(
            address,
            Pool(address, connect_timeout_s=config.connect_timeout_s, now=self._now),
            Health(policy, is_warm=self._is_starting),
            max_in_flight=config.max_in_flight,
            stale_s=STALE_POLLS * config.poll_s,
        )
        self._by_url[address.url] = backend
        self._choice.join(backend)
        self._pollers[backend] = Poller(
            backend,
            config,
            self._catalog,
            self._choice,
            prepare=lambda backend: self.prepare(backend),
            rng=self._rng,
            now=self._now,
        )
        logger.info("backend_joins url=%s", backend.url)
        if not self._is_starting:
            self._poll_forever(backend)

    def _leave(self, backend: Backend) -> None:
        """Take a backend out; its requests under way go on to their end."""
        logger.info("backend_leaves url=%s in_flight=%d", backend.url, backend.num_in_flight)
        backend.is_leaving = True
        del self._by_url[backend.url], self._pollers[backend]
        if (polling := self._tasks.pop(backend, None)) is not None:  # none yet while the router starts
            polling.cancel()
        self._choice.leave(backend)
        self._catalog.update(backend, {}, {})
        backend.pool.close()
        self._on_left(backend)

    def _poll_forever(self, backend: Backend) -> None:
        self._tasks[backend] = asyncio.create_task(self._pollers[backend].run())


async def _is_ready(backend: Backend) -> bool:
    return True
