"""The choice of an engine for each request of a fleet with several: a dispatcher, and reports of the engines to it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from manylora.core.errors import ManyloraError
from manylora.core.routing import DEFAULT_ROUTER, Dispatcher, FallbackRouter, ReplicaReport, Router, RouterContext
from manylora.core.routing import make_router as router_named
from manylora.core.scaling import LoadWatch, ScalingController, ScalingPolicy, WatchedDispatcher
from manylora.serving.hosting.fleet.keeper import EngineKeeper, EngineState

__all__ = ["FleetRouting", "MakeRouter"]

MakeRouter: TypeAlias = Callable[[Mapping[str, int]], Router]
"""Returns a router, given the adapters' ranks by name."""

REPORT_EVERY_S = 1.0
"""Seconds between two reports of an engine to the router."""


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
    ) -> FleetRouting:
        """Return the routing of a fleet; ``ranks`` are those of the adapters, by name, and change with them."""
        if make_router is None:
            made = router_named(DEFAULT_ROUTER, RouterContext(rng=Random(0), base_name=served_name, ranks=ranks))
        else:
            made = make_router(ranks)
        router = FallbackRouter(made)
        if scaling is None:
            return cls(Dispatcher(router, num_engines, ranks))
        watch = LoadWatch(scaling.ttft_s)
        dispatcher = WatchedDispatcher(router, num_engines, ranks, watch=watch, now=time.monotonic)
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
