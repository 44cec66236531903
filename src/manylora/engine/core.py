"""The engine core: decides each step, and knows no tensor, no clock and no socket.

A turn is *collect* what completed, then *launch* the next step:

::

    add_request --> waiting --(policy offers, core admits)--> running --> finished
                       ^                                         |
                       +------------- pre-empted ----------------+

A step is ``{sequence: number of tokens}``. Decoding sequences get their one token first, then prompts share
what is left of the token budget in chunks, so a long prompt slows decoding by a bounded amount and never
stops it. Every sequence is admitted with pages for all tokens it has, so only decoding ones grow; when a
page is missing then, idle things go first, then adapters others wait for, then the youngest sequence is
pre-empted (its tokens stay, its KV is computed again).

Liveness: sequences are ordered by arrival. The oldest running one may pre-empt every other; the first in
line may claim everything that running ones do not hold; a request is accepted only if it fits alone. So the
oldest always ends, and by induction all do.

Source: chunked prefill after Sarathi-Serve, iteration-level scheduling after Orca, both through vLLM v1.
"""

from __future__ import annotations

import math
import random
from bisect import insort
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from manylora.adapters.registry import AdapterRegistry, NamedAdapter
from manylora.adapters.residency import Residency
from manylora.adapters.shape import BaseShape
from manylora.config import AdapterConfig, MemoryConfig, SchedulerConfig
from manylora.engine.adapter_cache import AdapterCache, Readiness
from manylora.engine.ports import Executor, PlannedSequence, StepPlan, StepResult, Work
from manylora.engine.status import AdapterStatus, EngineStats
from manylora.errors import AdapterError, CapacityError, ManyloraError, ModelNotFound, RequestError
from manylora.events import (
    Event,
    EventSink,
    PrefixEvicted,
    RequestAdmitted,
    RequestArrived,
    RequestFinished,
    RequestPreempted,
    StepFinished,
    StepLaunched,
    TokensEmitted,
)
from manylora.memory import BlockTable, Depth, Owner, PageStore, make_eviction_policy, num_blocks, prefix_root
from manylora.scheduling import Outcome, Sequence, SequenceStatus, make_policy
from manylora.types import AdapterVersion, FinishReason, Output, Request, SampledToken

__all__ = ["EngineCore"]

FINISH_WINDOW = 64
"""Finished requests over which the rate of finishing is taken, for Retry-After."""


@dataclass(frozen=True, slots=True)
class _Step:
    plan: StepPlan
    sequences: tuple[Sequence, ...]
    work: Work
    launched_at: float


