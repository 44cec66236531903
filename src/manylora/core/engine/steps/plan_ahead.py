"""Plan-ahead: a step is planned before the step in flight has yielded its tokens, which are filled in later.

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

from collections.abc import Container, Mapping, Sequence
from typing import overload

import msgspec

from manylora.core.plan import PlannedSequence, StepPlan
from manylora.core.types import SampledToken

__all__ = ["fill_in", "plan_at"]

LEAD_S = 0.003
"""Time from planning a step to the end of the one in flight, in seconds: several times the cost of planning."""


def plan_at(began_at: float, expected_s: float) -> float:
    """Return the time to plan the next step, given the start and the expected duration of this one; all in seconds."""
    return began_at + max(expected_s / 2, expected_s - LEAD_S)


class _Continued(Sequence[int]):
    """The first ``length`` tokens of a list that may grow, and one more token."""

    __slots__ = ("_last", "_length", "_tokens")

    def __init__(self, tokens: Sequence[int], length: int, last: int) -> None:
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
    late: Mapping[int, Sequence[int]] | None = None,
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
