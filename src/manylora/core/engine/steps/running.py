"""The running set: the sequences in it, their tokens in a step, admission and pre-emption.

A step is a list of sequences, each with a number of tokens. Decoding sequences get their one token first, then prompts
share the rest of the budget (tokens, or time: ``budget.py``). The step composition cuts prompts and decides whether
they share the step with decoding (``core/scheduling/step_composition.py``). Every sequence is admitted with pages for
all its tokens, so only decoding ones grow. When a page is missing then, idle pages are evicted first, then adapters
that waiting requests use, then the youngest sequence is pre-empted (its tokens are kept, its KV is computed again).

Liveness: sequences are ordered by arrival. The oldest running one may pre-empt every other; the policy's first in line
may claim every page that running ones do not hold; a request is accepted only if it fits alone. So the oldest always
ends, and by induction all do.

Source: chunked prefill after Sarathi-Serve, iteration-level scheduling after Orca, both through vLLM v1.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable
from typing import NamedTuple

from manylora.core.adapters.residency import Residency, TierState
from manylora.core.config import MemoryConfig, SchedulerConfig
from manylora.core.costs.online import OnlineCosts, StepLoad
from manylora.core.engine.adapters.cache import AdapterCache
from manylora.core.engine.adapters.cold_starts import ColdStarts
from manylora.core.engine.status import Counters
from manylora.core.engine.steps.budget import StepBudget, target_s
from manylora.core.engine.steps.peak_pages import peak_pages
from manylora.core.events import AdapterAwaited, EventSink, RequestAdmitted, RequestPreempted, RequestSquashed
from manylora.core.memory import Depth, PageCache, num_blocks
from manylora.core.plan import ARRIVING, IN_HOST, ON_DEVICE, Placement
from manylora.core.scheduling import Outcome, Policy, Sequence, SequenceStatus, StepComposition
from manylora.core.types import AdapterKey, AdapterVersion, ColdStart

__all__ = ["RunningSet", "StepDraft"]

_Planned = tuple[Sequence, int]
"""A sequence and its tokens in the step."""


class StepDraft(NamedTuple):
    """A step before its launch.

    Args:
        parts: Sequences, each with its number of tokens, in the order of the batch; empty if nothing can run.
        load: Its size, from which its cost is learned; ``None`` while no cost is asked for.
        is_cold: Whether the weights of any running sequence are elsewhere than in complete pages.
    """

    parts: list[_Planned]
    load: StepLoad | None = None
    is_cold: bool = False


_NOTHING = StepDraft([])


def _placement(residency: Residency, mode: ColdStart, others: Placement | None) -> Placement | None:
    """Return the placement from which a cold sequence may run now, ``None`` if it has to wait.

    The copy to the device must be in flight: without pages for its adapter, its memory would be outside the page
    cache's count. All sequences of an adapter share a placement, that of ``others`` if any run: a step reads an adapter
    from one place.
    """
    if mode is ColdStart.WAIT or residency.device is not TierState.LOADING:
        return None
    if others is not None:
        return others
    if mode is ColdStart.LAYERS:
        return ARRIVING
    return IN_HOST if residency.host is TierState.RESIDENT else None


class RunningSet:
    """Running sequences, oldest arrival first, and the admission of waiting ones from the policy.

    Args:
        policy: The waiting sequences.
        costs: Learns the costs of steps.
        cold_starts: Chooses how a sequence starts whose adapter is not on the device.
        counters: Counts pre-emptions, squashes, prompt tokens and cached tokens.
        on_hit: Called with each sequence that finds its adapter on the device at the first look.
    """

    def __init__(
        self,
        *,
        page_cache: PageCache,
        cache: AdapterCache,
        policy: Policy,
        composition: StepComposition,
        scheduler: SchedulerConfig,
        memory: MemoryConfig,
        costs: OnlineCosts,
        cold_starts: ColdStarts,
        counters: Counters,
        on_hit: Callable[[Sequence], None],
        emit: EventSink,
    ) -> None:
        self._page_cache = page_cache
        self._cache = cache
        self._policy = policy
        self._scheduler = scheduler
        self._memory = memory
        self._costs = costs
        self._cold_starts = cold_starts
        self._counters = counters
        self._composition = composition
        self._on_hit = on_hit
        self._emit = emit
        # A running sequence needs at least one token of every step's budget.
        self._num_seats = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        self._running: list[Sequence] = []
        self._first_in_line: Sequence | None = None  # of the last step, if it was not admitted
        self.admits_at = math.inf  # a sequence that waits for its adapter is to be looked at again then
        self.is_full = False  # a sequence was refused although seats are free, and not for a copy of its adapter

    def __len__(self) -> int:
        return len(self._running)

    def sequences(self) -> list[Sequence]:
        """Return the running sequences, oldest first."""
        return list(self._running)

    def plan(self, now: float, *, is_ahead: bool = False) -> StepDraft:
        """Decide the next step: its sequences, and the tokens of each. Admits and pre-empts for it.

        Args:
            now: In seconds.
            is_ahead: Whether a step is in flight. It may be writing the pages of a sequence, which can then not be
                pre-empted: if one must be, the plan is empty.
        """
        self.admits_at = math.inf
        squashed = self._policy.squash(now)
        if squashed and is_ahead:
            return _NOTHING
        for sequence in squashed:
            self._counters.squashes += 1
            self._emit(RequestSquashed(now, sequence.request.request_id, sequence.num_computed))
            self._send_back(sequence, now)
        if is_ahead and not self._claim_growth(now):
            return _NOTHING
        composition, preemptions = self._composition, self._counters.preemptions
        decodes, prompts, budget = self._plan_running(now)
        is_short = self._counters.preemptions > preemptions  # of memory: admit none in this step
        if not (decodes or prompts) or (composition.may_admit() and not is_short):
            admitted, is_loading = self._admit(budget, now)
            prompts += admitted
            if composition.round_ended(has_admitted=bool(admitted), is_loading=is_loading):
                return _NOTHING
        composition.step_planned()
        parts = composition.beside_prompts(decodes) + prompts if prompts else decodes
        load = self._costs.load_of(parts) if self._costs.is_asked else None
        return StepDraft(parts, load, bool(self._cache.cold))

    def took(self, load: StepLoad | None, seconds: float) -> None:
        """Learn the duration of a step with that load."""
        if load is not None and load.tokens:
            self._costs.observe(load, seconds)

    def stop(self, sequence: Sequence, now: float) -> None:
        """Remove a sequence that ended; release its pages and its adapter."""
        self._take_out(sequence, now)
        self._policy.finish(sequence, now)

    def _take_out(self, sequence: Sequence, now: float) -> None:
        self._running.remove(sequence)
        self._page_cache.release_kv(sequence.table.clear(), now)
        if sequence.adapter is not None:
            self._cache.release(sequence.adapter, now)

    def moved(self, key: AdapterKey, placement: Placement) -> None:
        """Learn that an adapter's weights moved: its sequences read them there from the next step on."""
        for sequence in self._running:
            if sequence.adapter == key:
                sequence.moved(placement)

    def forget(self, sequence: Sequence) -> None:
        """Learn that a sequence ended."""
        if sequence is self._first_in_line:
            self._first_in_line = None
        self._cold_starts.forget(sequence)

    def _budget_after(self, decodes: list[_Planned]) -> StepBudget:
        """Return the budget of the step that is left for prompts."""
        beside = self._composition.beside_prompts(decodes)
        num_tokens = self._scheduler.max_num_batched_tokens - len(beside)
        longest_s = self._scheduler.step_target_s
        if longest_s is None:
            return StepBudget(num_tokens, self._costs)
        self._costs.is_asked = True
        step_s = target_s(longest_s, self._page_cache.num_claimable(Depth.IDLE) / self._page_cache.allocator.num_pages)
        return StepBudget(num_tokens, self._costs, self._costs.load_of(beside), step_s)

    def _plan_running(self, now: float) -> tuple[list[_Planned], list[_Planned], StepBudget]:
        """Return decoding sequences and prompt chunks with their tokens, oldest first, and the remaining budget."""
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
            elif sequence.status is SequenceStatus.RUNNING:  # not pre-empted by an older one in this loop
                has_room = num_tokens <= len(sequence.table.pages) * block_size
                if has_room or self._grow(sequence, now):
                    decodes.append((sequence, 1))
        budget = self._budget_after(decodes)
        for sequence in unfinished:
            if not budget.is_spent and sequence.status is SequenceStatus.RUNNING:
                prompts.append((sequence, self._spend(sequence, budget)))
        return decodes, prompts, budget

    def _spend(self, sequence: Sequence, budget: StepBudget) -> int:
        """Return how many tokens of a prompt go into the step, and subtract them from the budget."""
        room = budget.room_for(sequence)
        if sequence.placement is IN_HOST:
            room = self._cold_starts.room_for(sequence, room)
        num_tokens = self._composition.chunk(sequence.num_to_run, room)
        budget.spend(sequence, num_tokens)
        return num_tokens

    def _grow(self, sequence: Sequence, now: float, *, may_preempt: bool = True) -> bool:
        """Claim a page for a decoding sequence's next token; return whether it can run in this step.

        Idle pages are evicted first, then adapters that waiting requests use (that of the first in line only if it is
        younger). Then younger running sequences are pre-empted, youngest first; at last the sequence itself.
        """
        first = self._first_in_line
        spare = first.adapter if first is not None and first.seq_id < sequence.seq_id else None
        while True:
            pages = self._page_cache.claim_kv(1, now, Depth.WANTED, spare=spare)
            if pages is not None:
                sequence.table.grow(pages)
                return True
            if not may_preempt:
                return False
            youngest = self._running[-1]
            if youngest is sequence and len(self._running) == 1 and self._cache.has_loads:
                return False  # loading adapters hold the pages: they can be claimed once loaded
            self.preempt(youngest, now)
            if youngest is sequence:
                return False

    def _claim_growth(self, now: float) -> bool:
        """Claim an idle page for every decoding sequence that lacks one; return whether all succeeded."""
        block_size = self._memory.block_size
        return all(
            sequence.num_tokens <= len(sequence.table.pages) * block_size
            or sequence.is_ending
            or self._grow(sequence, now, may_preempt=False)
            for sequence in self._running
        )

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Let a running sequence wait again: its pages are for an older one, or its adapter is late."""
        self._counters.preemptions += 1
        self._emit(RequestPreempted(now, sequence.request.request_id, sequence.num_computed))
        self._send_back(sequence, now)

    def _send_back(self, sequence: Sequence, now: float) -> None:
        """Let a running sequence wait again; its tokens are kept, and their KV is computed again."""
        if sequence.adapter is not None:
            self._cache.want(sequence.adapter, now)
        self._take_out(sequence, now)
        sequence.sent_back()
        self._policy.send_back(sequence, now)

    def _admit(self, budget: StepBudget, now: float) -> tuple[list[_Planned], bool]:
        """Admit waiting sequences, in the policy's order, while there are seats and room in the step.

        Returns:
            The admitted ones with their tokens, and whether another was refused because its adapter is loading.
        """
        planned: list[_Planned] = []
        is_loading = lacks_room = False
        self._policy.begin(now)
        while not budget.is_spent and len(self._running) < self._num_seats:
            sequence = self._policy.offer()
            if sequence is None:
                break
            is_first = sequence is self._policy.first_in_line
            outcome = self._try_admit(sequence, now, Depth.WANTED if is_first else Depth.IDLE)
            self._policy.report(sequence, outcome)
            if outcome is Outcome.ADMITTED:
                planned.append((sequence, self._spend(sequence, budget)))
            is_loading |= outcome is Outcome.ADAPTER_LOADING
            lacks_room |= outcome is not Outcome.ADMITTED and outcome is not Outcome.ADAPTER_LOADING
        self.is_full = lacks_room
        first = self._policy.first_in_line
        is_waiting = first is not None and first.status is SequenceStatus.WAITING
        self._first_in_line = first if is_waiting else None
        return planned, is_loading

    def _try_admit(self, sequence: Sequence, now: float, depth: Depth) -> Outcome:
        """Admit a waiting sequence if its adapter is where a step can read it and its KV has room."""
        if self._scheduler.reserve_output == "peak" and not self._fits_at_peak(sequence):
            return Outcome.NO_PAGES
        placement, was_resident = ON_DEVICE, True
        if (version := sequence.version) is not None:
            if self._is_capped(sequence):
                self._cold_starts.held_up(sequence)
                return Outcome.ADAPTER_CAP
            residency = self._cache.residency(version.key)
            is_resident = residency.device is TierState.RESIDENT
            if sequence.looked_at(is_resident=is_resident) and is_resident:
                self._on_hit(sequence)
            was_resident = sequence.found_resident
            if not is_resident:
                cold = self._start_cold(sequence, version, residency, now, depth)
                if isinstance(cold, Outcome):
                    return cold
                placement = cold
        shared: list[int] = []
        if self._memory.prefix_caching:
            shared = sequence.table.match(sequence.tokens, self._page_cache.prefix, sequence.num_reusable)
        num_missing = num_blocks(sequence.num_tokens_to_hold, self._memory.block_size) - len(shared)
        pages = self._page_cache.claim_kv(num_missing, now, depth, spare=sequence.adapter, shared=shared)
        if pages is None:
            self._cold_starts.held_up(sequence)
            return Outcome.NO_PAGES
        if sequence.admitted(now, shared=shared, pages=pages, placement=placement):
            self._note_admission(sequence, now, was_resident)
        insort(self._running, sequence, key=lambda other: other.seq_id)
        if sequence.adapter is not None:
            self._cache.hold(sequence.adapter, now, placement)
            self._cache.unwant(sequence.adapter, now)
        return Outcome.ADMITTED

    def _fits_at_peak(self, sequence: Sequence) -> bool:
        """Whether all running sequences and this one can run to their longest answers, their adapters beside them."""
        if not self._running:
            return True  # alone it fits, or it would have been refused on arrival
        together = [*self._running, sequence]
        adapters = {one.adapter: one.num_adapter_pages for one in together}
        # The last token needs no KV.
        lengths = ((one.num_tokens, max(0, one.max_tokens - one.num_output_tokens - 1)) for one in together)
        num_pages = self._page_cache.allocator.num_pages - sum(adapters.values())
        return peak_pages(lengths, self._memory.block_size) <= num_pages

    def _start_cold(
        self, sequence: Sequence, version: AdapterVersion, residency: Residency, now: float, depth: Depth
    ) -> Placement | Outcome:
        """Bring up an adapter; return the place from which its sequence may run meanwhile, or why it has to wait."""
        mode = self._cold_starts.mode(sequence, residency, self._running, now)
        self._cache.ensure(version, now, depth, at_once=mode is ColdStart.LAYERS)
        placement = _placement(residency, mode, self._cache.cold.get(version.key))
        if placement is ARRIVING and (begins_at := self._cold_starts.begins_at(sequence)) > now:
            self.admits_at = min(self.admits_at, begins_at)
            placement = None
        if placement is not None:
            return placement
        if not residency.is_loading:
            self._cold_starts.held_up(sequence)
            return Outcome.ADAPTER_NO_PAGES
        self._note_wait(sequence, version.key, now, depth)
        return Outcome.ADAPTER_LOADING

    def _note_admission(self, sequence: Sequence, now: float, was_resident: bool) -> None:
        """Count and report the first admission of a sequence."""
        self._counters.prompt_tokens += sequence.num_prompt_tokens
        self._counters.cached_tokens += sequence.num_cached
        waited_s = now - sequence.arrived_at
        request_id, num_cached = sequence.request.request_id, sequence.num_cached
        self._emit(RequestAdmitted(now, request_id, sequence.adapter, waited_s, num_cached, was_resident))

    def _note_wait(self, sequence: Sequence, adapter: AdapterKey, now: float, depth: Depth) -> None:
        """Report, once per load, that a sequence waits only for that load.

        Its pages in the prefix cache are not counted: a wait can be missed, but every reported one is real.
        """
        load = self._cache.residency(adapter).num_loads
        if sequence.awaited_load == load:
            return
        if num_blocks(sequence.num_tokens_to_hold, self._memory.block_size) <= self._page_cache.num_claimable(depth):
            sequence.awaited(load)
            self._emit(AdapterAwaited(now, sequence.request.request_id, adapter))

    def _is_capped(self, sequence: Sequence) -> bool:
        """Whether its adapter would exceed the limit of distinct adapters that run."""
        cap = self._scheduler.max_loras
        if cap is None or sequence.adapter is None:
            return False
        return self._cache.num_active >= cap and not self._cache.residency(sequence.adapter).num_running
