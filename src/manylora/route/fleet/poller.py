"""Polls one backend: its health route, its metrics, its list of models; each bounded in time and size.

The time between polls is drawn, so that routers and backends do not fall into step. The list of models is read every
few polls, and at once when a request or a change asks for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from random import Random

import msgspec

from manylora.route.backends.backend import Backend
from manylora.route.backends.health import BackendState
from manylora.route.backends.report import BackendMetrics, MetricsReader, read_models
from manylora.route.choice import Choice
from manylora.route.config import ProxyConfig
from manylora.route.fleet.catalog import Catalog
from manylora.route.upstream.connection import Failure
from manylora.route.upstream.fetch import FetchFailed, fetch
from manylora.route.upstream.head import request_head

__all__ = ["STALE_POLLS", "Poller"]

MODELS_EVERY = 5
STALE_POLLS = 5
"""Age of metrics, in polls, from which they say nothing about residency."""
MAX_METRICS_BYTES = 16 * 1024 * 1024
MAX_MODELS_BYTES = 32 * 1024 * 1024
MAX_HEALTH_BYTES = 64 * 1024
PROBE_S = 30.0
"""Time that one token may take, in seconds: requests of others may be queued before it."""
JITTER = 0.2

logger = logging.getLogger(__name__)


class Poller:
    """Keeps one backend's health and reports up to date.

    Args:
        backend: The backend.
        config: Times and the key.
        catalog: Takes its models.
        choice: Takes corrections of its load.
        prepare: Called at every good poll, and returns whether it may have requests: it has the adapters it must have.
        rng: Draws the time between polls.
        now: Returns the time in seconds.
    """

    def __init__(
        self,
        backend: Backend,
        config: ProxyConfig,
        catalog: Catalog,
        choice: Choice[Backend],
        *,
        prepare: Callable[[Backend], Awaitable[bool]],
        rng: Random,
        now: Callable[[], float],
    ) -> None:
        self._backend = backend
        self._config = config
        self._catalog = catalog
        self._choice = choice
        self._prepare = prepare
        self._rng = rng
        self._now = now
        self._num_polls = 0
        self._num_tokens = 0.0
        self._models_body = b""
        self._models_at = -float("inf")
        self._reading_models = asyncio.Lock()
        self._needs_models = True

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(self._config.poll_s * self._rng.uniform(1 - JITTER, 1 + JITTER))

    async def poll(self) -> None:
        """Poll once."""
        backend = self._backend
        backend.pool.sweep()
        try:
            await self._ask()
        except FetchFailed as error:
            self._failed(str(error))
        except Exception as error:  # else no poll would follow, and the backend would stay in or out for good
            logger.exception("poll_broke url=%s", backend.url)
            self._failed(f"the poll broke: {error!r}")
        else:
            if backend.health.poll_succeeded(self._now()):
                logger.info("backend_up url=%s kind=%s models=%d", backend.url, backend.kind.value, len(backend.cards))

    async def _ask(self) -> None:
        """Read all that a poll reads; ``FetchFailed`` if the backend may have no requests."""
        status, _ = await self._call(b"/health", MAX_HEALTH_BYTES)
        if status >= 500:
            raise FetchFailed(f"/health answered {status}")
        if self._needs_models or self._num_polls % MODELS_EVERY == 0:
            await self.read_models()
        self._num_polls += 1
        await self._read_metrics()
        if not await self._prepare(self._backend):
            raise FetchFailed("adapters could not be loaded")
        if self._backend.health.wants_probe(self._now()):
            await self._probe()

    async def _probe(self) -> None:
        """Ask for one token: the engine must answer, not only the process before it.

        Raises:
            FetchFailed: There is no answer, or an error of the server. Any other is taken: not every server completes.
        """
        health, bases = self._backend.health, [card.id for card in self._backend.cards.values() if card.parent is None]
        body = msgspec.json.encode({"model": bases[0] if bases else "", "prompt": "1", "max_tokens": 1})
        try:
            status, _ = await self._call(b"/v1/completions", MAX_HEALTH_BYTES, body=body, timeout_s=PROBE_S)
            if status >= 500:
                raise FetchFailed(f"the probe was answered {status}")
        except FetchFailed:
            health.probe_failed(self._now())
            raise
        health.answered()

    def _failed(self, reason: str) -> None:
        backend = self._backend
        self._choice.correct(backend, None, 0)
        before = backend.health.state, backend.health.reason
        if backend.health.poll_failed(backend.num_reads, reason):
            if before[0] is BackendState.UP:
                self.is_out()
            # Bytes would have kept it in: its streams are all silent, and would be so for good.
            backend.cancel_all(Failure.DOWN)
        if before[0] is BackendState.JOINING and before[1] != backend.health.reason:
            logger.info("backend_joining url=%s reason=%r", backend.url, reason)

    def is_out(self) -> None:
        """Log that the backend is out; it may come back as another process, so its models are read again first."""
        self._needs_models = True
        logger.warning("backend_down url=%s reason=%r", self._backend.url, self._backend.health.reason)

    async def read_models(self, *, younger_than_s: float = 0.0) -> None:
        """Read the list of models, unless that was done less than ``younger_than_s`` seconds ago.

        Raises:
            FetchFailed: There is no such list.
        """
        async with self._reading_models:
            if self._now() - self._models_at < younger_than_s:
                return
            self._models_at = self._now()
            status, body = await self._call(b"/v1/models", MAX_MODELS_BYTES)
            if status != 200:
                raise FetchFailed(f"/v1/models answered {status}")
            if self._backend.is_leaving:
                return
            if body != self._models_body:
                try:
                    cards, raw, self._backend.kind = read_models(body)
                except ValueError as error:
                    raise FetchFailed(f"/v1/models: {error}") from None
                self._catalog.update(self._backend, cards, raw)
                self._models_body = body
            self._needs_models = False

    async def _read_metrics(self) -> None:
        backend, reader = self._backend, MetricsReader()
        num_own = backend.num_in_flight  # requests that begin or end meanwhile are no strangers either
        try:
            status, _ = await self._call(b"/metrics", MAX_METRICS_BYTES, reader.feed)
        except FetchFailed:
            status = 0
        if status != 200:  # not every server has them
            self._choice.correct(backend, None, 0)
            return
        num_own = max(num_own, backend.num_in_flight)
        metrics: BackendMetrics = reader.result()
        backend.metrics, backend.metrics_at = metrics, self._now()
        self._choice.learn_ranks(metrics.ranks)
        if metrics.num_tokens > self._num_tokens:
            backend.num_pieces += 1
        self._num_tokens = metrics.num_tokens
        load = metrics.load
        is_known = load.num_running is not None or load.num_waiting is not None
        num_reported = (load.num_running or 0) + (load.num_waiting or 0)
        self._choice.correct(backend, num_reported if is_known else None, num_own, metrics.on_device)

    async def _call(
        self,
        path: bytes,
        max_bytes: int,
        on_piece: Callable[[bytes], None] | None = None,
        *,
        body: bytes = b"",
        timeout_s: float | None = None,
    ) -> tuple[int, bytes]:
        key = self._config.backend_key
        head = request_head(
            self._backend.address,
            b"POST" if body else b"GET",
            path,
            num_body_bytes=len(body),
            headers=[(b"content-type", b"application/json")] if body else [],
            authorization=None if key is None else b"Bearer " + key.encode(),
        )
        timeout_s = timeout_s or self._config.poll_timeout_s
        pool = self._backend.pool
        return await fetch(pool, head, body, timeout_s=timeout_s, max_bytes=max_bytes, on_piece=on_piece)
