"""Where requests of a fleet go, and how many engines it has: a dispatcher, and the orders of a scaling controller.

Both see one load: requests as they come, and what the engines report. The decisions are those of ``core.routing`` and
``core.scaling``, and so the same as in a simulation. An engine that scaling may start::

    idle ---> starting ---> has the book of adapters ---> has the hottest on its device ---> serving
      ^                                                                                         |
      +--------------- its process ended <--- its requests ended or moved on <--- draining <----+
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from manylora.core.errors import AdapterError, CapacityError, ManyloraError
from manylora.core.routing import DEFAULT_ROUTER, Dispatcher, FallbackRouter, ReplicaReport, Router, RouterContext
from manylora.core.routing import make_router as router_named
from manylora.core.scaling.autoscaler import ScalingPolicy
from manylora.core.scaling.controller import ReplicaPhase, ScalingController
from manylora.core.scaling.watch import LoadWatch, WatchedDispatcher
from manylora.serving.hosting.fleet.engines import FleetEngines
from manylora.serving.hosting.fleet.keeper import SCARCITY, EngineKeeper, EngineState
from manylora.serving.hosting.links.client import EngineClient

__all__ = ["FleetRouting", "FleetScaling", "MakeRouter"]

MakeRouter: TypeAlias = Callable[[Mapping[str, int]], Router]  # returns a router, given the adapters' ranks by name

REPORT_EVERY_S = 1.0  # seconds between two reports of an engine to the router
WARM_POLL_S = 0.05  # seconds between two looks at adapters on their way to the device

PHASES = {
    EngineState.IDLE: ReplicaPhase.IDLE,
    EngineState.STARTING: ReplicaPhase.STARTING,
    EngineState.RESTARTING: ReplicaPhase.STARTING,
    EngineState.SERVING: ReplicaPhase.SERVING,
    EngineState.DRAINING: ReplicaPhase.DRAINING,
    EngineState.STOPPED: ReplicaPhase.DRAINING,
}
"""Phases of engines by their states; one that an operator took out is not started again."""

COMING = (EngineState.STARTING, EngineState.RESTARTING)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FleetRouting:
    """The dispatcher of a fleet, and with scaling the controller of the number of its engines, which see one load."""

    dispatcher: Dispatcher
    controller: ScalingController | None = None

    @classmethod
    def of(
        cls,
        num_engines: int,
        ranks: Mapping[str, int],
        *,
        served_name: str,
        make_router: MakeRouter | None,
        scaling: ScalingPolicy | None,
        caches_prefixes: bool = True,
    ) -> FleetRouting:
        """Return the routing of a fleet; ``ranks`` are those of the adapters, by name, and change with them."""
        if make_router is None:
            made = router_named(DEFAULT_ROUTER, RouterContext(rng=Random(0), base_name=served_name, ranks=ranks))
        else:
            made = make_router(ranks)
        router = FallbackRouter(made)
        if scaling is None:
            return cls(Dispatcher(router, num_engines, ranks, caches_prefixes=caches_prefixes))
        watch = LoadWatch(scaling.ttft_s)
        dispatcher = WatchedDispatcher(
            router, num_engines, ranks, watch=watch, now=time.monotonic, caches_prefixes=caches_prefixes
        )
        return cls(dispatcher, ScalingController(scaling, dispatcher.views, watch))

    async def report(self, keepers: Sequence[EngineKeeper]) -> None:
        """Tell the router, about once a second, what the engines report; runs until it is cancelled."""
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            # At once: engines that hang must not hold up the reports of the others.
            await asyncio.gather(*(self._report(engine, keeper) for engine, keeper in enumerate(keepers)))

    async def _report(self, engine: int, keeper: EngineKeeper) -> None:
        if keeper.state is not EngineState.SERVING or keeper.client is None or keeper.info is None:
            return
        with contextlib.suppress(ManyloraError, TimeoutError):  # it died or hangs: its keeper sees to that
            async with asyncio.timeout(REPORT_EVERY_S):
                stats, _ = await keeper.client.snapshot(0)
            self.dispatcher.report(engine, ReplicaReport.of(stats, keeper.info.block_size))


class FleetScaling:
    """Starts and drains the engines of one fleet. For the event loop's thread alone."""

    def __init__(self, controller: ScalingController, engines: FleetEngines, *, drain_timeout_s: float) -> None:
        self.controller = controller
        self._engines = engines
        self._drain_timeout_s = drain_timeout_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def close(self) -> None:
        """Start and drain no further engine."""
        self._is_closed = True

    async def run(self) -> None:
        """Look at the load and act on it, until closed."""
        now, keepers = asyncio.get_running_loop().time, self._engines.keepers
        try:
            while True:
                await asyncio.sleep(self.controller.policy.look_every_s)
                if self._is_closed:
                    return
                for task in [task for task in self._tasks if task.done()]:
                    self._tasks.discard(task)
                    task.result()
                order = self.controller.look(now(), list(map(_phase, keepers)))
                for index in order.start:
                    keepers[index].state = EngineState.STARTING
                    self._tasks.add(asyncio.create_task(self._start(index)))
                for index in order.drain:
                    keepers[index].drain()
                    self._tasks.add(asyncio.create_task(self._end(index)))
                if order.start or order.drain:
                    decision = order.decision
                    logger.info(
                        "fleet_scales start=%s drain=%s wanted=%d rate_rps=%.2f ahead_rps=%.2f safe_rps=%.2f",
                        *(list(order.start), list(order.drain), decision.num_wanted, decision.rate, decision.ahead),
                        decision.safe_rate or 0.0,
                    )
        finally:
            for task in self._tasks:
                task.cancel()

    async def _start(self, index: int) -> None:
        """Start an engine; after a failure leave it for a while, which counts as a start that takes long."""
        keeper, now = self._engines.keepers[index], asyncio.get_running_loop().time
        began_at = now()
        try:
            await keeper.start(self._warm)
        except (ManyloraError, *SCARCITY) as error:
            logger.error("engine_start_failed engine=%d retry_in_s=%.1f error=%r", index, keeper.pause_s, error)
            await asyncio.sleep(keeper.pause_s)
            if keeper.state is EngineState.STARTING:
                keeper.state = EngineState.IDLE
            return
        self.controller.started(now() - began_at)
        logger.info("engine_started engine=%d took_s=%.2f", index, now() - began_at)
        self._engines.watch(index)

    async def _warm(self, client: EngineClient) -> None:
        """Bring the hottest adapters to the device of a new engine, as far as they fit, and wait for them."""
        with contextlib.suppress(ManyloraError, TimeoutError):  # an engine that died is seen by the caller
            async with asyncio.timeout(self.controller.policy.warm_s):
                waiting = set()
                for name in self.controller.hottest_adapters():
                    try:
                        await client.warm_adapter(name)
                    except CapacityError:  # the memory is full of hotter ones
                        break
                    except AdapterError:  # unloaded meanwhile
                        continue
                    waiting.add(name)
                while waiting:
                    stats, _ = await client.snapshot(0)
                    waiting -= set(stats.resident_adapters)
                    if waiting:
                        await asyncio.sleep(WARM_POLL_S)

    async def _end(self, index: int) -> None:
        await self._engines.give_back(index, self._drain_timeout_s)
        logger.info("engine_drained engine=%d", index)
        self._engines.keepers[index].state = EngineState.IDLE


def _phase(keeper: EngineKeeper) -> ReplicaPhase:
    """Return the phase of an engine; for a failing one, which may never serve, another is started if there is one."""
    is_lost = keeper.is_failing and keeper.state in COMING
    return ReplicaPhase.DRAINING if is_lost else PHASES[keeper.state]
