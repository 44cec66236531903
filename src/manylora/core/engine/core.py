"""The engine core: decides each step; no tensor, clock or socket is needed.

A turn is *collect* completed work, then *launch* the next step:

::

    add_request --> waiting --(policy offers, core admits)--> running --> finished
                       ^                                         |
                       +------------- pre-empted ----------------+

It connects the parts, which are made in the order of their dependencies: ``core/memory/cache.py`` owns every page,
``adapters/`` knows, moves and names the weights of adapters, ``steps/`` plans steps and holds those in flight,
``acceptance.py`` makes sequences of requests, and ``answers.py`` delivers tokens and ends requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import replace

from manylora.core.config import EngineConfig
from manylora.core.costs.online import OnlineCosts, StepLoad
from manylora.core.costs.rank_fit import RankFit
from manylora.core.engine.acceptance import Acceptance, arrival_of
from manylora.core.engine.adapters.cache import AdapterCache
from manylora.core.engine.adapters.catalog import AdapterCatalog
from manylora.core.engine.adapters.cold_starts import ColdStarts
from manylora.core.engine.adapters.loader import make_loader
from manylora.core.engine.adapters.prefetch import Prefetcher
from manylora.core.engine.adapters.registry import AdapterRegistry
from manylora.core.engine.answers import Answers
from manylora.core.engine.queue_wait import QueueWait
from manylora.core.engine.snapshot import check_integrity, take_snapshot
from manylora.core.engine.status import EngineStats, Telemetry
from manylora.core.engine.steps.admission import Admission
from manylora.core.engine.steps.plan_ahead import Step, StepsInFlight
from manylora.core.engine.steps.planner import StepPlanner
from manylora.core.engine.steps.running import LateSequences, RunningSet
from manylora.core.errors import RequestError
from manylora.core.events import EventSink, StepFinished, StepLaunched, TokensEmitted
from manylora.core.memory import Depth, PageCache, ReloadCosts
from manylora.core.plan import ON_DEVICE, StepPlan, StepResult
from manylora.core.ports import CoreParts
from manylora.core.scheduling import (
    LengthPredictor,
    Policy,
    PolicyContext,
    Sequence,
    SequenceStatus,
    make_policy,
    make_predictor,
    make_step_composition,
)
from manylora.core.types import FinishReason, Output, Request, Tier

__all__ = ["EngineCore"]


class EngineCore:
    """One replica's scheduler, cache and memory; its parts are live or simulated.

    Options of the model in ``config`` are not read. ``served_name`` is the base's name in requests. Sinks receive every
    event, in order. The predictor is by default the one that ``config`` names. ``ConfigError`` if no policy or
    predictor has the given name, or the executor cannot do the cold starts asked for.
    """

    def __init__(
        self,
        parts: CoreParts,
        config: EngineConfig,
        *,
        served_name: str = "base",
        sinks: Seq[EventSink] = (),
        predictor: LengthPredictor | None = None,
    ) -> None:
        if parts.base.state_bytes:  # the state behind a prefix is not kept
            config = replace(config, memory=replace(config.memory, prefix_caching=False))
        scheduler, memory, adapters = config.scheduler, config.memory, config.adapters
        num_pages, executor = parts.num_pages, parts.executor
        self._base_weights = parts.base_weights
        self._executor = executor
        self._prefix_caching, self._block_size = memory.prefix_caching, memory.block_size
        self._sequences: dict[str, Sequence] = {}  # by request id: waiting and running
        self._telemetry = telemetry = Telemetry(sinks)
        self._costs = costs = ReloadCosts()
        self._step_costs, self._rank_fit = OnlineCosts(), RankFit()
        predictor = predictor or make_predictor(scheduler, config.seed)
        composition = make_step_composition(scheduler.step_composition)

        self._registry = registry = AdapterRegistry(served_name, adapters.max_registered)
        self.page_cache, self._cache, self._loader = page_cache, cache, loader = make_loader(
            executor,
            adapters,
            costs,
            telemetry,
            num_pages=num_pages,
            block_size=memory.block_size,
            host_bytes=parts.host_bytes,
            is_pinned=registry.is_pinned,
        )
        self._cold_starts = ColdStarts(parts, config, cache, loader.loads, costs, telemetry.emit)

        self._policy = policy = _make_policy(parts, config, predictor, page_cache, cache, self._step_costs)
        self._running = running = RunningSet(page_cache, cache, loader.loads, policy, telemetry)
        self._late = LateSequences(running, cache)
        self._admission = Admission(config, running, page_cache, cache, loader, self._cold_starts, registry, telemetry)
        self._planner = StepPlanner(
            config, running, self._admission, page_cache, policy, composition, self._step_costs, self._cold_starts
        )
        plans_ahead = parts.is_accelerated if scheduler.plan_ahead is None else scheduler.plan_ahead
        self._steps = StepsInFlight(costs.step, plans_ahead=plans_ahead)
        self._prefetcher = Prefetcher(adapters, cache, loader, page_cache, policy, composition, telemetry.counters)

        self.adapters = AdapterCatalog(config, registry, cache, loader, num_pages, self._sequences, self._prefetcher)
        self.queue_wait = QueueWait(scheduler, predictor, self._sequences, policy, running)
        self._acceptance = Acceptance(parts, config, self.adapters, self.queue_wait)
        self._answers = Answers(
            self._sequences, running, policy, cache, self._cold_starts, predictor, self.queue_wait, telemetry
        )

    # -- requests ----------------------------------------------------------------------------------------------------

    @property
    def has_requests(self) -> bool:
        """Whether any request waits, runs, or has output to collect."""
        return bool(self._sequences or self._answers.outputs)

    @property
    def has_pending_work(self) -> bool:
        """Whether a step or a load is in flight."""
        return bool(self._steps.in_flight or self._loader.loads.in_flight)

    def add_request(self, request: Request, now: float) -> None:
        """Accept a request.

        ``ModelNotFound`` if neither the base nor an adapter has that name; ``AdapterReplaced`` if the request is the
        rest of an answer of an adapter version that is not here; ``RequestError`` if the request can never be served:
        empty, unknown tokens, or too long for the model or the pool; ``CapacityError`` if too many requests wait, or it
        would wait for too long (429).
        """
        if request.request_id in self._sequences:
            raise RequestError(f"Got request_id = {request.request_id!r}, which is in flight", param="request_id")
        sequence = self._acceptance.accept(request, now)
        self._sequences[request.request_id] = sequence
        if sequence.has_unscored:
            self._answers.reports[sequence.seq_id] = []
        if sequence.adapter is not None:
            self._registry.note_request(sequence.name)
            self._telemetry.counters.num_adapter_requests += 1
            self._telemetry.counters.num_not_activated += sequence.activates_at > sequence.num_prompt_tokens
            self._cache.ask(sequence.adapter, now, request.tenant)
            self._prefetcher.asked(sequence.adapter, now)
        self._policy.add(sequence, now)
        self.queue_wait.added(sequence)
        self._telemetry.emit(arrival_of(sequence))

    def cancel(self, request_id: str, now: float, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """End a request for a reason; its last output follows. Return whether it was in flight."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        if sequence.num_in_flight:
            sequence.cancelled(reason)  # the device may be writing its pages: it ends with the step
        else:
            self._answers.finish(sequence, reason, now)
        return True

    # -- one turn: collect -------------------------------------------------------------------------------------------

    def collect(self, now: float) -> list[Output]:
        """Process completed work; return the outputs of requests since the last call.

        ``Exception`` if the device failed in a step; the engine is lost.
        """
        if self._loader.loads.in_flight:
            ended = self._loader.poll(now)
            for key in ended.arrived:
                self._running.moved(key, ON_DEVICE)
            for key, error in ended.failed:
                self._answers.fail_adapter(key, error, now)
        while self._steps.in_flight and (completed := self._steps.take_completed(now)) is not None:
            self._process(*completed, now)
            self._steps.begin_next(now)
        return self._answers.take() if self._answers.outputs else []

    def _process(self, step: Step, result: StepResult, now: float) -> None:
        """Append each sequence's token of a step, then end the finished sequences.

        A sequence that failed or was late in the step, or in the one before it, has no token.
        """
        for sequence in step.sequences if result.failed else ():
            if (reason := result.failed.get(sequence.seq_id)) is not None:
                sequence.failed(reason, is_refused=sequence.seq_id in result.refused)
        for sequence in self._late.add(step.sequences, result.late) if result.late else ():
            self._cold_starts.was_late(sequence, now)
            self._answers.report_again(sequence)
        answered = self._append_tokens(step, result, now)
        if self._cold_starts.choices:
            self._cold_starts.took_token(answered, now)
        if self._answers.reports:
            self._answers.report_prompts(result, answered)
        if answered and self._telemetry.has_sinks:
            self._telemetry.emit(TokensEmitted(now, tuple([sequence.request.request_id for sequence in answered])))
        tokens, add_token = result.tokens, self._answers.add_token
        for sequence in step.sequences:
            if not sequence.runs_until and sequence.status is SequenceStatus.FINISHED:
                self._running.stop(sequence, now)  # it ended while this step ran
            elif not sequence.runs_until and sequence.ending is not None:
                self._answers.finish(sequence, sequence.ending, now)
            elif (token := tokens.get(sequence.seq_id)) is not None:
                add_token(sequence, token, now)
        if self._late.sequences:
            self._late.send_back(now)
        self._learn(step, result, now)

    def _append_tokens(self, step: Step, result: StepResult, now: float) -> list[Sequence]:
        """Append the tokens of a step and index full blocks; return the sequences that got a token."""
        prefix, tokens = self.page_cache.prefix, result.tokens
        is_sound = not (step.is_cold or result.failed or self._late.sequences)
        answered: list[Sequence] = []
        token_s = (now - step.began_at) / step.num_tokens
        for part, sequence in zip(step.plan.sequences, step.sequences, strict=True):
            num_tokens, table = part.num_tokens, sequence.table
            if not part.is_sampled:
                sequence.took_chunk(num_tokens * token_s)
            elif (token := tokens.get(part.seq_id)) is None:
                sequence.took_nothing(num_tokens * token_s)
            elif sequence.took_token(token.token_id, num_tokens * token_s, now):
                answered.append(sequence)
            if (num_computed := part.start + num_tokens) < table.full_at or not self._prefix_caching:
                continue
            if sequence.status is not SequenceStatus.FINISHED and (is_sound or sequence.has_sound_kv):
                table.index_computed(sequence.tokens, num_computed, prefix)
        self._telemetry.counters.num_generated_tokens += len(answered)
        return answered

    def _learn(self, step: Step, result: StepResult, now: float) -> None:
        """Count and report a step, and learn its duration unless it waited for adapters."""
        self._telemetry.counters.num_steps += 1
        took_s = now - step.began_at
        if self.queue_wait.predicts:
            self.queue_wait.stepped(step.began_at, now)
        if not step.is_cold or self._cold_starts.learn_step(step.plan, step.num_tokens, took_s, result):
            self._costs.step.observe(step.num_tokens, took_s)
            if step.load is not None and self._step_costs.is_asked:
                self._step_costs.observe(step.load, took_s)
            if step.load is not None and step.is_fitted:
                self._rank_fit.observe(step.load, took_s)
        self._telemetry.emit(StepFinished(now, step.plan.step_id, took_s, len(step.sequences), step.num_tokens))

    # -- one turn: launch --------------------------------------------------------------------------------------------

    def launch(self, now: float) -> None:
        """Start the next step, prefetches and background reads."""
        is_busy = bool(self._sequences)
        if (is_busy or self._steps.in_flight) and self._steps.may_plan(now):
            self._launch_step(now)
        self._prefetcher.launch(now, is_busy=is_busy)

    def _launch_step(self, now: float) -> None:
        """Plan and start the next step, behind the one in flight if there is one, if any sequence can run."""
        num_ahead = len(self._steps.in_flight)
        self._steps.planning()
        if not self._sequences:
            return
        decodes, prompts = self._planner.plan(now, is_ahead=num_ahead > 0)
        if not (decodes or prompts):
            return
        is_fitted = self._rank_fit.is_due()
        load = StepLoad.of(decodes, prompts) if is_fitted or self._step_costs.is_asked else None
        sequences = [*decodes, *[sequence for sequence, _ in prompts]]
        num_tokens = len(decodes) + sum([num for _, num in prompts])
        prompt_rows = self._answers.plan_reports(prompts) if self._answers.reports else ()
        parts = [sequence.launched(1) for sequence in decodes]
        parts += [sequence.launched(num) for sequence, num in prompts]
        plan = StepPlan(
            step_id=self._telemetry.counters.num_steps + num_ahead,
            prompt_rows=prompt_rows,
            sequences=tuple(parts),
            released=self._answers.take_released(),
        )
        work, is_cold = self._executor.launch(plan, now), bool(self._cache.cold)
        self._steps.launched(Step(plan, sequences, num_tokens, load, is_fitted, work, now, is_cold), now)
        if self._telemetry.has_sinks:
            num_adapters = len({sequence.adapter for sequence in sequences} - {None})
            self._telemetry.emit(StepLaunched(now, plan.step_id, len(sequences), num_tokens, num_adapters))

    def next_event_at(self) -> float:
        """Return the next time at which work completes or a step is to be planned; infinite if unknown."""
        loaded_at = self._loader.next_event_at() if self._loader.loads.in_flight else math.inf
        if self._steps.in_flight:
            return min(self._steps.next_event_at(), loaded_at)
        return min(self._admission.again_at, loaded_at) if self._sequences else loaded_at

    # -- its state ---------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Return gauges and counters."""
        return take_snapshot(
            sequences=self._sequences.values(),
            num_running=len(self._running.sequences),
            policy=self._policy,
            allocator=self.page_cache.allocator,
            registry=self._registry,
            cache=self._cache,
            num_loading=len(self._loader.loads.to(Tier.DEVICE)),
            counters=self._telemetry.counters,
            cold_starts=self._cold_starts.statuses(),
            fits=self._rank_fit.fits(),
            base_weights=self._base_weights,
        )

    def check_integrity(self) -> None:
        """Assert that memory, references and queues agree; slow, for tests and soak runs."""
        check_integrity(
            sequences=self._sequences.values(),
            running=self._running.sequences,
            num_waiting=len(self._policy),
            plans=[step.plan for step in self._steps.in_flight],
            page_cache=self.page_cache,
            cache=self._cache,
            block_size=self._block_size,
        )


def _make_policy(
    parts: CoreParts,
    config: EngineConfig,
    predictor: LengthPredictor,
    page_cache: PageCache,
    cache: AdapterCache,
    costs: OnlineCosts,
) -> Policy:
    """Return the scheduling policy, with its view of the other parts."""
    context = PolicyContext(
        config=config.scheduler,
        num_pages=parts.num_pages,
        block_size=config.memory.block_size,
        predictor=predictor,
        nearness=cache.nearness,
        num_claimable_pages=lambda is_first: page_cache.num_claimable(Depth.WANTED if is_first else Depth.IDLE),
        prompt_s=costs.prompt_s,
    )
    return make_policy(config.scheduler.policy, context)
