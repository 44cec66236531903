"""Polls of the backends, which join and leave as their sources say.

A poll asks for a backend's health route, its metrics and its list of models, each bounded in time and size. The time
between polls is drawn, so that routers and backends do not fall into step. The list of models is read every few polls,
and at once when a request or a change asks for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from random import Random
from time import monotonic

from manylora.route.backend import Backend, BackendState
from manylora.route.choice import Choice
from manylora.route.config import ProxyConfig
from manylora.route.fleet.adapters import RoutedAdapters
from manylora.route.fleet.members import MAX_BACKENDS, Backends
from manylora.route.metrics import ProxyMetrics
from manylora.route.report import MetricsReader
from manylora.route.upstream.address import Address
from manylora.route.upstream.connection import Failure
from manylora.route.upstream.pool import FetchFailed

__all__ = ["Polls"]

MODELS_EVERY = 5  # polls between two reads of the list of models
MAX_METRICS_BYTES = 16 * 1024 * 1024
MAX_HEALTH_BYTES = 64 * 1024
PROBE_S = 30.0  # time that one token may take, in seconds: requests of others may be queued before it
JITTER = 0.2

logger = logging.getLogger(__name__)


class Unwell(FetchFailed):
    """A server answers that it cannot serve, as while its engine starts again."""


@dataclass(eq=False)
class Polls:
    """Keeps the set of backends, their health and their reports up to date."""

    config: ProxyConfig  # times and limits
    backends: Backends  # the backends, empty at first
    adapters: RoutedAdapters  # brings the adapters of a backend up to date before it gets requests
    choice: Choice  # takes corrections of their load
    metrics: ProxyMetrics  # forgets backends that have left
    _: KW_ONLY
    rng: Random  # draws the time between polls
    _tasks: dict[Backend, asyncio.Task[None]] = field(default_factory=dict)
    _is_starting: bool = True
    _num_left_out: int = 0  # addresses beyond the most backends

    # -- backends join and leave -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Poll each backend once."""
        await asyncio.gather(*map(self._poll, self.backends))
        self._is_starting = False
        for backend in self.backends:
            self._tasks[backend] = asyncio.create_task(self._poll_forever(backend))

    def update(self, addresses: Mapping[str, Address]) -> None:
        """Let backends join and leave until they are those at these addresses, by URL."""
        for backend in self.backends:
            if backend.url not in addresses:
                self._leave(backend)
            elif backend.address != addresses[backend.url]:  # another key
                backend.address = addresses[backend.url]
                backend.read_key()
        for address in addresses.values():
            self._join(address)
        if (num_left_out := len(addresses) - len(self.backends)) != self._num_left_out:
            self._num_left_out = num_left_out
            logger.warning("backends_left_out num=%d most=%d", num_left_out, MAX_BACKENDS)

    async def stop(self) -> None:
        """End the polls, and close every connection."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for backend in self.backends:
            backend.pool.abort()

    def _join(self, address: Address) -> None:
        backend = self.backends.join(address, is_warm=self._is_starting)
        if backend is not None and not self._is_starting:
            self._tasks[backend] = asyncio.create_task(self._poll_forever(backend))

    def _leave(self, backend: Backend) -> None:
        self.backends.leave(backend)
        self.adapters.changes.left(backend)
        self.metrics.left(backend)
        if (polling := self._tasks.pop(backend, None)) is not None:  # none yet while the router starts
            polling.cancel()

    # -- one backend -------------------------------------------------------------------------------------------------

    async def _poll_forever(self, backend: Backend) -> None:
        while True:
            await self._poll(backend)
            await asyncio.sleep(self.config.poll_s * self.rng.uniform(1 - JITTER, 1 + JITTER))

    async def _poll(self, backend: Backend) -> None:
        backend.pool.sweep()
        backend.read_key()
        try:
            await self._ask(backend)
        except FetchFailed as error:
            self._failed(backend, str(error), is_reached=isinstance(error, Unwell))
        except Exception as error:  # else no poll would follow, and the backend would stay up or down for good
            logger.exception("poll_broke url=%s", backend.url)
            self._failed(backend, f"the poll broke: {error!r}")
        else:
            if backend.health.poll_succeeded(monotonic()):
                self.choice.returned(backend)
                logger.info("backend_up url=%s kind=%s models=%d", backend.url, backend.kind.value, len(backend.cards))

    async def _ask(self, backend: Backend) -> None:
        """Read all that a poll reads; ``FetchFailed`` if the backend may have no requests."""
        status, _ = await backend.call(b"/health", timeout_s=self.config.poll_timeout_s, max_bytes=MAX_HEALTH_BYTES)
        if status >= 500:
            raise Unwell(f"/health answered {status}")
        if backend.needs_models or backend.num_polls % MODELS_EVERY == 0:
            await self.backends.read_models(backend)
        backend.num_polls += 1
        await self._read_metrics(backend)
        if backend.has_restarted:
            await self.backends.read_models(backend)
        if not await self.adapters.prepare(backend):
            raise FetchFailed("adapters could not be loaded")
        if backend.health.wants_probe(monotonic()):
            await self._probe(backend)

    async def _probe(self, backend: Backend) -> None:
        """Ask for one token: the engine must answer, not only the process before it.

        ``FetchFailed`` without an answer, or for an error of the server. Any other will do: not every server completes.
        """
        base = next((card.id for card in backend.cards.values() if card.parent is None), "")
        body = {"model": base, "prompt": "1", "max_tokens": 1}
        try:
            status, _ = await backend.call(b"/v1/completions", body, timeout_s=PROBE_S, max_bytes=MAX_HEALTH_BYTES)
            if status >= 500:
                raise FetchFailed(f"the probe was answered {status}")
        except FetchFailed:
            backend.health.probe_failed(monotonic())
            raise
        backend.health.answered()

    def _failed(self, backend: Backend, reason: str, *, is_reached: bool = False) -> None:
        self.choice.correct(backend, 0, None)
        before = backend.health.state, backend.health.reason
        if backend.health.poll_failed(backend.num_reads, reason):
            if before[0] is BackendState.UP:
                backend.went_down()
            # Bytes would have kept it up: its streams are all silent. One that answers may go on with those, and ends
            # them itself if it cannot; those of another would be silent for good.
            backend.cancel_all(Failure.DOWN, but_begun=is_reached)
        if before[0] is BackendState.JOINING and before[1] != backend.health.reason:
            logger.info("backend_joining url=%s reason=%r", backend.url, reason)

    async def _read_metrics(self, backend: Backend) -> None:
        reader = MetricsReader()
        num_own = backend.num_in_flight  # requests that begin or end meanwhile are no strangers either
        try:
            status, _ = await backend.call(
                b"/metrics", timeout_s=self.config.poll_timeout_s, max_bytes=MAX_METRICS_BYTES, on_piece=reader.feed
            )
        except FetchFailed:
            status = 0
        if status != 200:  # not every server has them
            self.choice.correct(backend, 0, None)
            return
        num_own = max(num_own, backend.num_in_flight)
        metrics = reader.result()
        if metrics.num_tokens > backend.metrics.num_tokens:
            backend.num_pieces += 1
        elif metrics.num_tokens < backend.metrics.num_tokens:
            logger.warning("backend_restarted url=%s", backend.url)
            backend.has_restarted = True
            self.choice.returned(backend)
        backend.metrics, backend.metrics_at = metrics, monotonic()
        self.choice.learn_ranks(metrics.ranks)
        self.choice.correct(backend, num_own, metrics)
