"""The running set: who is in it, who gets how many tokens in a step, who is let in and who must leave.

A step is ``{sequence: number of tokens}``. Decoding sequences get their one token first, then prompts share
what is left of the budget (tokens, or time: ``step_budget.py``) in chunks, so a long prompt slows decoding by a
bounded amount and never stops it. Every sequence is admitted with pages for all tokens it has, so only decoding
ones grow; when a page is missing then, idle things go first, then adapters others wait for, then the youngest
sequence is pre-empted (its tokens stay, its KV is computed again).

Liveness: sequences are ordered by arrival. The oldest running one may pre-empt every other; the one the policy
puts first in line may claim everything that running ones do not hold; a request is accepted only if it fits
alone. So the oldest always ends, and by induction all do.

Four options of ``SchedulerConfig`` make steps as S-LoRA has them, so that what is published against it can be
compared on this engine (``docs/adr/0016``): prompts in steps of their own, a step that waits for the adapters of
those it lets in, pages claimed for the longest answer, and so many steps between two admissions.

Source: chunked prefill after Sarathi-Serve, iteration-level scheduling after Orca, both through vLLM v1.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from manylora.config import MemoryConfig, SchedulerConfig
from manylora.costs.online import OnlineCosts, StepLoad
from manylora.engine.adapter_cache import AdapterCache, Readiness
from manylora.engine.step_budget import StepBudget, target_s
from manylora.events import AdapterAwaited, EventSink, RequestAdmitted, RequestPreempted, RequestSquashed
from manylora.memory import Depth, PageCache, num_blocks
from manylora.scheduling import Outcome, Policy, Sequence, SequenceStatus
from manylora.types import AdapterKey

__all__ = ["RunningSet"]

_Planned = tuple[Sequence, int]
"""A sequence and its tokens in the step."""


class RunningSet:
    """Running sequences, oldest arrival first, and the waiting ones the policy holds.

    Args:
        page_cache: The pages.
        cache: The adapters.
        policy: Who goes first.
        scheduler: What a step may hold.
        memory: Block size and prefix caching.
        costs: What steps take; told of each that was planned here.
        on_hit: Told of each sequence that found its adapter on the device when first looked at.
        emit: Takes events.
    """

    def __init__(
        self,
        *,
        page_cache: PageCache,
        cache: AdapterCache,
        policy: Policy,
        scheduler: SchedulerConfig,
        memory: MemoryConfig,
        costs: OnlineCosts,
        on_hit: Callable[[Sequence], None],
        emit: EventSink,
    ) -> None:
        self._page_cache = page_cache
        self._cache = cache
        self._policy = policy
        self._scheduler = scheduler
        self._memory = memory
        self._costs = costs
        self.load: StepLoad | None = None  # of the step planned last, while somebody asks for costs
        self._on_hit = on_hit
        self._emit = emit
        # A running sequence needs at least one token of every step's budget.
        self._num_seats = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        self._running: list[Sequence] = []
        self._first_in_line: Sequence | None = None  # of the last step, if it was not admitted
        self._num_steps_since_admission = scheduler.steps_between_admissions
        self._is_held_up = False  # in the middle of letting sequences in, for an adapter on its way
        self.num_preemptions = 0
        self.num_squashes = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0

    def __len__(self) -> int:
        return len(self._running)

    def sequences(self) -> list[Sequence]:
        """Return the running sequences, oldest first."""
        return list(self._running)

    def plan(self, now: float, *, is_ahead: bool = False) -> list[tuple[Sequence, int]]:
        """Decide the next step: who runs and how many tokens each. Admits and pre-empts on the way.

        Args:
            now: In seconds.
            is_ahead: A step is in flight. Nobody whose pages it may be writing can be sent back then, so where somebody
                must be, nothing is planned yet.
        """
        squashed = self._policy.squash(now)
        if squashed and is_ahead:
            return []
        for sequence in squashed:
            self.num_squashes += 1
            self._emit(RequestSquashed(now, sequence.request.request_id, sequence.num_computed))
            self._send_back(sequence, now)
        num_preemptions = self.num_preemptions
        if is_ahead and not self._claim_growth(now):
            return []
        decodes, prompts, budget = self._plan_running(now)
        is_short = self.num_preemptions > num_preemptions  # of memory: let the step run before anybody is let in
        if not (decodes or prompts) or (self._may_admit() and not is_short):
            admitted, is_loading = self._admit(budget, now)
            if admitted:
                prompts += admitted
                self._num_steps_since_admission = -1  # the step that comes is theirs
            self._is_held_up = is_loading and not self._scheduler.overlap_loads
            if self._is_held_up:
                return []
        self._num_steps_since_admission += 1
        planned = prompts if prompts and not self._scheduler.mixed_steps else decodes + prompts
        self.load = self._costs.load_of(planned) if self._costs.is_asked else None
        return planned

    def took(self, load: StepLoad | None, seconds: float) -> None:
        """Learn how long a step took; ``load`` is what ``load`` was when it had been planned."""
        if load is not None and load.tokens:
            self._costs.observe(load, seconds)

    def _may_admit(self) -> bool:
        return self._is_held_up or self._num_steps_since_admission >= self._scheduler.steps_between_admissions

    def stop(self, sequence: Sequence, now: float) -> None:
        """Take a sequence out that ended, with its pages and its hold on the adapter."""
        self._take_out(sequence, now)
        self._policy.finish(sequence, now)

    def _take_out(self, sequence: Sequence, now: float) -> None:
        self._running.remove(sequence)
        self._page_cache.release_kv(sequence.table.clear(), now)
        if sequence.adapter is not None:
            self._cache.release(sequence.adapter, now)

    def forget(self, sequence: Sequence) -> None:
        """Learn that a sequence is over."""
        if sequence is self._first_in_line:
            self._first_in_line = None

    def _budget_after(self, decodes: list[_Planned]) -> StepBudget:
        """Return what is left of the step for prompts."""
        is_mixed = self._scheduler.mixed_steps
        num_tokens = self._scheduler.max_num_batched_tokens - (len(decodes) if is_mixed else 0)
        longest_s = self._scheduler.step_target_s
        if longest_s is None:
            return StepBudget(num_tokens, self._costs, None, None)
        self._costs.is_asked = True
        step_s = target_s(longest_s, self._page_cache.num_claimable(Depth.IDLE) / self._page_cache.allocator.num_pages)
        return StepBudget(num_tokens, self._costs, self._costs.load_of(decodes) if is_mixed else None, step_s)

    def _plan_running(self, now: float) -> tuple[list[_Planned], list[_Planned], StepBudget]:
        """Give running sequences their tokens: decoding ones first, then prompt chunks, each oldest first.

        Returns:
            Both, and what is left of the step.
        """
        decodes: list[_Planned] = []
        prompts: list[_Planned] = []
        unfinished = []
        block_size = self._memory.block_size
        for sequence in self.sequences():
            if sequence.num_in_flight and sequence.is_ending:
                continue
            num_tokens = len(sequence.tokens) + sequence.num_pending
            if num_tokens - sequence.num_computed > 1:
                unfinished.append(sequence)
            elif sequence.status is SequenceStatus.RUNNING:  # not pre-empted by an older one a moment ago
                has_room = num_tokens <= len(sequence.table.pages) * block_size
                if has_room or self._grow(sequence, now):
                    decodes.append((sequence, 1))
        budget = self._budget_after(decodes)
        for sequence in unfinished:
            if not budget.is_spent and sequence.status is SequenceStatus.RUNNING:
                prompts.append((sequence, self._take(sequence, budget)))
        return decodes, prompts, budget

    def _take(self, sequence: Sequence, budget: StepBudget) -> int:
        """Return how much of a prompt goes into the step, and count it.

        Without chunking a prompt runs whole: the last one in a step may overshoot the budget, and ends it.
        """
        num_tokens = budget.room_for(sequence) if self._scheduler.chunked_prefill else sequence.num_to_run
        budget.take(sequence, num_tokens)
        return num_tokens

    def _grow(self, sequence: Sequence, now: float, *, may_preempt: bool = True) -> bool:
        """Claim a page for a decoding sequence's next token; return whether it can run in this step.

        Idle things go first, then adapters that others wait for (that of the first in line only if it is
        younger), then younger running sequences, youngest first; at last the sequence itself.
        """
        first = self._first_in_line
        spare = first.adapter if first is not None and first.seq_id < sequence.seq_id else None
        while True:
            pages = self._page_cache.claim_kv(1, now, Depth.WANTED, spare=spare)
            if pages is not None:
                sequence.table.pages.extend(pages)
                return True
            if not may_preempt:
                return False
            youngest = self._running[-1]
            if youngest is sequence and len(self._running) == 1 and self._cache.has_loads:
                return False  # adapters on their way hold the pages: they can be claimed when they have arrived
            self._preempt(youngest, now)
            if youngest is sequence:
                return False

    def _claim_growth(self, now: float) -> bool:
        """Claim a page for every decoding sequence that lacks one, from idle things; return whether all have theirs."""
        block_size = self._memory.block_size
        return all(
            sequence.num_tokens <= len(sequence.table.pages) * block_size
            or sequence.is_ending
            or self._grow(sequence, now, may_preempt=False)
            for sequence in self._running
        )

    def _preempt(self, sequence: Sequence, now: float) -> None:
        """Take a running sequence's pages for an older one."""
        self.num_preemptions += 1
        self._emit(RequestPreempted(now, sequence.request.request_id, sequence.num_computed))
        self._send_back(sequence, now)

    def _send_back(self, sequence: Sequence, now: float) -> None:
        """Let a running sequence wait again; its tokens stay and are computed again."""
        sequence.num_preemptions += 1
        if sequence.adapter is not None:
            self._cache.want(sequence.adapter, now)
        self._take_out(sequence, now)
        sequence.num_computed = 0
        sequence.status = SequenceStatus.WAITING
        self._policy.send_back(sequence, now)

    def _admit(self, budget: StepBudget, now: float) -> tuple[list[_Planned], bool]:
        """Let waiting sequences in, in the policy's order, while there are seats and room in the step.

        Returns:
            Who was let in with how many tokens, and whether any other could not be because its adapter is on its way.
        """
        planned: list[_Planned] = []
        is_loading = False
        self._policy.begin(now)
        while not budget.is_spent and len(self._running) < self._num_seats:
            sequence = self._policy.offer()
            if sequence is None:
                break
            is_first = sequence is self._policy.first_in_line
            outcome = self._try_admit(sequence, now, Depth.WANTED if is_first else Depth.IDLE)
            self._policy.report(sequence, outcome)
            if outcome is Outcome.ADMITTED:
                planned.append((sequence, self._take(sequence, budget)))
            is_loading |= outcome is Outcome.ADAPTER_LOADING
        first = self._policy.first_in_line
        is_waiting = first is not None and first.status is SequenceStatus.WAITING
        self._first_in_line = first if is_waiting else None
        return planned, is_loading

    def _try_admit(self, sequence: Sequence, now: float, depth: Depth) -> Outcome:
        """Admit a waiting sequence if its adapter is on the device and its KV has room."""
        was_resident = True
        if sequence.version is not None:
            if self._is_capped(sequence):
                return Outcome.ADAPTER_CAP
            readiness = self._cache.ensure(sequence.version, now, depth)
            was_resident = self._look(sequence, readiness)
            if readiness is Readiness.LOADING:
                self._note_wait(sequence, sequence.version.key, now, depth)
                return Outcome.ADAPTER_LOADING
            if readiness is Readiness.NO_ROOM:
                return Outcome.ADAPTER_NO_PAGES
        cached = sequence.table.match(sequence.tokens, self._page_cache.prefix) if self._memory.prefix_caching else []
        num_missing = num_blocks(sequence.num_tokens_to_hold, self._memory.block_size) - len(cached)
        pages = self._page_cache.claim_kv(num_missing, now, depth, spare=sequence.adapter, shared=cached)
        if pages is None:
            return Outcome.NO_PAGES
        sequence.table.adopt(cached)
        sequence.num_shared_pages = len(cached)
        sequence.table.pages.extend(pages)
        sequence.num_computed = len(cached) * self._memory.block_size
        self._start(sequence, now, was_resident)
        return Outcome.ADMITTED

    def _start(self, sequence: Sequence, now: float, was_resident: bool) -> None:
        if sequence.admitted_at is None:
            sequence.admitted_at = now
            sequence.num_cached = sequence.num_computed
            self.num_prompt_tokens += sequence.num_prompt_tokens
            self.num_cached_tokens += sequence.num_cached
            waited_s = now - sequence.arrived_at
            self._emit(
                RequestAdmitted(
                    now, sequence.request.request_id, sequence.adapter, waited_s, sequence.num_cached, was_resident
                )
            )
        sequence.status = SequenceStatus.RUNNING
        insort(self._running, sequence, key=lambda other: other.seq_id)
        if sequence.adapter is not None:
            self._cache.hold(sequence.adapter, now)
            self._cache.unwant(sequence.adapter, now)

    def _note_wait(self, sequence: Sequence, adapter: AdapterKey, now: float, depth: Depth) -> None:
        """Say once for each load that a sequence waits for nothing else.

        Pages it may find in the prefix cache are not reckoned with, so a wait is rather missed than made up.
        """
        load = self._cache.residency(adapter).num_loads
        if sequence.awaited_load == load:
            return
        if num_blocks(sequence.num_tokens_to_hold, self._memory.block_size) <= self._page_cache.num_claimable(depth):
            sequence.awaited_load = load
            self._emit(AdapterAwaited(now, sequence.request.request_id, adapter))

    def _is_capped(self, sequence: Sequence) -> bool:
        """Whether its adapter would be one more distinct adapter than may run."""
        cap = self._scheduler.max_loras
        if cap is None or sequence.adapter is None:
            return False
        return self._cache.num_active >= cap and not self._cache.residency(sequence.adapter).num_running

    def _look(self, sequence: Sequence, readiness: Readiness) -> bool:
        """Count a hit if the adapter is there when its sequence is first looked at; return whether it was then."""
        if not sequence.was_looked_at:
            sequence.was_looked_at = True
            sequence.found_resident = readiness is Readiness.READY
            if sequence.found_resident:
                self._on_hit(sequence)
        return sequence.found_resident