@dataclass(slots=True)
class _Counters:
    prefix_evictions: int = 0
    preemptions: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
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
    ) -> None:
        self.base = base
        self.served_name = served_name
        self._executor = executor
        self._scheduler = scheduler
        self._memory = memory
        self._sinks = tuple(sinks)
        self._rng = random.Random(seed)
        # A running sequence needs at least one token of every step's budget.
        self._num_seats = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        self._registry = AdapterRegistry(served_name, adapters.max_registered)
        self.store = PageStore(
            num_pages,
            base.page.num_bytes,
            idle=make_eviction_policy(adapters.eviction),
            wanted=make_eviction_policy(adapters.eviction),
            on_adapter_dropped=lambda key, now: self._cache.on_dropped(key, now),
            on_prefix_dropped=self._on_prefix_dropped,
        )
        self._cache = AdapterCache(
            store=self.store,
            executor=executor,
            config=adapters,
            is_pinned=self._registry.is_pinned,
            emit=self._emit,
        )
        self._policy = make_policy(scheduler.policy)
        self._sequences: dict[str, Sequence] = {}  # by request id: waiting and running
        self._running: list[Sequence] = []  # oldest arrival first
        self._first_in_line: Sequence | None = None  # offered first in the last step, and not admitted
        self._step: _Step | None = None
        self._outputs: list[Output] = []
        self._released: list[int] = []
        self._finish_times: deque[float] = deque(maxlen=FINISH_WINDOW)
        self._next_seq_id = 0
        self._counters = _Counters()

    # -- requests ----------------------------------------------------------------------------------------------------

    @property
    def has_requests(self) -> bool:
        """Whether any request is waiting, running, or has output left to collect."""
        return bool(self._sequences or self._outputs)

    @property
    def has_pending_work(self) -> bool:
        """Whether a step or a load is in flight."""
        return self._step is not None or self._cache.has_loads

    def add_request(self, request: Request, now: float) -> None:
        """Accept a request.

        Raises:
            ModelNotFound: Neither the base nor an adapter has that name.
            RequestError: It can never be served: empty, unknown tokens, too long for the model or the pool.
            CapacityError: Too many requests wait (429).
        """
        named = self._resolve(request.model)
        version = named.version if named else None
        max_tokens = self._check_fits(request, version)
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
            table=BlockTable(root, self._memory.block_size),
            max_tokens=max_tokens,
            stop_token_ids=frozenset((*eos, *sampling.stop_token_ids)),
            seed=seed,
            arrived_at=now,
        )
        self._next_seq_id += 1
        self._sequences[request.request_id] = sequence
        if named:
            named.num_requests += 1
            self._counters.adapter_requests += 1
            self._cache.want(named.version.key, now)
        self._policy.add(sequence, now)
        self._emit(RequestArrived(now, request.request_id, sequence.adapter, sequence.num_prompt_tokens))

    def cancel(self, request_id: str, now: float) -> bool:
        """End a request; its last output follows. Return whether it was in flight."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        if self._step is not None and sequence in self._step.sequences:
            # The device may be writing its pages this moment: it ends when the step does.
            sequence.is_cancelled = True
        else:
            self._finish(sequence, FinishReason.CANCELLED, now)
        return True

    def _resolve(self, model: str) -> NamedAdapter | None:
        """Return the adapter a request names, ``None`` for the base; an exact name wins over ``base:adapter``."""
        if model in ("", self.served_name):
            return None
        if model in self._registry:
            return self._registry.get(model)
        base, _, adapter = model.partition(":")
        if base == self.served_name and adapter in self._registry:
            return self._registry.get(adapter)
        raise ModelNotFound(f"The model {model!r} does not exist", param="model")

    def _check_fits(self, request: Request, version: AdapterVersion | None) -> int:
        """Return how many tokens the request may generate.

        Raises:
            RequestError: See ``add_request``.
        """
        num_prompt = len(request.prompt)
        if request.request_id in self._sequences:
            raise RequestError(f"Got request_id = {request.request_id!r}, which is in flight", param="request_id")
        if not num_prompt:
            raise RequestError("The prompt has no tokens", param="prompt")
        if not 0 <= min(request.prompt) <= max(request.prompt) < self.base.vocab_size:
            raise RequestError(f"The prompt has token ids outside [0, {self.base.vocab_size})", param="prompt")
        limit = self.base.max_model_len
        if num_prompt >= limit:
            raise RequestError(
                f"The prompt has {num_prompt} tokens; this model's context is {limit}, one of them at least to answer",
                param="prompt",
            )
        asked = request.sampling.max_tokens
        if asked is not None and num_prompt + asked > limit:
            raise RequestError(
                f"The prompt has {num_prompt} tokens and max_tokens is {asked}, "
                f"together more than this model's context of {limit}",
                param="max_tokens",
            )
        # It must fit with nothing but pinned adapters beside it, else it could wait for ever. The last token
        # generated needs no KV.
        num_free = self.store.pool.num_pages - self._num_pinned_pages(besides=version)
        num_kv_pages = num_free - (version.num_pages if version else 0)
        room = num_kv_pages * self._memory.block_size + 1 - num_prompt
        if room < 1 or (asked is not None and asked > room):
            raise RequestError(
                f"The request needs KV for {num_prompt + (asked or 1) - 1} tokens; "
                f"the memory left beside its adapter and pinned ones holds {max(0, room + num_prompt - 1)}",
                param="prompt" if room < 1 else "max_tokens",
            )
        longest = min(limit - num_prompt, room)
        return longest if asked is None else asked

    def _retry_after_s(self, now: float) -> float:
        """Estimate when a place in the queue will be free, from how fast requests ended lately."""
        if len(self._finish_times) < 2:
            return 1.0
        per_request = (now - self._finish_times[0]) / len(self._finish_times)
        return min(60.0, max(1.0, per_request * len(self._policy) / 2))

    # -- adapters ----------------------------------------------------------------------------------------------------

    def register_adapter(
        self, name: str, version: AdapterVersion, now: float, *, replace: bool = False
    ) -> AdapterStatus:
        """Point a name to a version whose weights the executor holds in the host tier.

        Requests that arrived before stay on the version the name had then. If it is refused, the host copy is
        given back.

        Raises:
            AdapterExists: The name is taken (and ``replace`` is not set), or the base's.
            AdapterError: It leaves no room for a single token beside it.
            CapacityError: Too many adapters, or the name is pinned and the new version has no room to be.
        """
        try:
            is_pinned = self._check_can_register(name, version, replace=replace)
            old = self._registry.add(name, version, replace=replace)
        except ManyloraError:
            self._cache.refuse(version)
            raise
        self._cache.add(version, now)
        self._cache.refresh(version.key, now)
        if old is not None and old.key != version.key:
            self._forget_if_unnamed(old, now)
        if is_pinned:
            self._cache.warm(version, now)
        return self._status(self._registry.get(name), now)

    def _check_can_register(self, name: str, version: AdapterVersion, *, replace: bool) -> bool:
        """Raise what ``register_adapter`` would; return whether the name is pinned."""
        self._registry.check_can_add(name, replace=replace)
        if version.num_pages >= self.store.pool.num_pages:
            raise AdapterError(
                name, f"needs {version.num_pages} pages, and the pool has {self.store.pool.num_pages} in all"
            )
        is_pinned = name in self._registry and self._registry.get(name).is_pinned
        if is_pinned and not self._registry.is_pinned(version.key):
            self._check_can_pin(name, version)
        return is_pinned

    def unregister_adapter(self, name: str, now: float) -> None:
        """Forget a name; its version is freed when the requests on it have ended.

        Raises:
            AdapterNotFound: No such name.
        """
        self._forget_if_unnamed(self._registry.remove(name), now)

    def pin_adapter(self, name: str, pinned: bool, now: float) -> AdapterStatus:
        """Keep an adapter on the device (and bring it there), or let go of it again.

        Raises:
            AdapterNotFound: No such name.
            CapacityError: Pinning it would leave too little room for a request in flight.
        """
        named = self._registry.get(name)
        key = named.version.key
        if pinned and not self._registry.is_pinned(key):
            self._check_can_pin(name, named.version)
        self._registry.set_pinned(name, pinned)
        self._cache.refresh(key, now)
        if pinned:
            self._cache.warm(named.version, now)
        return self._status(named, now)

    def warm_adapter(self, name: str, now: float) -> AdapterStatus:
        """Start bringing an adapter to the device before anybody asks for it.

        Raises:
            AdapterNotFound: No such name.
            CapacityError: There is no idle memory for it.
        """
        named = self._registry.get(name)
        if self._cache.warm(named.version, now) is Readiness.NO_ROOM:
            raise CapacityError(f"no idle memory for adapter {name!r}", retry_after_s=1.0, status=503)
        return self._status(named, now)

    def adapter_status(self, name: str, now: float) -> AdapterStatus:
        """Return one adapter's status.

        Raises:
            AdapterNotFound: No such name.
        """
        return self._status(self._registry.get(name), now)

    def adapter_statuses(self, now: float) -> tuple[AdapterStatus, ...]:
        """Return every registered adapter's status, in order of registration."""
        return tuple(self._status(named, now) for named in self._registry.all())

    def check_can_register(self, name: str, *, replace: bool) -> None:
        """Raise what ``register_adapter`` would raise for the name alone, before its files are read.

        Raises:
            AdapterExists: See ``register_adapter``.
            CapacityError: See ``register_adapter``.
        """
        self._registry.check_can_add(name, replace=replace)

    def _forget_if_unnamed(self, version: AdapterVersion, now: float) -> None:
        if self._registry.names_of(version.key):
            self._cache.refresh(version.key, now)  # a name that pinned it may be gone
        else:
            self._cache.retire(version.key, now)

    def _num_pinned_pages(self, besides: AdapterVersion | None = None) -> int:
        pinned = {named.version.key: named.version.num_pages for named in self._registry.pinned()}
        if besides is not None:
            pinned.pop(besides.key, None)
        return sum(pinned.values())

    def _check_can_pin(self, name: str, version: AdapterVersion) -> None:
        """Raise unless every request in flight still fits beside all that is pinned.

        Raises:
            CapacityError: One would not.
        """
        for sequence in self._sequences.values():
            if sequence.adapter == version.key:
                continue
            num_tokens = sequence.num_prompt_tokens + sequence.max_tokens - 1
            need = num_blocks(num_tokens, self._memory.block_size) + sequence.num_adapter_pages
            left = self.store.pool.num_pages - self._num_pinned_pages(besides=sequence.version)
            if need > left - version.num_pages:
                raise CapacityError(
                    f"pinning {name!r} ({version.num_pages} pages) would leave too little memory "
                    f"for a request in flight that needs {need} pages",
                    retry_after_s=5.0,
                )
        if self._num_pinned_pages() + version.num_pages >= self.store.pool.num_pages:
            raise CapacityError(f"pinning {name!r} would leave no memory for requests", retry_after_s=60.0)

    def _status(self, named: NamedAdapter, now: float) -> AdapterStatus:
        residency: Residency = self._cache.residency(named.version.key)
        used_at = residency.last_used_at
        return AdapterStatus(
            name=named.name,
            version=named.version,
            generation=named.generation,
            tier=residency.tier,
            state=residency.state,
            is_pinned=named.is_pinned,
            num_running=residency.num_running,
            num_waiting=residency.num_waiting,
            num_requests=named.num_requests,
            num_hits=named.num_hits,
            last_used_s=None if used_at is None else now - used_at,
        )

    # -- one turn: collect -------------------------------------------------------------------------------------------

    def collect(self, now: float) -> list[Output]:
        """Take in what completed; return what requests got since the last call.

        Raises:
            Exception: The device failed in a step; the engine is lost.
        """
        for key, error in self._cache.poll(now):
            self._fail_waiting(key, error, now)
        if self._step is not None:
            result = self._step.work.poll(now)
            if result is not None:
                assert isinstance(result, StepResult)
                step, self._step = self._step, None
                self._take_in(step, result, now)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _take_in(self, step: _Step, result: StepResult, now: float) -> None:
        num_tokens = 0
        for planned, sequence in zip(step.plan.sequences, step.sequences, strict=True):
            num_tokens += planned.num_tokens
            sequence.num_computed += planned.num_tokens
            if self._memory.prefix_caching:
                sequence.table.index_computed(sequence.tokens, sequence.num_computed, self.store.prefix)
            if sequence.is_cancelled:
                self._finish(sequence, FinishReason.CANCELLED, now)
            elif planned.is_sampled:
                self._take_token(sequence, result.tokens[planned.seq_id], now)
        self._counters.steps += 1
        self._emit(StepFinished(now, step.plan.step_id, now - step.launched_at, len(step.sequences), num_tokens))

    def _take_token(self, sequence: Sequence, token: SampledToken, now: float) -> None:
        sequence.tokens.append(token.token_id)
        self._counters.generated_tokens += 1
        is_first = sequence.first_token_at is None
        if is_first:
            sequence.first_token_at = now
        self._emit(TokensEmitted(now, sequence.request.request_id, 1, is_first))
        num_output = sequence.num_output_tokens
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
        """End a sequence: give everything back, and say so."""
        if sequence.status is SequenceStatus.RUNNING:
            self._stop_running(sequence, now)
        else:
            self._policy.remove(sequence)
            if sequence.adapter is not None:
                self._cache.unwant(sequence.adapter, now)
        sequence.status = SequenceStatus.FINISHED
        if sequence is self._first_in_line:
            self._first_in_line = None
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
                message = f"adapter {sequence.request.model!r}: {error}"
                self._finish(sequence, FinishReason.ERROR, now, error=message)

    def _stop_running(self, sequence: Sequence, now: float) -> None:
        """Take a sequence out of the running set, with its pages and its hold on the adapter."""
        self._running.remove(sequence)
        self.store.release_kv(sequence.table.clear(), now)
        if sequence.adapter is not None:
            self._cache.release(sequence.adapter, now)
        self._policy.finish(sequence, now)

    # -- one turn: launch --------------------------------------------------------------------------------------------

    def launch(self, now: float) -> None:
        """Plan and start the next step, unless one is in flight or there is nothing to run."""
        if self._step is not None or not self._sequences:
            return
        planned, has_preempted = self._plan_running(now)
        if not (planned and has_preempted):
            # After a pre-emption memory is short: let the step run before anybody is let in.
            planned += self._admit(self._budget_after(planned), now)
        if not planned:
            return
        sequences = tuple(sequence for sequence, _ in planned)
        plan = StepPlan(
            step_id=self._counters.steps,
            sequences=tuple(self._describe(sequence, num_tokens) for sequence, num_tokens in planned),
            released=tuple(self._released),
        )
        self._released.clear()
        self._step = _Step(plan, sequences, self._executor.launch(plan, now), now)
        if self._sinks:
            num_tokens = sum(part.num_tokens for part in plan.sequences)
            num_adapters = len({part.adapter for part in plan.sequences if part.adapter is not None})
            self._emit(StepLaunched(now, plan.step_id, len(planned), num_tokens, num_adapters))

    def next_event_at(self) -> float:
        """Return when the work in flight completes, as far as is known; infinite otherwise."""
        step_at = self._step.work.ready_at if self._step else math.inf
        return min(step_at, self._cache.next_event_at())

    def _budget_after(self, planned: list[tuple[Sequence, int]]) -> int:
        return self._scheduler.max_num_batched_tokens - sum(num_tokens for _, num_tokens in planned)

    def _plan_running(self, now: float) -> tuple[list[tuple[Sequence, int]], bool]:
        """Give running sequences their tokens: decoding ones first, then prompt chunks, each oldest first."""
        num_preemptions = self._counters.preemptions
        planned = []
        for sequence in list(self._running):
            is_decoding = sequence.num_to_run == 1 and sequence.status is SequenceStatus.RUNNING
            if is_decoding and self._grow(sequence, now):
                planned.append((sequence, 1))
        budget = self._budget_after(planned)
        for sequence in self._running:
            if sequence.num_to_run > 1 and budget > 0:
                num_tokens = min(sequence.num_to_run, budget)
                planned.append((sequence, num_tokens))
                budget -= num_tokens
        return planned, self._counters.preemptions > num_preemptions

    def _grow(self, sequence: Sequence, now: float) -> bool:
        """Make room for a decoding sequence's next token; return whether it can run in this step.

        Idle things go first, then adapters that others wait for (that of the first in line only if it is
        younger), then younger running sequences, youngest first; at last the sequence itself.
        """
        if num_blocks(len(sequence.tokens), self._memory.block_size) <= len(sequence.table.pages):
            return True
        first = self._first_in_line
        spare = first.adapter if first is not None and first.seq_id < sequence.seq_id else None
        while True:
            pages = self.store.claim_kv(1, now, Depth.WANTED, spare=spare)
            if pages is not None:
                sequence.table.pages.extend(pages)
                return True
            youngest = self._running[-1]
            if youngest is sequence and len(self._running) == 1 and self._cache.has_loads:
                return False  # adapters on their way hold the pages: they can be claimed when they have arrived
            self._preempt(youngest, now)
            if youngest is sequence:
                return False

    def _preempt(self, sequence: Sequence, now: float) -> None:
        """Send a running sequence back to wait; its tokens stay and are computed again."""
        self._counters.preemptions += 1
        sequence.num_preemptions += 1
        self._emit(RequestPreempted(now, sequence.request.request_id, sequence.num_computed))
        if sequence.adapter is not None:
            self._cache.want(sequence.adapter, now)
        self._stop_running(sequence, now)
        sequence.num_computed = 0
        sequence.status = SequenceStatus.WAITING
        self._policy.add(sequence, now)

    def _admit(self, budget: int, now: float) -> list[tuple[Sequence, int]]:
        """Let waiting sequences in, in the policy's order, while there are seats and tokens."""
        planned: list[tuple[Sequence, int]] = []
        self._policy.begin(now)
        is_first = True
        while budget > 0 and len(self._running) < self._num_seats:
            sequence = self._policy.offer()
            if sequence is None:
                break
            depth = Depth.WANTED if is_first else Depth.IDLE
            outcome = self._try_admit(sequence, now, depth)
            self._policy.report(sequence, outcome)
            if is_first:
                self._first_in_line = None if outcome is Outcome.ADMITTED else sequence
                is_first = False
            if outcome is Outcome.ADMITTED:
                num_tokens = min(sequence.num_to_run, budget)
                planned.append((sequence, num_tokens))
                budget -= num_tokens
        return planned

    def _try_admit(self, sequence: Sequence, now: float, depth: Depth) -> Outcome:
        """Admit a waiting sequence if its adapter is on the device and its KV has room."""
        key = sequence.adapter
        was_resident = True
        if sequence.version is not None and key is not None:
            if self._is_capped(sequence):
                return Outcome.ADAPTER_CAP
            readiness = self._cache.ensure(sequence.version, now, depth)
            was_resident = self._count_look(sequence, readiness)
            if readiness is Readiness.LOADING:
                return Outcome.ADAPTER_LOADING
            if readiness is Readiness.NO_ROOM:
                return Outcome.ADAPTER_NO_PAGES
        cached = sequence.table.match(sequence.tokens, self.store.prefix) if self._memory.prefix_caching else []
        self.store.share_kv(cached)
        num_missing = num_blocks(len(sequence.tokens), self._memory.block_size) - len(cached)
        pages = self.store.claim_kv(num_missing, now, depth, spare=key)
        if pages is None:
            self.store.release_kv(cached, now)
            return Outcome.NO_PAGES
        sequence.table.adopt(cached)
        sequence.table.pages.extend(pages)
        sequence.num_computed = len(cached) * self._memory.block_size
        self._start_running(sequence, now, was_resident)
        return Outcome.ADMITTED

    def _start_running(self, sequence: Sequence, now: float, was_resident: bool) -> None:
        if sequence.admitted_at is None:
            sequence.admitted_at = now
            sequence.num_cached = sequence.num_computed
            self._counters.prompt_tokens += sequence.num_prompt_tokens
            self._counters.cached_tokens += sequence.num_cached
            self._emit(
                RequestAdmitted(
                    now,
                    sequence.request.request_id,
                    sequence.adapter,
                    now - sequence.arrived_at,
                    sequence.num_cached,
                    was_resident,
                )
            )
        sequence.status = SequenceStatus.RUNNING
        insort(self._running, sequence, key=lambda other: other.seq_id)
        if sequence.adapter is not None:
            self._cache.hold(sequence.adapter, now)
            self._cache.unwant(sequence.adapter, now)

    def _is_capped(self, sequence: Sequence) -> bool:
        """Whether its adapter would be one more distinct adapter than may run."""
        cap = self._scheduler.max_loras
        if cap is None or sequence.adapter is None:
            return False
        return self._cache.num_active >= cap and not self._cache.residency(sequence.adapter).num_running

    def _count_look(self, sequence: Sequence, readiness: Readiness) -> bool:
        """Count a hit if the adapter was there when its sequence was first looked at; return whether it was."""
        if sequence.was_looked_at:
            return False
        sequence.was_looked_at = True
        is_hit = readiness is Readiness.READY
        self._counters.adapter_hits += is_hit
        if is_hit:
            for name in (sequence.request.model, sequence.request.model.partition(":")[2]):
                if name in self._registry:
                    self._registry.get(name).num_hits += 1
                    break
        return is_hit

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
            is_sampled=num_tokens == sequence.num_to_run,
            seed=sequence.seed,
        )

    # -- what can be seen --------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Return gauges and counters."""
        pool, counters, residencies = self.store.pool, self._counters, self._cache.residencies()

        def names(residencies: list[Residency]) -> tuple[str, ...]:
            return tuple(sorted(name for one in residencies for name in self._registry.names_of(one.version.key)))

        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._policy),
            num_pages=pool.num_pages,
            num_free_pages=pool.num_free,
            num_kv_pages=pool.count(Owner.KV),
            num_prefix_pages=pool.count(Owner.PREFIX),
            num_adapter_pages=pool.count(Owner.ADAPTER),
            num_registered=len(self._registry),
            num_resident=sum(one.device.value == "resident" for one in residencies),
            num_loading=sum(one.device.value == "loading" for one in residencies),
            num_active=self._cache.num_active,
            num_host=self._cache.num_host,
            host_bytes=self._cache.host_bytes,
            running_adapters=names([one for one in residencies if one.num_running]),
            waiting_adapters=names([one for one in residencies if one.num_waiting]),
            num_loads=self._cache.num_loads,
            num_disk_loads=self._cache.num_disk_loads,
            num_evictions=self._cache.num_evictions,
            num_prefix_evictions=counters.prefix_evictions,
            num_preemptions=counters.preemptions,
            num_steps=counters.steps,
            num_prompt_tokens=counters.prompt_tokens,
            num_cached_tokens=counters.cached_tokens,
            num_generated_tokens=counters.generated_tokens,
            num_adapter_requests=counters.adapter_requests,
            num_adapter_hits=counters.adapter_hits,
        )

    def check_integrity(self) -> None:
        """Assert that memory, references and queues agree; slow, for tests and soak runs."""
        self.store.check_integrity()
        assert len(self._sequences) == len(self._running) + len(self._policy)
        for residency in self._cache.residencies():
            key = residency.version.key
            users = [sequence for sequence in self._sequences.values() if sequence.adapter == key]
            assert residency.num_running == sum(one.status is SequenceStatus.RUNNING for one in users)
            assert residency.num_waiting == sum(one.status is SequenceStatus.WAITING for one in users)
        for sequence in self._running:
            assert len(sequence.table.pages) * self._memory.block_size >= sequence.num_computed

    def _on_prefix_dropped(self, num_pages: int, now: float) -> None:
        self._counters.prefix_evictions += num_pages
        self._emit(PrefixEvicted(now, num_pages))

    def _emit(self, event: Event) -> None:
        for sink in self._sinks:
            sink(event)
