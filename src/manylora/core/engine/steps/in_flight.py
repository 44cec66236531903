"""Steps in flight: at most two, the second planned ahead and queued behind the first."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from manylora.core.costs.online import StepLoad
from manylora.core.costs.rank_fit import RankLoad
from manylora.core.engine.steps.plan_ahead import plan_at
from manylora.core.memory import ReloadCosts
from manylora.core.plan import StepPlan, StepResult
from manylora.core.ports import Work
from manylora.core.scheduling import Sequence

__all__ = ["Step", "StepsInFlight"]


@dataclass(slots=True)
class Step:
    """A step in flight.

    Args:
        sequences: Its sequences, in the plan's order.
        num_tokens: Tokens that it runs.
        load: Its size for the cost model, ``None`` while no cost is asked for.
        rank_load: Its content for the fits of step times, ``None`` for a step that is not observed.
        began_at: Time in seconds of its launch, or of the end of the step before it if that is later.
        is_cold: Whether adapters of sequences may be elsewhere than in complete pages.
    """

    plan: StepPlan
    sequences: list[Sequence]
    num_tokens: int
    load: StepLoad | None
    rank_load: RankLoad | None
    work: Work
    began_at: float
    is_cold: bool = False


class StepsInFlight:
    """Steps in the order of their launch, and the time at which to plan one more."""

    def __init__(self, costs: ReloadCosts, *, plans_ahead: bool) -> None:
        self._costs = costs
        self._plans_ahead = plans_ahead
        self._steps: deque[Step] = deque()
        self._plan_at = math.inf

    def __len__(self) -> int:
        return len(self._steps)

    def plans(self) -> list[StepPlan]:
        """Return the plans in flight, oldest first."""
        return [step.plan for step in self._steps]

    def may_plan(self, now: float) -> bool:
        """Whether the next step is to be planned now."""
        return not self._steps or now >= self._plan_at

    def planning(self) -> None:
        """Note that the next step is being planned: once per step in flight, also if it comes out empty."""
        self._plan_at = math.inf

    def launched(self, step: Step, now: float) -> None:
        """Add a step, behind the one in flight if there is one."""
        self._steps.append(step)
        if len(self._steps) == 1:
            self._begin(step, now)

    def take_completed(self, now: float) -> tuple[Step, StepResult] | None:
        """Remove and return the oldest step if it is complete. Call ``begin_next`` once its result is processed.

        Raises:
            Exception: The device failed in it; the engine is lost.
        """
        if not self._steps or (result := self._steps[0].work.poll(now)) is None:
            return None
        assert isinstance(result, StepResult)
        return self._steps.popleft(), result

    def begin_next(self, now: float) -> None:
        """Note that the step behind the completed one begins."""
        if self._steps:
            self._begin(self._steps[0], now)

    def next_event_at(self) -> float:
        """Return the time at which the oldest step completes or the next is to be planned; infinite if unknown."""
        return min(self._steps[0].work.ready_at, self._plan_at) if self._steps else math.inf

    def _begin(self, step: Step, now: float) -> None:
        step.began_at = now
        if self._plans_ahead:
            self._plan_at = plan_at(now, self._costs.step.seconds(step.num_tokens))
