"""The engines of a service behind one interface, for routes, the offline API and load tests.

A router picks the engine of each request, as in a simulation with replicas. Adapters are loaded on all engines. Each
engine is restarted by itself, and its requests go on elsewhere meanwhile.

::

    submit ---> FleetRequests ---> EngineKeeper 0 ---> EngineClient ---> link ---> engine
                   |     ^
                   |     +--- Resumer: requests of lost engines, with their answers so far
                   +-------------> EngineKeeper 1 ---> EngineClient ---> link ---> engine
    adapters.load, pin ... -+--->
                            +-> AdapterBook: recorded after all engines, read by an engine that restarts
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from manylora.core.errors import EngineDead, ManyloraError
from manylora.core.scaling.autoscaler import ScalingDecision, ScalingPolicy
from manylora.serving.hosting.fleet.adapter_book import AdapterBook, LoraModule
from manylora.serving.hosting.fleet.adapters import FleetAdapters
from manylora.serving.hosting.fleet.engines import FleetEngines
from manylora.serving.hosting.fleet.keeper import EngineKeeper, EngineState, RestartPolicy
from manylora.serving.hosting.fleet.requests import FleetRequests
from manylora.serving.hosting.fleet.resumption import ResumePolicy
from manylora.serving.hosting.fleet.routing import FleetRouting, FleetScaling, MakeRouter
from manylora.serving.hosting.links.client import EngineClient
from manylora.serving.hosting.links.link import EngineLink
from manylora.serving.hosting.protocol import Observations

__all__ = ["Fleet", "FleetPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPolicy:
    """The way in which a fleet is run."""

    # When an engine is restarted, and when it is given up.
    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    # When requests of a lost engine go on elsewhere; by default never.
    resumes: ResumePolicy = field(default_factory=lambda: ResumePolicy(max_resumes=0))
    make_router: MakeRouter | None = None  # makes the router of several engines; ``None`` for the default router
    scaling: ScalingPolicy | None = None  # starts and drains engines by the load; ``None`` for a fixed number
    num_devices: int = 1  # devices, which engines have in turn
    # Seconds that requests of an engine have to end when scaling drains it, before they move on.
    drain_timeout_s: float = 30.0
    # Whether an engine that starts again needs the adapters required at the start; if not, an adapter that it cannot
    # load is unloaded.
    keeps_required: bool = False
    caches_prefixes: bool = True  # whether engines keep the KV of finished prompts


class Fleet:
    """One or several engines of one configuration, and what is asked of them. For the event loop's thread alone.

    ``engines`` starts, watches and describes them, ``requests`` gives them requests, ``adapters`` loads adapters.
    """

    def __init__(
        self,
        links: Sequence[Callable[[], EngineLink]],  # makes a link of each engine; with scaling as many as it allows
        *,
        served_name: str,  # of the base, which no adapter may have
        observe: Callable[[Observations], None],
        policy: FleetPolicy | None = None,
    ) -> None:
        policy = policy or FleetPolicy()
        scaling = policy.scaling
        assert scaling is None or scaling.max_replicas == len(links)
        self.served_name = served_name
        book = AdapterBook(served_name=served_name)
        self.engines = engines = FleetEngines()
        self.adapters = FleetAdapters(book, engines, keeps_required=policy.keeps_required)
        routing = None  # of one engine, which saves its counting
        if len(links) > 1:
            routing = FleetRouting.of(
                len(links),
                book.ranks,
                served_name=served_name,
                make_router=policy.make_router,
                scaling=scaling,
                caches_prefixes=policy.caches_prefixes,
            )
        route = None if routing is None else routing.dispatcher.dispatch
        self.requests = requests = FleetRequests(engines, self.adapters, route=route, policy=policy.resumes)
        self.resumes = requests.resumes

        def make_client(engine: int, make_link: Callable[[], EngineLink]) -> EngineClient:
            if routing is None:
                return EngineClient(make_link(), observe=observe, on_lost=requests.lost)
            one = routing.dispatcher
            one.restarted(engine)
            return EngineClient(
                make_link(), observe=observe, on_started=one.started, on_ended=one.ended, on_lost=requests.lost
            )

        for engine, make_link in enumerate(links):
            keeper = EngineKeeper(
                make_client=partial(make_client, engine, make_link),
                book=book,
                lose=self.adapters.lose,
                restarts=policy.restarts,
                on_change=requests.wake,
                state=EngineState.STARTING if scaling is None or engine < scaling.min_replicas else EngineState.IDLE,
            )
            engines.keepers.append(keeper)
        self._scaling = None
        if routing is not None and routing.controller is not None:
            self._scaling = FleetScaling(routing.controller, engines, drain_timeout_s=policy.drain_timeout_s)
        self._routing = routing
        self._num_devices = policy.num_devices

    @property
    def scaling(self) -> ScalingDecision | None:
        """The last decision about the number of engines; ``None`` if it is fixed, and before the first."""
        return None if self._scaling is None else self._scaling.controller.decision

    def hidden_from(self, tenant: str) -> frozenset[str]:
        """Return nothing: every tenant may call every adapter."""
        return frozenset()

    async def start(self, modules: Sequence[LoraModule] = ()) -> None:
        """Start the engines and load the adapters given at start.

        ``ManyloraError`` if an engine refused its configuration or a required adapter, or none came up. Of several
        engines one may fail for another reason; ``run`` tries it again.
        """
        with self.adapters.opened(modules):
            await self.engines.start(self._num_devices)

    async def run(self) -> None:
        """Watch the engines and restart those that die, until drained or stopped; ``EngineDead`` if none is left."""
        beside: list[Coroutine[Any, Any, None]] = [self.adapters.retry()]
        if self._routing is not None:
            beside.append(self._routing.report(self.engines.keepers))
        if self._scaling is not None:
            beside.append(self._scaling.run())
        await self.engines.run(beside)

    def drain(self) -> None:
        """Refuse new requests from now on; those in flight may finish, on any engine."""
        if self._scaling is not None:
            self._scaling.close()
        for keeper in self.engines.keepers:
            keeper.drain()

    async def stop(self, error: ManyloraError | None = None) -> None:
        """End the engines; requests and calls in flight fail with ``error``, by default ``EngineDead``."""
        error = error or EngineDead("The server is shutting down.")
        self.requests.close(error)
        self.adapters.versions.stop()
        await self.engines.stop(error)
