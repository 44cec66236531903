"""Steps in flight, at most two: the second is planned ahead, before the first has yielded its tokens.

It is queued behind the first, and the tokens are filled in later.

::

    device   |------- step n -------|------ step n + 1 ------|
    core     launch n    plan n + 1 |collect n    plan n + 2 |collect n + 1
                         ^ ``plan_at``

The next step does not depend on the values of the tokens, with one exception: a token may end its request. Such a
sequence runs once more, its result is dropped, and its pages are released when that step is over. Its client has the
answer by then.

A request that arrives after ``plan_at`` waits one step more. So planning is late: in the second half of the step in
flight, and only as long before its end as planning may take.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import overload

import msgspec

from manylora.core.costs.online import StepLoad
from manylora.core.memory.eviction import LinearCost
from manylora.core.plan import PlannedSequence, StepPlan, StepResult
from manylora.core.ports import Work
from manylora.core.scheduling import Sequence
from manylora.core.types import SampledToken

__all__ = ["Step", "StepsInFlight", "fill_in", "plan_at"]

LEAD_S = 0.003
"""Time from planning a step to the end of the one in flight, in seconds: several times the cost of planning."""


def plan_at(began_at: float, expected_s: float) -> float:
    """Return the time to plan the next step, given the start and the expected duration of this one; all in seconds."""
    return began_at + max(expected_s / 2, expected_s - LEAD_S)


class _Continued(Seq[int]):
    """The first ``length`` tokens of a list that may grow, and one more token."""

    __slots__ = ("_last", "_length", "_tokens")

    def __init__(self, tokens: Seq[int], length: int, last: int) -> None:
        self._tokens = tokens
        self._length = length
        self._last = last

    def __len__(self) -> int:
        return self._length + 1

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if index == self._length:  # as a step asks that decodes
            return self._last
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length + 1)
            assert step == 1, "tokens are read forwards, each of them"
            head = list(self._tokens[start : min(stop, self._length)])
            return [*head, self._last] if start <= self._length < stop else head
        if index == -1:
            return self._last
        if not -self._length <= index + (index < 0) <= self._length:
            raise IndexError(f"index {index} of {self._length + 1} tokens")
        return self._tokens[index if index >= 0 else index + self._length + 1]


def fill_in(
    plan: StepPlan,
    tokens: Mapping[int, SampledToken],
    failed: Container[int] = (),
    late: Mapping[int, Seq[int]] | None = None,
) -> StepPlan:
    """Return the plan with the tokens that it awaits of the step before.

    Args:
        plan: The plan.
        tokens: Tokens of the step before, by ``seq_id``.
        failed: Sequences that failed in the step before. They are left out, and need no token and no failure of this
            step: the core has ended them by then. No sequence may be left.
        late: The pages of the sequences that the step before did not wait for, by ``seq_id``. They are left out
            likewise, unless they were sent back and admitted again meanwhile: their list of pages is another one then.

    Raises:
        KeyError: A token that the plan awaits is missing.
    """
    sequences = plan.sequences
    if late:
        sequences = tuple([part for part in sequences if late.get(part.seq_id) is not part.pages])
    if failed:
        sequences = tuple([part for part in sequences if part.seq_id not in failed])
    elif not late and not any(part.awaits_token for part in sequences):
        return plan
    filled = tuple([_fill_in(part, tokens) if part.awaits_token else part for part in sequences])
    return StepPlan(step_id=plan.step_id, sequences=filled, released=plan.released, prompt_rows=plan.prompt_rows)


def _fill_in(part: PlannedSequence, tokens: Mapping[int, SampledToken]) -> PlannedSequence:
    known = part.start + part.num_tokens - 1
    continued = _Continued(part.tokens, known, tokens[part.seq_id].token_id)
    return msgspec.structs.replace(part, tokens=continued, awaits_token=False)


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
