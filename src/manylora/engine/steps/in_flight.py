"""Steps in flight: at most two, of which the second was planned ahead and waits behind the first."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from manylora.costs.online import StepLoad
from manylora.engine.steps.plan_ahead import plan_at
from manylora.memory import ReloadCosts
from manylora.plan import StepPlan, StepResult
from manylora.ports import Work
from manylora.scheduling import Sequence

__all__ = ["Step", "StepsInFlight"]


@dataclass(slots=True)
class Step:
    """A step in flight.

    Args:
        plan: The plan that the executor carries out.
        sequences: Its sequences, in the plan's order.
        num_tokens: Tokens that it runs.
        load: Its size for the cost model, ``None`` while no cost is asked for.
        work: The executor's handle.
        began_at: When it had the device to itself: at its launch, or when the step before it was collected.
    """

    plan: StepPlan
    sequences: list[Sequence]
    num_tokens: int
    load: StepLoad | None
    work: Work
    began_at: float


class StepsInFlight:
    """Steps in the order of their launch, and the time at which to plan one more.

    Args:
        costs: Expected duration of a step.
        plans_ahead: Whether a step is planned while another is in flight.
    """

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
        """Whether the next step is to be planned: nothing is in flight, or its time has come."""
        return not self._steps or now >= self._plan_at

    def planning(self) -> None:
        """The next step is being planned: once per step in flight, whatever comes of it."""
        self._plan_at = math.inf

    def launched(self, step: Step, now: float) -> None:
        """A step starts, behind the one in flight if there is one."""
        self._steps.append(step)
        if len(self._steps) == 1:
            self._begin(step, now)

    def take_completed(self, now: float) -> tuple[Step, StepResult] | None:
        """Take the oldest step out if it is complete. Call ``begin_next`` once it has been taken in.

        Raises:
            Exception: The device failed in it; the engine is lost.
        """
        if not self._steps or (result := self._steps[0].work.poll(now)) is None:
            return None
        assert isinstance(result, StepResult)
        return self._steps.popleft(), result

    def begin_next(self, now: float) -> None:
        """The step that was in front has been taken in: the one behind it has the device to itself."""
        if self._steps:
            self._begin(self._steps[0], now)

    def next_event_at(self) -> float:
        """Return when the oldest step completes, as far as is known, or the next is to be planned; else infinite."""
        return min(self._steps[0].work.ready_at, self._plan_at) if self._steps else math.inf

    def _begin(self, step: Step, now: float) -> None:
        step.began_at = now
        if self._plans_ahead:
            self._plan_at = plan_at(now, self._costs.step.seconds(step.num_tokens))
