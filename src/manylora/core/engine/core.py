"""The engine core: decides each step; no tensor, clock or socket is needed.

A turn is *collect* completed work, then *launch* the next step:

::

    add_request --> waiting --(policy offers, core admits)--> running --> finished
                       ^                                         |
                       +------------- pre-empted ----------------+

It connects the parts: ``acceptance.py`` makes sequences of requests, ``steps/running.py`` plans steps,
``steps/in_flight.py`` holds those in flight, ``answers.py`` delivers tokens and ends requests, ``adapters/cache.py``
moves weights, ``adapters/catalog.py`` has the operations on adapters by name, ``core/memory/cache.py`` owns every page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from manylora.core.adapters.registry import AdapterRegistry
from manylora.core.adapters.residency import TierState
from manylora.core.adapters.shape import BaseShape
from manylora.core.config import AdapterConfig, MemoryConfig, SchedulerConfig
from manylora.core.costs.online import OnlineCosts
from manylora.core.costs.rank_fit import RankFit, RankLoad
from manylora.core.engine.acceptance import Acceptance, arrival_of
from manylora.core.engine.adapters.cache import AdapterCache
from manylora.core.engine.adapters.catalog import AdapterCatalog
from manylora.core.engine.adapters.cold_starts import ColdStarts, possible_modes
from manylora.core.engine.adapters.prefetch import Prefetcher
from manylora.core.engine.answers import Answers
from manylora.core.engine.integrity import check_integrity
from manylora.core.engine.prompt_logprobs import PromptReports
from manylora.core.engine.queue_wait import QueueWait
from manylora.core.engine.snapshot import take_snapshot
from manylora.core.engine.status import Counters, EngineStats
from manylora.core.engine.steps.in_flight import Step, StepsInFlight
from manylora.core.engine.steps.late_sequences import LateSequences
from manylora.core.engine.steps.running import RunningSet
from manylora.core.errors import CapacityError, RequestError
from manylora.core.events import Event, EventSink, PrefixEvicted, StepFinished, StepLaunched, TokensEmitted
from manylora.core.memory import Depth, PageCache, ReloadCosts, make_eviction_policy
from manylora.core.plan import ON_DEVICE, StepPlan, StepResult
from manylora.core.ports import Executor
from manylora.core.scheduling import (
    LengthPredictor,
    Nearness,
    PolicyContext,
    Sequence,
    SequenceStatus,
    make_policy,
    make_predictor,
    make_step_composition,
)
from manylora.core.types import FinishReason, Output, Request

__all__ = ["EngineCore"]


class EngineCore:
    """One replica's scheduler, cache and memory.

    Args:
        num_pages: Pages in the pool.
        executor: Runs steps and loads.
        served_name: Name of the base model in requests.
        seed: Seeds the sampling of requests without a seed.
        sinks: Receive every event, in order.
        predictor: Predicts answer lengths; by default the one that ``scheduler`` names.
        reads_host: Whether the executor can read an adapter's weights from the host tier.
        waits_by_layer: Whether it can run a step on an adapter that is on its way.
        is_accelerated: Whether steps run on a device beside the CPU.

    Raises:
        ConfigError: No policy or predictor has the given name, or the executor cannot do the cold starts asked for.
    """

    def __init__(
        self,
        *,
        base: BaseShape,
        num_pages: int,
        executor: Executor,
        scheduler: SchedulerConfig,
        memory: MemoryConfig,
        adapters: AdapterConfig,
        served_name: str,
        seed: int = 0,
        sinks: Seq[EventSink] = (),
        predictor: LengthPredictor | None = None,
        reads_host: bool = False,
        waits_by_layer: bool = False,
        is_accelerated: bool = False,
    ) -> None:
        self._executor = executor
        self._memory = memory
        self._sinks = tuple(sinks)
        self._registry = AdapterRegistry(served_name, adapters.max_registered)
        self._costs = ReloadCosts()
        self._counters = Counters()
        self.page_cache = PageCache(
            num_pages,
            base.page.num_bytes,
            memory.block_size,
            policy=make_eviction_policy(adapters.eviction, self._costs, adapters.eviction_options),
            on_adapter_dropped=lambda key, now: self._cache.on_dropped(key, now),
            on_prefix_dropped=self._on_prefix_dropped,
        )
        self._cache = AdapterCache(
            page_cache=self.page_cache,
            executor=executor,
            config=adapters,
            costs=self._costs,
            is_pinned=self._registry.is_pinned,
            emit=self._emit,
            on_arrived=lambda key: self._running.moved(key, ON_DEVICE),
        )
        self.adapters = AdapterCatalog(
            registry=self._registry,
            cache=self._cache,
            num_pages=num_pages,
            max_pages=adapters.most_pages(num_pages),
            block_size=memory.block_size,
            in_flight=lambda: list(self._sequences.values()),
            on_unread=lambda version: self._prefetcher.add_unread(version),
        )
        predictor = predictor or make_predictor(scheduler, seed)
        costs = OnlineCosts()
        self._rank_fit = RankFit()
        self._policy = make_policy(
            scheduler.policy,
            PolicyContext(
                config=scheduler,
                num_pages=num_pages,
                block_size=memory.block_size,
                predictor=predictor,
                nearness=self._nearness,
                num_claimable_pages=lambda is_first: self.page_cache.num_claimable(
                    Depth.WANTED if is_first else Depth.IDLE
                ),
                prompt_s=costs.prompt_s,
            ),
        )
        self._cold_starts = ColdStarts(
            mode=adapters.cold_start,
            possible=possible_modes(reads_host=reads_host, waits_by_layer=waits_by_layer),
            cache=self._cache,
            costs=self._costs,
            is_accelerated=is_accelerated,
            num_layers=base.num_layers,
            max_step_tokens=scheduler.max_num_batched_tokens,
            emit=self._emit,
        )
        composition = make_step_composition(scheduler.step_composition)
        self._running = RunningSet(
            page_cache=self.page_cache,
            cache=self._cache,
            policy=self._policy,
            composition=composition,
            scheduler=scheduler,
            memory=memory,
            costs=costs,
            cold_starts=self._cold_starts,
            counters=self._counters,
            on_hit=self._on_adapter_hit,
            emit=self._emit,
        )
        self._prefetcher = Prefetcher(
            cache=self._cache,
            page_cache=self.page_cache,
            policy=self._policy,
            composition=composition,
            config=adapters,
            block_size=memory.block_size,
        )
        self._steps = StepsInFlight(self._costs, plans_ahead=bool(scheduler.plan_ahead))
        self._sequences: dict[str, Sequence] = {}  # by request id: waiting and running
        self._reports = PromptReports()
        self._given_up = LateSequences(
            running=self._running, cache=self._cache, cold_starts=self._cold_starts, reports=self._reports
        )
        self._queue_wait = QueueWait(
            scheduler=scheduler,
            predictor=predictor,
            sequences=self._sequences,
            is_full=lambda: self._running.is_full,
        )
        self._acceptance = Acceptance(
            base=base,
            served_name=served_name,
            adapters=self.adapters,
            check_room=self._check_room,
            num_pages=num_pages,
            block_size=memory.block_size,
            scheduler=scheduler,
            seed=seed,
        )
        self._answers = Answers(
            sequences=self._sequences,
            reports=self._reports,
            running=self._running,
            policy=self._policy,
            cache=self._cache,
            predictor=predictor,
            queue_wait=self._queue_wait,
            counters=self._counters,
            emit=self._emit,
        )

    # -- requests ----------------------------------------------------------------------------------------------------

    @property
    def has_requests(self) -> bool:
        """Whether any request waits, runs, or has output to collect."""
        return bool(self._sequences or self._answers)

    @property
    def has_pending_work(self) -> bool:
        """Whether a step or a load is in flight."""
        return bool(self._steps) or self._cache.has_loads

    def add_request(self, request: Request, now: float) -> None:
        """Accept a request.

        Raises:
            ModelNotFound: Neither the base nor an adapter has that name.
            AdapterReplaced: It is the rest of an answer of an adapter version that is not here.
            RequestError: It can never be served: empty, unknown tokens, or too long for the model or the pool.
            CapacityError: Too many requests wait, or it would wait for too long (429).
        """
        if request.request_id in self._sequences:
            raise RequestError(f"Got request_id = {request.request_id!r}, which is in flight", param="request_id")
        sequence = self._acceptance.accept(request, now)
        self._sequences[request.request_id] = sequence
        self._reports.add(sequence)
        if sequence.adapter is not None:
            self._registry.note_request(sequence.name)
            self._counters.adapter_requests += 1
            self._cache.ask(sequence.adapter, now)
            self._prefetcher.asked(sequence.adapter, now)
        self._policy.add(sequence, now)
        self._queue_wait.added(sequence)
        self._emit(arrival_of(sequence))

    def num_room(self) -> int:
        """Return how many more requests of the mean length would be accepted now."""
        return self._queue_wait.num_room(len(self._policy))

    def no_room(self, now: float) -> CapacityError:
        """Return the error of a request that is refused for the length of the queue."""
        num_waiting = len(self._policy)
        reason, every_s = self._queue_wait.reason(num_waiting), self._answers.every_s(now)
        return CapacityError(reason, retry_after_s=min(60.0, every_s * num_waiting / 2), every_s=every_s)

    def _check_room(self, now: float) -> None:
        if not self._queue_wait.has_room(len(self._policy)):
            raise self.no_room(now)

    def cancel(self, request_id: str, now: float) -> bool:
        """End a request; its last output follows. Return whether it was in flight."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        if sequence.num_in_flight:
            sequence.cancelled()  # the device may be writing its pages: it ends with the step
        else:
            self._answers.finish(sequence, FinishReason.CANCELLED, now)
        return True

    # -- one turn: collect -------------------------------------------------------------------------------------------

    def collect(self, now: float) -> list[Output]:
        """Process completed work; return the outputs of requests since the last call.

        Raises:
            Exception: The device failed in a step; the engine is lost.
        """
        for key, error in self._cache.poll(now):
            self._answers.fail_adapter(key, error, now)
        while (completed := self._steps.take_completed(now)) is not None:
            self._process(*completed, now)
            self._steps.begin_next(now)
        return self._answers.take()

    def _process(self, step: Step, result: StepResult, now: float) -> None:
        """Append each sequence's token of a step, then end the finished sequences.

        A sequence that failed or was given up in the step, or in the one before it, has no token.
        """
        prefix_caching, tokens, answer = self._memory.prefix_caching, result.tokens, self._answers.token
        for sequence in step.sequences if result.failed else ():
            if (reason := result.failed.get(sequence.seq_id)) is not None:
                sequence.failed(reason, is_refused=sequence.seq_id in result.refused)
        if result.late:
            self._given_up.add(step.sequences, result.late, now)
        served: list[Sequence] = []
        is_warm = not step.is_cold
        is_sound = is_warm and not result.failed and not self._given_up
        for part, sequence in zip(step.plan.sequences, step.sequences, strict=True):
            if not part.is_sampled:
                sequence.took_chunk()
            elif (token := tokens.get(part.seq_id)) is None:
                sequence.took_nothing()
            elif sequence.took_token(token.token_id, now):
                served.append(sequence)
            if not prefix_caching or sequence.status is SequenceStatus.FINISHED:
                continue
            if is_sound or sequence.has_sound_kv:
                sequence.table.index_computed(sequence.tokens, part.start + part.num_tokens, self.page_cache.prefix)
        self._counters.generated_tokens += len(served)
        if self._cold_starts.is_awaiting:
            self._cold_starts.took_token(served, now)
        if self._reports:
            self._answers.report_prompts(result, served)
        if served and self._sinks:
            self._emit(TokensEmitted(now, tuple([sequence.request.request_id for sequence in served])))
        for part, sequence in zip(step.plan.sequences, step.sequences, strict=True):
            if sequence.status is SequenceStatus.FINISHED:
                self._running.stop(sequence, now)  # it ended while this step ran
            elif sequence.ending is not None:
                self._answers.finish(sequence, sequence.ending, now)
            elif (token := tokens.get(part.seq_id)) is not None:
                answer(sequence, token, now)
        if self._given_up:
            self._given_up.send_back(now)
        self._counters.steps += 1
        took_s = now - step.began_at
        self._queue_wait.stepped(step.began_at, now)
        if is_warm or self._cold_starts.learn_step(step.plan, step.num_tokens, took_s, result.cpu_share):
            self._costs.step.observe(step.num_tokens, took_s)
            self._running.took(step.load, took_s)
            if step.rank_load is not None:
                self._rank_fit.observe(step.rank_load, took_s)
        self._emit(StepFinished(now, step.plan.step_id, took_s, len(step.sequences), step.num_tokens))

    # -- one turn: launch --------------------------------------------------------------------------------------------

    def launch(self, now: float) -> None:
        """Start the next step, prefetches and background reads."""
        if self._steps.may_plan(now):
            self._launch_step(now)
        self._prefetcher.launch(now, is_busy=bool(self._sequences))

    def _launch_step(self, now: float) -> None:
        """Plan and start the next step, behind the one in flight if there is one, if any sequence can run."""
        num_ahead = len(self._steps)
        self._steps.planning()
        if not self._sequences:
            return
        draft = self._running.plan(now, is_ahead=num_ahead > 0)
        if not draft.parts:
            return
        sequences = [sequence for sequence, _ in draft.parts]
        num_tokens = sum([num_tokens for _, num_tokens in draft.parts])
        plan = StepPlan(
            step_id=self._counters.steps + num_ahead,
            prompt_rows=self._reports.plan(draft.parts) if self._reports else (),  # before the launches below
            sequences=tuple([sequence.launched(num_tokens) for sequence, num_tokens in draft.parts]),
            released=self._answers.take_released(),
        )
        rank_load = RankLoad.of(draft.parts) if self._rank_fit.is_due() else None
        work = self._executor.launch(plan, now)
        self._steps.launched(Step(plan, sequences, num_tokens, draft.load, rank_load, work, now, draft.is_cold), now)
        if self._sinks:
            num_adapters = len({sequence.adapter for sequence in sequences} - {None})
            self._emit(StepLaunched(now, plan.step_id, len(sequences), num_tokens, num_adapters))

    def next_event_at(self) -> float:
        """Return the next time at which work completes or a step is to be planned; infinite if unknown."""
        admits_at = self._running.admits_at if self._sequences and not self._steps else math.inf
        return min(self._steps.next_event_at(), self._cache.next_event_at(), admits_at)

    # -- its state ---------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Return gauges and counters."""
        return take_snapshot(
            running=self._running,
            policy=self._policy,
            allocator=self.page_cache.allocator,
            registry=self._registry,
            cache=self._cache,
            sequences=self._sequences.values(),
            prefetcher=self._prefetcher,
            cold_starts=self._cold_starts,
            counters=self._counters,
            fits=self._rank_fit.fits(),
        )

    def check_integrity(self) -> None:
        """Assert that memory, references and queues agree; slow, for tests and soak runs."""
        check_integrity(
            sequences=self._sequences.values(),
            running=self._running.sequences(),
            num_waiting=len(self._policy),
            plans=self._steps.plans(),
            page_cache=self.page_cache,
            cache=self._cache,
            block_size=self._memory.block_size,
        )

    def _nearness(self, sequence: Sequence) -> Nearness:
        """Return the distance of a sequence's adapter to the device."""
        if sequence.adapter is None:
            return Nearness.DEVICE
        residency = self._cache.residency(sequence.adapter)
        if residency.device is TierState.RESIDENT:
            return Nearness.DEVICE
        if residency.device is TierState.LOADING:
            return Nearness.LOADING
        return Nearness.HOST if residency.host is TierState.RESIDENT else Nearness.DISK

    def _on_adapter_hit(self, sequence: Sequence) -> None:
        self._counters.adapter_hits += 1
        self._registry.note_hit(sequence.name)

    def _on_prefix_dropped(self, num_pages: int, now: float) -> None:
        self._counters.prefix_evictions += num_pages
        self._emit(PrefixEvicted(now, num_pages))

    def _emit(self, event: Event) -> None:
        for sink in self._sinks:
            sink(event)
