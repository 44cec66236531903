"""Keep one engine alive: start it, notice its death, start the next one and load the adapters on it.

Pauses between restarts grow with each death in a row. Too many deaths by the engine's own fault make it a *failing*
one. While another engine of the fleet serves, or may soon, a failing engine is tried again after the longest pause.
Without another it is given up: a service that cannot serve should exit, so that its supervisor can act.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum

import zmq

from manylora.core.errors import AdapterError, CapacityError, EngineDead, ManyloraError, NoPlace
from manylora.serving.hosting.fleet.adapter_book import AdapterBook, LoadedAdapter
from manylora.serving.hosting.fleet.watchdog import wait_until_hung
from manylora.serving.hosting.links.client import EngineClient
from manylora.serving.hosting.links.in_flight import EngineLoss
from manylora.serving.hosting.protocol import EngineInfo

__all__ = ["SCARCITY", "EngineKeeper", "EngineState", "RestartPolicy"]

logger = logging.getLogger(__name__)

SCARCITY = (OSError, zmq.ZMQError, MemoryError, NoPlace)
"""Errors of a start for lack of descriptors, processes, memory, disk or nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """When an engine counts as dead, when to restart it, and when to give it up."""

    # Deaths in a row by its own fault after which an engine is failing. Not its fault are a signal from outside, the
    # loss of its node, a lack of room for its start, and a request that is proven to kill engines, once the engine has
    # answered others again.
    max_deaths: int = 6
    # Pause before the second restart in a row, in seconds; the first is immediate, later ones double.
    first_pause_s: float = 0.5
    max_pause_s: float = 15.0
    healthy_after_s: float = 60.0  # seconds of service that end a row of deaths
    # Seconds without progress after which an engine counts as hung; ``None`` for never.
    hang_timeout_s: float | None = None
    # Seconds for an engine to start and to load every adapter; ``None`` for any time.
    start_timeout_s: float | None = None

    def pause_s(self, deaths: int) -> float:
        """Return the pause after the ``deaths``-th death in a row, in seconds."""
        return 0.0 if deaths <= 1 else min(self.max_pause_s, self.first_pause_s * 2.0 ** min(deaths - 2, 30))


