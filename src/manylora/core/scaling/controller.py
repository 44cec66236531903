"""The decisions about a fleet, from the views of its dispatcher: starts, drains, and the adapters to warm.

::

    idle ----> starting ----> serving ----> draining ----> idle
         start  engine,         |    drain    its requests
                hottest         |             end
                adapters        requests go here

The caller carries the orders out, live or simulated, and says in which state each replica is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from enum import Enum

from manylora.core.routing import ReplicaView
from manylora.core.scaling.autoscaler import Autoscaler, Scaler, ScalingDecision, ScalingPolicy
from manylora.core.scaling.capacity import predict_capacity
from manylora.core.scaling.watch import LoadWatch

__all__ = ["ReplicaPhase", "ScalingController", "ScalingOrder"]


class ReplicaPhase(Enum):
    """The state of a replica."""

    IDLE = "idle"
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingOrder:
    """Replicas to start and to drain, by index, and the decision behind it. At most one of the two is not empty."""

    decision: ScalingDecision
    start: tuple[int, ...] = ()
    drain: tuple[int, ...] = ()


@dataclass(eq=False)
class ScalingController:
    """Decides which replicas of a fleet start and drain; it is told the time."""

    policy: ScalingPolicy  # bounds and prices
    _views: Sequence[ReplicaView]  # the replicas as the router sees them, in use or not; ``max_replicas`` of them
    _watch: LoadWatch
    _: KW_ONLY
    scaler: InitVar[Scaler | None] = None  # decides their number; an ``Autoscaler`` by default
    decision: ScalingDecision | None = None  # the last one

    def __post_init__(self, scaler: Scaler | None) -> None:
        self._scaler = Autoscaler(self.policy) if scaler is None else scaler

    def look(self, now: float, phases: Sequence[ReplicaPhase]) -> ScalingOrder:
        """Decide about the replicas, given the state of each."""
        by_phase: dict[ReplicaPhase, list[int]] = {phase: [] for phase in ReplicaPhase}
        for index, phase in enumerate(phases):
            by_phase[phase].append(index)
        serving, num_starting = by_phase[ReplicaPhase.SERVING], len(by_phase[ReplicaPhase.STARTING])
        self._predict_capacity(serving)
        decision = self.decision = self._scaler.decide(
            now, self._watch.load(now), num_serving=len(serving), num_starting=num_starting
        )
        num_more = decision.num_wanted - len(serving) - num_starting
        if num_more > 0:
            return ScalingOrder(decision=decision, start=tuple(by_phase[ReplicaPhase.IDLE][:num_more]))
        # A start is not called off, and at least one replica goes on serving meanwhile.
        num_drained = min(-num_more, len(serving) - 1)
        by_load = sorted(serving, key=lambda index: (self._views[index].load, -index))
        return ScalingOrder(decision=decision, drain=tuple(by_load[: max(0, num_drained)]))

    def started(self, took_s: float) -> None:
        """Learn the time that a start took, in seconds."""
        self._scaler.started(took_s)

    def hottest_adapters(self) -> list[str]:
        """Return the adapters that a new replica should hold: those with the most requests in flight."""
        in_flight: Counter[str] = Counter()
        for view in self._views:
            in_flight.update(view.adapters)
        return [name for name, _ in in_flight.most_common(self.policy.num_warm)]

    def _predict_capacity(self, serving: Sequence[int]) -> None:
        """Predict the capacity of a replica from the steps and requests of those that serve."""
        busy = [self._views[index] for index in serving if self._views[index].num_requests]
        steps = next((view.steps for view in busy if not view.is_guessed), None)
        if steps is None:
            return
        num = sum(view.num_requests for view in busy)
        rate = predict_capacity(
            steps,
            prompt_tokens=sum(view.num_prompt_tokens for view in busy) / num,
            answer_tokens=busy[0].mean_answer_tokens,
            mean_rank=sum(view.sum_rank for view in busy) / num,
            max_num_seqs=self.policy.max_num_seqs,
            kv_tokens=busy[0].kv_tokens,
        )
        self._scaler.predict_capacity(rate)
