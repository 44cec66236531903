"""The planner of steps: the sequences of the next step, and the tokens of each.

Decoding sequences get their one token first, then prompts share the rest of the budget: tokens and, if the step has a
target duration, seconds. The step composition cuts prompts and decides whether they share the step with decoding
(``core/scheduling/step_composition.py``).

::

    |-- decoding --|------------- prompts -------------|   a step
                   |-- chunk --|-- chunk --|  left ....|   until tokens or seconds are spent

A limit on tokens makes steps uneven: 512 tokens on adapters of rank 128 may take twice the time of as many at rank 8. A
target cuts prompts by time instead, so that the time between tokens is even and no step is shorter than necessary. A
long step serves prompts at the expense of decoding, and slow decodes hold pages longer. With pages to spare this costs
only decoding speed; when pages run short it delays every admission. So the fuller the pool, the shorter the steps.

Source: chunked prefill after Sarathi-Serve, iteration-level scheduling after Orca, both through vLLM v1.
"""

from __future__ import annotations

import math
from dataclasses import InitVar, dataclass

from manylora.core.config import EngineConfig
from manylora.core.costs.online import OnlineCosts, StepLoad
from manylora.core.engine.adapters.cold_starts import ColdStarts
from manylora.core.engine.steps.admission import Admission
from manylora.core.engine.steps.running import RunningSet
from manylora.core.memory import Depth, PageCache
from manylora.core.plan import IN_HOST
from manylora.core.scheduling import Outcome, Policy, Sequence, SequenceStatus, StepComposition

__all__ = ["StepBudget", "StepPlanner", "target_s"]

ROOMY = 0.25  # share of claimable pages above which a step may use its whole target
LEAST_OF_TARGET = 0.3  # share of the target when no page is left: shorter steps would mostly read weights

PROMPT_SHARE = 0.2
"""Least share of a step for prompts, however many sequences decode: else prompts could starve on a slow device."""

LEAST_TOKENS = 16  # smallest chunk, in tokens

_Prompts = list[tuple[Sequence, int]]  # sequences with unfinished prompts, and the tokens of each in the step

_Planned = tuple[list[Sequence], _Prompts]
"""The sequences of a step: those that decode, with one token each, and in the batch behind them those with prompts."""


