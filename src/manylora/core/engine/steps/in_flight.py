"""Steps in flight: at most two, the second planned ahead and queued behind the first."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from manylora.core.costs.online import StepLoad
from manylora.core.engine.steps.plan_ahead import plan_at
from manylora.core.memory.eviction import LinearCost
from manylora.core.plan import StepPlan, StepResult
from manylora.core.ports import Work
from manylora.core.scheduling import Sequence

__all__ = ["Step", "StepsInFlight"]


@dataclass(slots=True)
class Step:
    """A step in flight."""

    plan: StepPlan
    sequences: list[Sequence]  # its sequences, in the plan's order
    num_tokens: int  # tokens that it runs
    load: StepLoad | None  # its content for cost models, ``None`` for a step that teaches none
    is_fitted: bool  # whether the fits of step times learn from it
    work: Work
    began_at: float  # time in seconds of its launch, or of the end of the step before it if that is later
    is_cold: bool = False  # whether adapters of sequences may be elsewhere than in complete pages


class StepsInFlight:
    """Steps ``in_flight`` in the order of their launch, and the time to plan one more where steps are planned ahead."""

    def __init__(self, cost: LinearCost, *, plans_ahead: bool) -> None:
        self.in_flight: deque[Step] = deque()
        self._cost = cost
        self._plans_ahead = plans_ahead
        self._plan_at = math.inf

    def may_plan(self, now: float) -> bool:
        """Whether the next step is to be planned now."""
        return not self.in_flight or now >= self._plan_at

    def planning(self) -> None:
        """Note that the next step is being planned: once per step in flight, also if it comes out empty."""
        self._plan_at = math.inf

    def launched(self, step: Step, now: float) -> None:
        """Add a step, behind the one in flight if there is one."""
        self.in_flight.append(step)
        if len(self.in_flight) == 1:
            self._begin(step, now)

    def take_completed(self, now: float) -> tuple[Step, StepResult] | None:
        """Remove and return the oldest step if it is complete. Call ``begin_next`` once its result is processed.

        ``Exception`` if the device failed in it; the engine is lost.
        """
        if not self.in_flight or (result := self.in_flight[0].work.poll(now)) is None:
            return None
        assert isinstance(result, StepResult)
        return self.in_flight.popleft(), result

    def begin_next(self, now: float) -> None:
        """Note that the step behind the completed one begins."""
        if self.in_flight:
            self._begin(self.in_flight[0], now)

    def next_event_at(self) -> float:
        """Return the time at which the oldest step completes or the next is to be planned; infinite if unknown."""
        return min(self.in_flight[0].work.ready_at, self._plan_at) if self.in_flight else math.inf

    def _begin(self, step: Step, now: float) -> None:
        step.began_at = now
        if self._plans_ahead:
            self._plan_at = plan_at(now, self._cost.seconds(step.num_tokens))