class EngineState(Enum):
    """The state of an engine, and of a fleet, for health checks. An idle engine is one that scaling may start."""

    IDLE = "idle"
    STARTING = "starting"
    SERVING = "serving"
    RESTARTING = "restarting"
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass(eq=False, kw_only=True)
class EngineKeeper:
    """One engine of a fleet, over its restarts."""

    make_client: Callable[[], EngineClient]  # returns the client of a new engine; called on the event loop
    book: AdapterBook  # the adapters that the engine must hold
    lose: Callable[[AdapterError], Awaitable[None]]  # removes an adapter that a new engine cannot load from the book
    restarts: RestartPolicy
    on_change: Callable[[], None]  # called when the engine begins to serve, and when it will not serve again
    state: EngineState = EngineState.STARTING  # or idle until an order sets that
    client: EngineClient | None = None
    info: EngineInfo | None = None
    num_restarts: int = 0
    # Whether the engine works on requests: it has every adapter, and neither died nor is about to be drained.
    is_up: bool = False
    _num_deaths: int = 0  # in a row, for the pauses
    _faults: list[EngineLoss] = field(default_factory=list)  # those of them that may be the engine's own
    _last_death: str = ""

    @property
    def is_failing(self) -> bool:
        """Whether the engine died too often in a row by its own fault."""
        return len(self._faults) >= self.restarts.max_deaths

    @property
    def may_serve(self) -> bool:
        """Whether the engine serves, or is likely to serve soon."""
        is_coming = self.state in (EngineState.STARTING, EngineState.RESTARTING) and not self.is_failing
        return is_coming or self.state is EngineState.SERVING

    @property
    def pause_s(self) -> float:
        """The pause before the next start of the engine, in seconds."""
        return self.restarts.max_pause_s if self.is_failing else self.restarts.pause_s(self._num_deaths)

    async def start(self, prepare: Callable[[EngineClient], Awaitable[None]] | None = None) -> None:
        """Start an engine: the first, or another after the keeper's last engine was drained.

        ``prepare`` is called with the engine once it has every adapter, before it serves.
        ``ManyloraError`` if the engine refused its configuration, or ``lose`` raised an adapter's error. It has ended.
        """
        try:
            await self._bring_up(prepare)
        except (ManyloraError, *SCARCITY) as error:
            self._note_failed_start(error)
            if self.client is not None:
                await self.client.stop()
            raise
        if self.state is EngineState.STARTING:
            self.state = EngineState.SERVING
        self.on_change()

    async def run(self, others_may_serve: Callable[[], bool]) -> None:
        """Watch the engine and restart it, until drained or stopped; one whose start failed is started first.

        ``EngineDead`` if it is failing, and ``others_may_serve`` tells that no other engine of the fleet serves, or may
        soon.
        """
        now = asyncio.get_running_loop().time
        while True:
            if self.is_up:
                assert self.client is not None
                serving_since = now()
                how = await self._end_of(self.client)
                self.is_up = False
                if now() - serving_since >= self.restarts.healthy_after_s:
                    self._forget_deaths()
                if self.state is EngineState.SERVING:
                    assert self.client.loss is not None
                    self._note_death(how, self.client.loss)
            if self.state in (EngineState.DRAINING, EngineState.STOPPED):
                self.state = EngineState.STOPPED
                self.on_change()
                return
            self.state = EngineState.RESTARTING
            if self.client is not None:
                await self.client.stop()
            if self.is_failing and not others_may_serve():
                self.state = EngineState.STOPPED
                self.on_change()
                how_often = f"{len(self._faults)} times in a row (last: {self._last_death})"
                raise EngineDead(f"The engine died {how_often}; giving up.")
            await self._restart()

    def drain(self) -> None:
        """Start no further engine; the present one may finish."""
        if self.state is EngineState.IDLE:
            self.state = EngineState.STOPPED
        elif self.state is not EngineState.STOPPED:
            self.state = EngineState.DRAINING

    async def stop(self, error: ManyloraError) -> None:
        """End the engine; requests and calls in flight fail with ``error``."""
        self.state = EngineState.STOPPED
        self.is_up = False
        self.on_change()
        if self.client is not None:
            self.client.lose(EngineLoss(error), is_final=True)
            await self.client.stop()

    async def retire(self, timeout_s: float) -> None:
        """End the engine for good: its requests may finish for ``timeout_s`` seconds, the others are given up."""
        assert self.client is not None
        self.state = EngineState.DRAINING
        self.is_up = False
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.client.idle(), timeout_s)
        self.state = EngineState.STOPPED
        self.client.lose(EngineLoss(EngineDead("The engine was drained."), is_suspicious=False, is_counted=False))
        await self.client.stop()
        self._forget_deaths()

    async def _bring_up(self, prepare: Callable[[EngineClient], Awaitable[None]] | None = None) -> EngineClient:
        """Start an engine and load the adapters of the book; ``EngineDead`` if it took longer than the limit.

        The caller must set ``state`` without an await.
        """
        try:
            # Not ``wait_for``, which wraps a task before Python 3.12: the loop would turn before the caller goes on.
            async with asyncio.timeout(self.restarts.start_timeout_s) as limit:
                return await self._start_and_load(prepare)
        except TimeoutError:
            if not limit.expired():  # the system's own, as of a connection
                raise
            raise EngineDead(f"The engine did not start within {self.restarts.start_timeout_s:g} s") from None

    async def _start_and_load(self, prepare: Callable[[EngineClient], Awaitable[None]] | None) -> EngineClient:
        client = self.client = self.make_client()
        self.info = await client.start()
        held: dict[str, LoadedAdapter] = {}
        await self._catch_up(client, held)
        if prepare is not None:
            await prepare(client)
            await self._catch_up(client, held)
        self.is_up = self.state is not EngineState.STOPPED
        return client

    async def _catch_up(self, client: EngineClient, held: dict[str, LoadedAdapter]) -> None:
        """Load the adapters of the book that an engine does not hold yet."""
        while errors := await self.book.bring_up(client, held):
            for error in errors:
                await self.lose(error)

    async def _end_of(self, client: EngineClient) -> str:
        """Wait until an engine has ended or hangs and all in flight has failed; return the reason, in words."""
        if self.restarts.hang_timeout_s is None:
            return await client.closed()
        closed = asyncio.create_task(client.closed())
        hung = asyncio.create_task(wait_until_hung(client, self.restarts.hang_timeout_s))
        try:
            await asyncio.wait({closed, hung}, return_when=asyncio.FIRST_COMPLETED)
            if closed.done() or hung.exception() is not None:
                return await closed
            how = hung.result()
            logger.error("engine_hangs pid=%s how=%r", client.link.pid, how)
            error = EngineDead(f"The engine was stopped while it worked on this request ({how}).")
            client.lose(EngineLoss(error, is_hang=True))
            return how
        finally:
            closed.cancel()
            hung.cancel()
            await asyncio.gather(closed, hung, return_exceptions=True)

    async def _restart(self) -> None:
        """Start the next engine after a pause; it is up afterwards, unless the start failed."""
        logger.error(
            "engine_died how=%r deaths_in_a_row=%d restart_in_s=%.1f", self._last_death, self._num_deaths, self.pause_s
        )
        await asyncio.sleep(self.pause_s)
        if self.state is not EngineState.RESTARTING:
            return
        self.num_restarts += 1
        try:
            client = await self._bring_up()
        except (ManyloraError, *SCARCITY) as error:
            logger.error("engine_restart_failed error=%r", error)
            self._note_failed_start(error)
            return
        if self.state is EngineState.RESTARTING:
            self.state = EngineState.SERVING
            logger.warning("engine_restarted pid=%s num_adapters=%d", client.link.pid, len(self.book.adapters))
        self.on_change()

    def _note_failed_start(self, error: BaseException) -> None:
        is_scarce = isinstance(error, (CapacityError, *SCARCITY))  # the machine or the cluster may have room later
        loss = EngineLoss(EngineDead(f"The engine did not start: {error}"), is_suspicious=not is_scarce)
        self._note_death("it did not come up", loss)

    def _note_death(self, how: str, loss: EngineLoss) -> None:
        self._last_death = how
        self._num_deaths += 1
        if loss.has_answered:  # it works, so where a request is to blame, the engine is not
            self._faults = [fault for fault in self._faults if not fault.is_explained]
        if loss.is_suspicious:
            self._faults = [*self._faults, loss][-self.restarts.max_deaths :]

    def _forget_deaths(self) -> None:
        self._num_deaths = 0
        self._faults.clear()