@dataclass(eq=False)
class StepPlanner:
    """Decides each step: which sequences are pre-empted, which are admitted, and how many tokens of a prompt run."""

    config: InitVar[EngineConfig]
    _running: RunningSet
    _admission: Admission
    _page_cache: PageCache
    _policy: Policy  # the waiting sequences
    _composition: StepComposition
    _costs: OnlineCosts  # the costs of steps
    _cold_starts: ColdStarts  # limits the chunks of prompts that are assisted

    def __post_init__(self, config: EngineConfig) -> None:
        self._most_tokens = config.scheduler.max_num_batched_tokens
        self._target_s = config.scheduler.step_target_s
        # A running sequence needs at least one token of every step's budget.
        self._num_seats = min(config.scheduler.max_num_seqs, self._most_tokens)

    def plan(self, now: float, *, is_ahead: bool = False) -> _Planned:
        """Return the sequences of the next step; none if no sequence can run.

        If the plan ``is_ahead``, a step is in flight. It may be writing the pages of a sequence, which can then not be
        pre-empted: if one must be, the plan is empty.
        """
        self._admission.again_at = math.inf
        squashed = self._policy.squash(now)
        if squashed and is_ahead:
            return [], []
        for sequence in squashed:
            self._running.squash(sequence, now)
        num_before = len(self._running.sequences)
        running = self._plan_running(now, may_preempt=not is_ahead)
        if running is None:
            return [], []
        composition, (decodes, unfinished) = self._composition, running
        budget = self._budget_after(decodes)
        prompts: _Prompts = []
        for sequence in self._policy.prompts(unfinished) if unfinished else ():
            if not budget.is_spent:
                prompts.append((sequence, self._spend(sequence, budget)))
        # If sequences were pre-empted, memory is short: none is admitted in this step.
        is_short = len(self._running.sequences) < num_before
        if not (decodes or prompts) or (composition.may_admit() and not is_short):
            admitted, is_loading = self.admit(budget, now)
            prompts += admitted
            if composition.round_ended(has_admitted=bool(admitted), is_loading=is_loading):
                return [], []
        composition.step_planned()
        return composition.beside_prompts(decodes) if prompts else decodes, prompts

    def _plan_running(self, now: float, *, may_preempt: bool) -> tuple[list[Sequence], list[Sequence]] | None:
        """Return the decoding sequences, each with a page for its next token, and those with prompts, oldest first.

        ``None`` if one lacks a page, and others may not be pre-empted for it.
        """
        decodes: list[Sequence] = []
        unfinished: list[Sequence] = []
        for sequence in self._running.sequences:  # its end may be pre-empted meanwhile
            num_tokens = sequence.num_tokens
            if num_tokens >= sequence.runs_until:
                continue
            if num_tokens - sequence.num_computed > 1:
                unfinished.append(sequence)
            elif num_tokens <= sequence.room or self._running.grow(sequence, now, may_preempt=may_preempt):
                decodes.append(sequence)
            elif not may_preempt:
                return None
        return decodes, unfinished

    def admit(self, budget: StepBudget, now: float) -> tuple[_Prompts, bool]:
        """Admit waiting sequences, in the policy's order, while there are seats and room in the step.

        Returns:
            The admitted sequences with their tokens, and whether another was refused because its adapter is loading.
        """
        planned: _Prompts = []
        is_loading = lacks_room = False
        policy, running = self._policy, self._running
        policy.begin(now)
        while not budget.is_spent and len(running.sequences) < self._num_seats:
            sequence = policy.offer()
            if sequence is None:
                break
            is_first = sequence is policy.first_in_line
            outcome = self._admission.admit(sequence, now, Depth.WANTED if is_first else Depth.IDLE)
            policy.report(sequence, outcome)
            if outcome is Outcome.ADMITTED:
                planned.append((sequence, self._spend(sequence, budget)))
            is_loading |= outcome is Outcome.ADAPTER_LOADING
            lacks_room |= outcome is not Outcome.ADMITTED and outcome is not Outcome.ADAPTER_LOADING
        running.is_full = lacks_room
        first = policy.first_in_line
        running.first_in_line = first if first is not None and first.status is SequenceStatus.WAITING else None
        return planned, is_loading

    def _budget_after(self, decodes: list[Sequence]) -> StepBudget:
        """Return the budget of the step that is left for prompts."""
        beside = self._composition.beside_prompts(decodes)
        num_tokens = self._most_tokens - len(beside)
        if self._target_s is None:
            return StepBudget(num_tokens, self._costs)
        self._costs.is_asked = True
        claimable_share = self._page_cache.num_claimable(Depth.IDLE) / self._page_cache.allocator.num_pages
        step_s = target_s(self._target_s, claimable_share)
        return StepBudget(num_tokens, self._costs, StepLoad.of(beside), step_s)

    def _spend(self, sequence: Sequence, budget: StepBudget) -> int:
        """Return how many tokens of a prompt go into the step, and subtract them from the budget."""
        room = budget.room_for(sequence)
        if sequence.placement is IN_HOST and sequence.row_rank:
            room = self._cold_starts.room_for(sequence, room)
        room = min(room, self._policy.chunk(sequence))
        num_tokens = min(sequence.num_alike, self._composition.chunk(sequence.num_to_run, room))
        budget.spend(sequence, num_tokens)
        return num_tokens


def target_s(longest_s: float, claimable_share: float) -> float:
    """Return the target duration of a step: ``longest_s`` with pages to spare, else less by the claimable share."""
    return longest_s * max(LEAST_OF_TARGET, min(1.0, claimable_share / ROOMY))


class StepBudget:
    """The tokens and seconds left for prompts beside ``decoding``, in a step of ``step_s`` if it has a target."""

    def __init__(
        self, num_tokens: int, costs: OnlineCosts, decoding: StepLoad | None = None, step_s: float | None = None
    ) -> None:
        self._num_tokens = num_tokens
        self._costs = costs
        self._seconds: float | None = None
        if step_s is not None:
            spent_s = costs.step_s(decoding or StepLoad.of([]))
            self._seconds = max(step_s - spent_s, PROMPT_SHARE * step_s, LEAST_TOKENS * costs.token_s(0))

    @property
    def is_spent(self) -> bool:
        """Whether less than the smallest chunk is left."""
        if self._num_tokens <= 0:
            return True
        return self._seconds is not None and self._seconds < LEAST_TOKENS * self._costs.token_s(0)

    def room_for(self, sequence: Sequence) -> int:
        """Return how many of a sequence's tokens fit; at least one, unless the budget is spent."""
        num_tokens = min(sequence.num_to_run, self._num_tokens)
        if self._seconds is None:
            return num_tokens
        in_time = int(self._seconds / max(1e-9, self._costs.token_s(sequence.row_rank)))
        return min(num_tokens, max(LEAST_TOKENS, in_time))

    def spend(self, sequence: Sequence, num_tokens: int) -> None:
        """Subtract a chunk, which may exceed the room."""
        self._num_tokens -= num_tokens
        if self._seconds is not None:
            self._seconds -= num_tokens * self._costs.token_s(sequence.row_rank)
