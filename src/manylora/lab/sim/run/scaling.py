"""Replicas of a simulation that start and drain over time, as the code of a live fleet decides.

::

    asked ------ start_s ------> loads the hottest adapters ---> serves ---> drains ---> ended
    |<------------------------------ paid for (ReplicaSpan) ------------------------------->|
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from manylora.core.engine.core import EngineCore
from manylora.core.errors import CapacityError
from manylora.core.options import CheckedOptions, option
from manylora.core.scaling.autoscaler import Scaler, ScalingDecision, ScalingPolicy
from manylora.core.scaling.controller import ReplicaPhase, ScalingController

__all__ = ["ReplicaSpan", "SimulatedScaling", "SimulatedStarts"]

POLL_S = 0.1  # virtual seconds between two looks at a replica that loads adapters or drains


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedScaling(CheckedOptions):
    """The scaling of a simulation's replicas."""

    policy: ScalingPolicy  # bounds and prices; ``min_replicas`` serve from the beginning
    start_s: float = option(at_least=0, unit="s", help="Mean time from the order to a replica that can load adapters.")
    jitter: float = option(0.2, at_least=0, at_most=1, help="Each start takes up to this part less or more.")
    make_scaler: Callable[[], Scaler] | None = None  # makes the scaler; ``None`` for the scaler of a live fleet


@dataclass(slots=True)
class ReplicaSpan:
    """One life of a replica; times in seconds, infinite until they come."""

    index: int  # its place in the fleet
    asked_at: float  # time of the order to start it
    serving_at: float = math.inf  # first time at which it could take a request
    draining_at: float = math.inf  # time of the order to drain it
    ended_at: float = math.inf  # time at which its last request had ended


@dataclass(slots=True)
class _Start:
    """A start under way: the engine comes at ``ready_at``, and loads ``adapters`` until ``until``."""

    ready_at: float
    adapters: list[str] = field(default_factory=list)
    until: float = math.inf


class SimulatedStarts:
    """Carries out the orders of a scaling controller in virtual time, on the ``cores`` of the run.

    ``make_core`` makes the engine of a place in the fleet, with every adapter on disk or host. ``on_serving`` is called
    with the index of a replica that takes requests from now on. The seed is of the times of starts.
    """

    def __init__(
        self,
        scaling: SimulatedScaling,
        controller: ScalingController,
        cores: dict[int, EngineCore],
        make_core: Callable[[int], EngineCore],
        on_serving: Callable[[int], None],
        *,
        seed: int,
    ) -> None:
        self.phases = [ReplicaPhase.IDLE] * scaling.policy.max_replicas
        self.spans: list[ReplicaSpan] = []  # every life of every replica, in order of their starts
        self.decisions: list[tuple[float, ScalingDecision]] = []
        self._scaling = scaling
        self._controller = controller
        self._cores = cores
        self._make_core = make_core
        self._on_serving = on_serving
        self._rng = Random(f"starts/{seed}")
        self._starts: dict[int, _Start] = {}
        self._lives: dict[int, ReplicaSpan] = {}  # the present life of each replica in use
        self._look_at = scaling.policy.look_every_s
        self._poll_at = math.inf
        for index in range(scaling.policy.min_replicas):
            self._begin(index, 0.0)
            self._cores[index] = self._make_core(index)
            self._serve(index, 0.0)

    @property
    def serving(self) -> list[int]:
        """The replicas that take requests."""
        return [index for index, phase in enumerate(self.phases) if phase is ReplicaPhase.SERVING]

    @property
    def next_at(self) -> float:
        """The time of the next turn, in seconds."""
        return min(self._look_at, self._poll_at)

    def turn(self, now: float) -> None:
        """See to starts and drains under way; look at the load if it is time."""
        for index, start in list(self._starts.items()):
            self._go_on(index, start, now)
        for index, phase in enumerate(self.phases):
            if phase is ReplicaPhase.DRAINING and not self._cores[index].has_requests:
                del self._cores[index]
                self.phases[index] = ReplicaPhase.IDLE
                self._lives.pop(index).ended_at = now
        if now >= self._look_at:
            self._look(now)
        is_polled = bool(self._starts) or ReplicaPhase.DRAINING in self.phases
        self._poll_at = now + POLL_S if is_polled else math.inf

    def close(self, now: float) -> None:
        """End the replicas in use, at the end of the run."""
        for life in self._lives.values():
            life.ended_at = now

    def _look(self, now: float) -> None:
        self._look_at = now + self._scaling.policy.look_every_s
        order = self._controller.look(now, self.phases)
        self.decisions.append((now, order.decision))
        for index in order.start:
            self._begin(index, now)
            spread = self._scaling.jitter * (2 * self._rng.random() - 1)
            self._starts[index] = _Start(now + self._scaling.start_s * (1 + spread))
        for index in order.drain:
            self.phases[index] = ReplicaPhase.DRAINING
            self._lives[index].draining_at = now

    def _begin(self, index: int, now: float) -> None:
        self.phases[index] = ReplicaPhase.STARTING
        self._lives[index] = ReplicaSpan(index, now)
        self.spans.append(self._lives[index])

    def _go_on(self, index: int, start: _Start, now: float) -> None:
        """Make the engine when it is due; let it serve once its adapters are there."""
        if now < start.ready_at:
            return
        if index not in self._cores:
            core = self._cores[index] = self._make_core(index)
            start.until = now + self._scaling.policy.warm_s
            for name in self._controller.hottest_adapters():
                try:
                    core.adapters.warm(name, now)
                except CapacityError:  # the memory is full of hotter ones
                    break
                start.adapters.append(name)
        resident = self._cores[index].stats().resident_adapters
        if now >= start.until or all(name in resident for name in start.adapters):
            del self._starts[index]
            self._serve(index, now)
            self._controller.started(now - self._lives[index].asked_at)

    def _serve(self, index: int, now: float) -> None:
        self.phases[index] = ReplicaPhase.SERVING
        self._lives[index].serving_at = now
        self._on_serving(index)
