"""The engine core: decides each step, and knows no tensor, no clock and no socket.

A turn is *collect* what completed, then *launch* the next step:

::

    add_request --> waiting --(policy offers, core admits)--> running --> finished
                       ^                                         |
                       +------------- pre-empted ----------------+

It holds the pieces together: ``running.py`` plans steps, ``adapter_cache.py`` moves weights, ``catalog.py`` is
what people do to adapters by name, ``memory/cache.py`` owns every page.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from manylora.adapters.registry import AdapterRegistry
from manylora.adapters.residency import Residency, TierState
from manylora.adapters.shape import BaseShape
from manylora.config import AdapterConfig, EngineConfig, MemoryConfig, SchedulerConfig
from manylora.costs.online import OnlineCosts, StepLoad
from manylora.engine.adapter_cache import AdapterCache
from manylora.engine.catalog import AdapterCatalog
from manylora.engine.integrity import check_integrity
from manylora.engine.limits import RequestLimits
from manylora.engine.plan_ahead import plan_at
from manylora.engine.prefetch import Prefetcher
from manylora.engine.running import RunningSet
from manylora.engine.status import EngineStats
from manylora.errors import CapacityError, RequestError
from manylora.events import (
    Event,
    EventSink,
    PrefixEvicted,
    RequestArrived,
    RequestFinished,
    StepFinished,
    StepLaunched,
    TokensEmitted,
)
from manylora.memory import (
    BlockTable,
    Depth,
    Owner,
    PageCache,
    ReloadCosts,
    make_eviction_policy,
    prefix_root,
)
from manylora.plan import PlannedSequence, StepPlan, StepResult
from manylora.ports import EngineParts, Executor, Work
from manylora.scheduling import (
    LengthPredictor,
    Nearness,
    PolicyContext,
    Sequence,
    SequenceStatus,
    make_policy,
    make_predictor,
)
from manylora.types import FinishReason, Output, Request, SampledToken

__all__ = ["EngineCore"]

FINISH_WINDOW = 64
"""Finished requests over which the rate of finishing is taken, for Retry-After."""


@dataclass(slots=True)
class _Step:
    plan: StepPlan
    sequences: tuple[Sequence, ...]
    work: Work
    load: StepLoad | None
    began_at: float
    """When it was launched, or the step before it was taken in."""


@dataclass(slots=True)
class _Counters:
    prefix_evictions: int = 0
    steps: int = 0
    generated_tokens: int = 0
    adapter_requests: int = 0
    adapter_hits: int = 0


class EngineCore:
    """One replica's scheduler, cache and memory.

    Args:
        base: The base model's shape.
        num_pages: Pages in the pool.
        executor: Carries steps and loads out.
        scheduler: What a step may hold.
        memory: Block size and prefix caching.
        adapters: The adapter cache's limits.
        served_name: Name of the base model in requests.
        seed: Seed for the draws of requests that bring no seed.
        sinks: Take every event, in order.
        predictor: Guesses answer lengths; the one that ``scheduler`` names by default.

    Raises:
        ConfigError: No policy or predictor has the name given.
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
    ) -> None:
        self.base = base
        self.served_name = served_name
        self._executor = executor
        self._scheduler = scheduler
        self._memory = memory
        self._sinks = tuple(sinks)
        self._rng = random.Random(seed)
        self._registry = AdapterRegistry(served_name, adapters.max_registered)
        self._costs = ReloadCosts()
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
        )
        self._limits = RequestLimits(
            base=base,
            num_pages=num_pages,
            block_size=memory.block_size,
            num_pinned_pages=lambda version: self.adapters.num_pinned_pages(besides=version),
        )
        self.adapters = AdapterCatalog(
            registry=self._registry,
            cache=self._cache,
            num_pages=num_pages,
            pages_needed=self._limits.num_pages_needed,
            in_flight=lambda: list(self._sequences.values()),
        )
        self._predictor = predictor or make_predictor(scheduler, seed)
        costs = OnlineCosts()
        self._policy = make_policy(
            scheduler.policy,
            PolicyContext(
                config=scheduler,
                num_pages=num_pages,
                block_size=memory.block_size,
                predictor=self._predictor,
                nearness=self._nearness,
                num_claimable_pages=lambda is_first: self.page_cache.num_claimable(
                    Depth.WANTED if is_first else Depth.IDLE
                ),
                prompt_s=costs.prompt_s,
            ),
        )
        self._running = RunningSet(
            page_cache=self.page_cache,
            cache=self._cache,
            policy=self._policy,
            scheduler=scheduler,
            memory=memory,
            costs=costs,
            on_hit=self._on_adapter_hit,
            emit=self._emit,
        )
        self._prefetcher = Prefetcher(
            cache=self._cache,
            page_cache=self.page_cache,
            policy=self._policy,
            config=adapters,
            block_size=memory.block_size,
        )
        self._sequences: dict[str, Sequence] = {}  # by request id: waiting and running
        self._steps: deque[_Step] = deque()  # in flight: at most two, the second planned ahead
        self._plan_at = math.inf  # when to plan ahead
        self._outputs: list[Output] = []
        self._released: list[int] = []
        self._finish_times: deque[float] = deque(maxlen=FINISH_WINDOW)
        self._next_seq_id = 0
        self._counters = _Counters()

    @classmethod
    def from_parts(
        cls,
        parts: EngineParts,
        config: EngineConfig,
        *,
        served_name: str = "base",
        executor: Executor | None = None,
        sinks: Seq[EventSink] = (),
    ) -> EngineCore:
        """Return a core on parts that were built for ``config``.

        Args:
            parts: What a builder made.
            config: What it made them for.
            served_name: Name of the base model in requests.
            executor: In place of the parts' own, as one that logs.
            sinks: Take every event, in order.
        """
        scheduler = config.scheduler
        if scheduler.plan_ahead is None:
            scheduler = replace(scheduler, plan_ahead=parts.is_accelerated)
        return cls(
            base=parts.base,
            num_pages=parts.num_pages,
            executor=executor or parts.executor,
            scheduler=scheduler,
            memory=config.memory,
            adapters=config.adapters,
            served_name=served_name,
            seed=config.seed,
            sinks=sinks,
        )

    # -- requests ----------------------------------------------------------------------------------------------------

    @property
    def has_requests(self) -> bool:
        """Whether any request is waiting, running, or has output left to collect."""
        return bool(self._sequences or self._outputs)

    @property
    def has_pending_work(self) -> bool:
        """Whether a step or a load is in flight."""
        return bool(self._steps) or self._cache.has_loads

    def add_request(self, request: Request, now: float) -> None:
        """Accept a request.

        Raises:
            ModelNotFound: Neither the base nor an adapter has that name.
            RequestError: It can never be served: empty, unknown tokens, too long for the model or the pool.
            CapacityError: Too many requests wait (429).
        """
        named = self.adapters.resolve(request.model, self.served_name)
        version = named.version if named else None
        if request.request_id in self._sequences:
            raise RequestError(f"Got request_id = {request.request_id!r}, which is in flight", param="request_id")
        max_tokens = self._limits.check(request, version)
        if len(self._policy) >= self._scheduler.max_waiting:
            raise CapacityError(
                f"{len(self._policy)} requests are waiting, the most allowed", retry_after_s=self._retry_after_s(now)
            )
        sampling = request.sampling
        seed = self._rng.getrandbits(63) if sampling.seed is None else sampling.seed & (2**64 - 1)
        root = prefix_root(self.base.fingerprint, version.key if version else None, request.cache_salt)
        eos = () if sampling.ignore_eos else self.base.eos_token_ids
        sequence = Sequence(
            seq_id=self._next_seq_id,
            request=request,
            version=version,
            name=named.name if named else "",
            table=BlockTable(root, self._memory.block_size),
            max_tokens=max_tokens,
            stop_token_ids=frozenset((*eos, *sampling.stop_token_ids)),
            seed=seed,
            arrived_at=now,
            reserves_output=self._scheduler.reserve_output,
        )
        self._next_seq_id += 1
        self._sequences[request.request_id] = sequence
        if named:
            named.num_requests += 1
            self._counters.adapter_requests += 1
            self._cache.ask(named.version.key, now)
            self._prefetcher.asked(named.version.key, now)
        self._policy.add(sequence, now)
        self._emit(
            RequestArrived(
                now,
                request.request_id,
                sequence.adapter,
                sequence.num_prompt_tokens,
                sequence.name,
                sampling.max_tokens,
                max_tokens,
                sampling.temperature,
                sampling.json_schema is not None,
            )
        )

    def cancel(self, request_id: str, now: float) -> bool:
        """End a request; its last output follows. Return whether it was in flight."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        if sequence.num_in_flight:
            # The device may be writing its pages this moment: it ends when the step does.
            sequence.is_cancelled = True
        else:
            self._finish(sequence, FinishReason.CANCELLED, now)
        return True

    def _retry_after_s(self, now: float) -> float:
        """Estimate when a place in the queue will be free, from how fast requests ended lately."""
        if len(self._finish_times) < 2:
            return 1.0
        per_request = (now - self._finish_times[0]) / len(self._finish_times)
        return min(60.0, max(1.0, per_request * len(self._policy) / 2))

    # -- one turn: collect -------------------------------------------------------------------------------------------

    def collect(self, now: float) -> list[Output]:
        """Take in what completed; return what requests got since the last call.

        Raises:
            Exception: The device failed in a step; the engine is lost.
        """
        for key, error in self._cache.poll(now):
            self._fail_waiting(key, error, now)
        while self._steps and (result := self._steps[0].work.poll(now)) is not None:
            assert isinstance(result, StepResult)
            self._take_in(self._steps.popleft(), result, now)
            if self._steps:
                self._begin(self._steps[0], now)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _take_in(self, step: _Step, result: StepResult, now: float) -> None:
        num_tokens = 0
        prefix_caching, tokens = self._memory.prefix_caching, result.tokens
        served: list[str] = []
        for planned, sequence in zip(step.plan.sequences, step.sequences, strict=True):
            num_tokens += planned.num_tokens
            sequence.num_in_flight -= 1
            sequence.num_pending -= planned.is_sampled
            if sequence.status is SequenceStatus.FINISHED:
                continue  # it ended while this step was in flight already
            if prefix_caching:
                num_computed = planned.start + planned.num_tokens
                sequence.table.index_computed(sequence.tokens, num_computed, self.page_cache.prefix)
            if planned.is_sampled and not sequence.is_cancelled:
                sequence.tokens.append(tokens[planned.seq_id].token_id)
                if sequence.first_token_at is None:
                    sequence.first_token_at = now
                served.append(sequence.request.request_id)
        self._counters.generated_tokens += len(served)
        if served and self._sinks:
            self._emit(TokensEmitted(now, tuple(served)))
        for planned, sequence in zip(step.plan.sequences, step.sequences, strict=True):
            if sequence.status is SequenceStatus.FINISHED:
                self._running.stop(sequence, now)
            elif sequence.is_cancelled:
                self._finish(sequence, FinishReason.CANCELLED, now)
            elif planned.is_sampled:
                self._hand_out(sequence, tokens[planned.seq_id], now)
        self._counters.steps += 1
        took_s = now - step.began_at
        self._costs.step.observe(num_tokens, took_s)
        self._running.took(step.load, took_s)
        self._emit(StepFinished(now, step.plan.step_id, took_s, len(step.sequences), num_tokens))

    def _hand_out(self, sequence: Sequence, token: SampledToken, now: float) -> None:
        """Give a request its newest token, and end it if that was the last."""
        num_output = len(sequence.tokens) - sequence.num_prompt_tokens
        if token.token_id in sequence.stop_token_ids and num_output >= sequence.request.sampling.min_tokens:
            self._finish(sequence, FinishReason.STOP, now, token=token)
        elif num_output >= sequence.max_tokens:
            self._finish(sequence, FinishReason.LENGTH, now, token=token)
        else:
            self._outputs.append(
                Output(
                    request_id=sequence.request.request_id,
                    tokens=(token,),
                    num_cached_tokens=sequence.num_cached,
                    adapter=sequence.adapter,
                )
            )

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now: float,
        *,
        token: SampledToken | None = None,
        error: str | None = None,
    ) -> None:
        """End a sequence: give everything back, at the latest when no step in flight uses it any more, and say so."""
        if sequence.status is SequenceStatus.RUNNING:
            if not sequence.num_in_flight:
                self._running.stop(sequence, now)
        else:
            self._policy.remove(sequence)
            if sequence.adapter is not None:
                self._cache.unwant(sequence.adapter, now)
        sequence.status = SequenceStatus.FINISHED
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._predictor.observe(sequence)
        self._running.forget(sequence)
        request_id = sequence.request.request_id
        del self._sequences[request_id]
        self._released.append(sequence.seq_id)
        self._finish_times.append(now)
        self._outputs.append(
            Output(
                request_id=request_id,
                tokens=(token,) if token else (),
                finish=reason,
                stop_token=token.token_id if token and reason is FinishReason.STOP else None,
                num_cached_tokens=sequence.num_cached,
                adapter=sequence.adapter,
                error=error,
            )
        )
        self._emit(
            RequestFinished(
                now,
                request_id,
                sequence.adapter,
                reason,
                sequence.arrived_at,
                sequence.admitted_at,
                sequence.first_token_at,
                sequence.num_prompt_tokens,
                sequence.num_output_tokens,
                sequence.num_cached,
                sequence.num_preemptions,
            )
        )

    def _fail_waiting(self, key: str, error: str, now: float) -> None:
        """End the sequences that wait for an adapter which could not be loaded."""
        for sequence in list(self._sequences.values()):
            if sequence.adapter == key and sequence.status is SequenceStatus.WAITING:
                message = f"adapter {sequence.name!r}: {error}"
                self._finish(sequence, FinishReason.ERROR, now, error=message)

    # -- one turn: launch --------------------------------------------------------------------------------------------

    def launch(self, now: float) -> None:
        """Start the next step, and whatever can be brought meanwhile."""
        self._launch_step(now)
        self._prefetcher.launch(now)

    def _launch_step(self, now: float) -> None:
        """Plan and start the next step, unless one is in flight (or, ahead of time, two) or there is nothing to run."""
        is_ahead = bool(self._steps)
        if is_ahead and now < self._plan_at:
            return
        self._plan_at = math.inf  # tried once a step, whatever comes of it
        planned = self._running.plan(now, is_ahead=is_ahead) if self._sequences else []
        if not planned:
            return
        sequences = tuple([sequence for sequence, _ in planned])
        plan = StepPlan(
            step_id=self._counters.steps + is_ahead,
            sequences=tuple([self._describe(sequence, num_tokens) for sequence, num_tokens in planned]),
            released=tuple(self._released),
        )
        self._released.clear()
        step = _Step(plan, sequences, self._executor.launch(plan, now), self._running.load, now)
        self._steps.append(step)
        for part, sequence in zip(plan.sequences, sequences, strict=True):
            sequence.num_computed += part.num_tokens
            sequence.num_in_flight += 1
            sequence.num_pending += part.is_sampled
        if not is_ahead:
            self._begin(step, now)
        if self._sinks:
            num_tokens = sum([num_tokens for _, num_tokens in planned])
            num_adapters = len({sequence.adapter for sequence in sequences} - {None})
            self._emit(StepLaunched(now, plan.step_id, len(planned), num_tokens, num_adapters))

    def _begin(self, step: _Step, now: float) -> None:
        """Note that a step has the device to itself from now on, and when the one after it is to be planned."""
        step.began_at = now
        if self._scheduler.plan_ahead:
            num_tokens = sum([part.num_tokens for part in step.plan.sequences])
            self._plan_at = plan_at(now, self._costs.step.seconds(num_tokens))

    def next_event_at(self) -> float:
        """Return when the work in flight completes, as far as is known, or is to be planned; infinite otherwise."""
        step_at = min(self._steps[0].work.ready_at, self._plan_at) if self._steps else math.inf
        return min(step_at, self._cache.next_event_at())

    def _describe(self, sequence: Sequence, num_tokens: int) -> PlannedSequence:
        return PlannedSequence(
            seq_id=sequence.seq_id,
            tokens=sequence.tokens,
            num_prompt_tokens=sequence.num_prompt_tokens,
            start=sequence.num_computed,
            num_tokens=num_tokens,
            pages=sequence.table.pages,
            adapter=sequence.adapter,
            rank=sequence.version.rank if sequence.version else 0,
            sampling=sequence.request.sampling,
            is_sampled=sequence.num_computed + num_tokens == sequence.num_tokens,
            seed=sequence.seed,
            awaits_token=sequence.num_pending > 0,
        )

    # -- what can be seen --------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Return gauges and counters."""
        allocator, counters, residencies = self.page_cache.allocator, self._counters, self._cache.residencies()

        def names(residencies: list[Residency]) -> tuple[str, ...]:
            return tuple(sorted(name for one in residencies for name in self._registry.names_of(one.version.key)))

        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._policy),
            num_pages=allocator.num_pages,
            num_free_pages=allocator.num_free,
            num_kv_pages=allocator.count(Owner.KV),
            num_prefix_pages=allocator.count(Owner.PREFIX),
            num_adapter_pages=allocator.count(Owner.ADAPTER),
            num_registered=len(self._registry),
            num_resident=sum(one.device is TierState.RESIDENT for one in residencies),
            num_loading=sum(one.device is TierState.LOADING for one in residencies),
            num_active=self._cache.num_active,
            num_host=self._cache.num_host,
            host_bytes=self._cache.host_bytes,
            running_adapters=names([one for one in residencies if one.num_running]),
            waiting_adapters=names([one for one in residencies if one.num_waiting]),
            num_loads=self._cache.num_loads,
            num_disk_loads=self._cache.num_disk_loads,
            num_evictions=self._cache.num_evictions,
            num_prefix_evictions=counters.prefix_evictions,
            num_preemptions=self._running.num_preemptions,
            num_squashes=self._running.num_squashes,
            num_prefetches=self._prefetcher.num_prefetches,
            queues=self._policy.queues(),
            num_steps=counters.steps,
            num_prompt_tokens=self._running.num_prompt_tokens,
            num_cached_tokens=self._running.num_cached_tokens,
            num_generated_tokens=counters.generated_tokens,
            num_adapter_requests=counters.adapter_requests,
            num_adapter_hits=counters.adapter_hits,
        )

    def check_integrity(self) -> None:
        """Assert that memory, references and queues agree; slow, for tests and soak runs."""
        check_integrity(
            sequences=self._sequences.values(),
            running=self._running.sequences(),
            num_waiting=len(self._policy),
            plans=[step.plan for step in self._steps],
            page_cache=self.page_cache,
            cache=self._cache,
            block_size=self._memory.block_size,
        )

    def _nearness(self, sequence: Sequence) -> Nearness:
        """Return how near a sequence's adapter is to the device."""
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
        if sequence.name in self._registry:
            self._registry.get(sequence.name).num_hits += 1

    def _on_prefix_dropped(self, num_pages: int, now: float) -> None:
        self._counters.prefix_evictions += num_pages
        self._emit(PrefixEvicted(now, num_pages))

    def _emit(self, event: Event) -> None:
        for sink in self._sinks:
            sink(event)
