"""The gate: which of vLLM's waiting requests may be scheduled, and which adapters move meanwhile.

vLLM asks a connector about each waiting request before it is scheduled, and accepts "ask again later". So a request can
be held while its adapter loads, or while others go first, and vLLM's scheduler stays as it is. The decisions are the
core's, made by its own code:

::

    waiting --policy offers--> adapter in a slot? --yes--> cleared: vLLM schedules it when KV, tokens and seats allow
                                    | no
                               loader: read, copy (core/engine/adapters); eviction (core/memory/eviction)
                               prefetcher: adapters of the next in line

A slot is a page of the core, and an adapter takes one: vLLM's slots are all as large as ``--max-lora-rank``. KV is
vLLM's, and no page of it is counted here.

A request is cleared once. From then on its adapter keeps its slot until the request ends, also while vLLM pre-empts it,
so cleared requests never have more adapters than there are slots, and vLLM's own limit never applies. Cleared requests
that vLLM has not scheduled yet count against the tokens of a step: no more are cleared than a step can take, so that
vLLM, which goes through them by arrival, keeps the policy's order up to a step.

No request starves: the policies keep the rules in ``core/scheduling/policy.py``, and each outcome is reported to them.
"""

from __future__ import annotations

from manylora.core.engine.adapters.loader import make_loader
from manylora.core.engine.adapters.prefetch import Prefetcher
from manylora.core.engine.adapters.residency import TierState
from manylora.core.engine.integrity import check_integrity
from manylora.core.engine.telemetry import Telemetry
from manylora.core.errors import AdapterError
from manylora.core.events import EventSink, RequestAdmitted
from manylora.core.memory import BlockTable, Depth, ReloadCosts
from manylora.core.scheduling import (
    Outcome,
    PolicyContext,
    Sequence,
    make_policy,
    make_predictor,
    make_step_composition,
)
from manylora.core.types import AdapterKey, Request, Tier
from manylora.vllm.messages import AdapterRef, Outbox, Report, SlotOrders
from manylora.vllm.options import GateLimits, PluginOptions
from manylora.vllm.versions import KnownVersion, Versions

__all__ = ["RequestGate"]

SLOT_TOKENS = 16
"""Tokens that a slot counts as, in sizes of requests: the same for every adapter, since slots are equal."""


class RequestGate:
    """Decides for one vLLM engine. Times are in seconds on any one clock; all calls come from the scheduler's thread.

    Attributes:
        doomed: Waiting requests that cannot run, and the reason.
        counters: The counts of events since the start.

    Args:
        sink: Hears of loads and of requests that were cleared.
    """

    def __init__(self, options: PluginOptions, limits: GateLimits, sink: EventSink) -> None:
        self.doomed: dict[str, str] = {}
        self._limits, self._pinned = limits, set(options.pin)
        self._versions = Versions()
        self._outbox = Outbox(limits.num_workers, lambda key: self._versions.by_key[key].ref)
        self._telemetry, self._costs = Telemetry([sink]), ReloadCosts()
        self.counters = self._telemetry.counters
        self._page_cache, self._cache, self._loader = page_cache, cache, loader = make_loader(
            self._outbox,
            options.adapters,
            self._costs,
            self._telemetry,
            num_pages=limits.num_slots,
            block_size=SLOT_TOKENS,
            host_bytes=0,
            is_pinned=lambda key: self._versions.by_key[key].name in self._pinned,
        )
        self._predictor = make_predictor(options.scheduler, seed=0)
        context = PolicyContext(
            config=options.scheduler,
            num_pages=limits.num_slots,
            block_size=SLOT_TOKENS,
            predictor=self._predictor,
            nearness=cache.nearness,
            num_claimable_pages=lambda is_first: page_cache.num_claimable(Depth.WANTED if is_first else Depth.IDLE),
            prompt_s=lambda sequence: self._costs.step.marginal_s(sequence.num_to_run),
        )
        self._policy = policy = make_policy(options.scheduler.policy, context)
        composition = make_step_composition("mixed")
        self._prefetcher = Prefetcher(
            options.adapters, cache, loader, page_cache, policy, composition, self.counters, kv_pages=lambda sequence: 0
        )
        self._num_requests = 0
        self._waiting: dict[str, Sequence] = {}  # by request, as the next two
        self._cleared: dict[str, Sequence] = {}
        self._unscheduled: dict[str, int] = {}  # tokens of cleared requests that vLLM has not scheduled yet
        self._failing: list[str] = []
        self._retired: list[AdapterKey] = []
        self._has_begun = False

    # -- requests come and go ----------------------------------------------------------------------------------------

    def add(self, request: Request, lora: tuple[str, str] | None, now: float) -> AdapterRef | None:
        """Add a request that vLLM has queued; return its adapter as the engine is to know it, ``None`` for the base.

        Args:
            request: Its tokens do not matter, their number does.
            lora: Name and path of its adapter.
            now: In seconds.
        """
        version = None
        if lora is not None:
            try:
                version = self._find(*lora, now)
            except AdapterError as error:
                self.doomed[request.request_id] = str(error)
                return None
            self._cache.ask(version.weights.key, now)
            self._prefetcher.asked(version.weights.key, now)
            self.counters.num_adapter_requests += 1
        self._num_requests += 1
        sequence = self._waiting[request.request_id] = Sequence(
            seq_id=self._num_requests,
            request=request,
            version=None if version is None else version.weights,
            name="" if version is None else version.name,
            table=BlockTable(b"", SLOT_TOKENS),
            max_tokens=request.sampling.max_tokens or 1,
            stop_token_ids=frozenset(),
            seed=0,
            arrived_at=now,
        )
        self._policy.add(sequence, now)
        return None if version is None else version.ref

    def finish(self, request_id: str, num_output_tokens: int, now: float, *, is_whole: bool) -> None:
        """Take out a request that has ended; ``is_whole`` if it ended by itself or at its longest answer."""
        self.doomed.pop(request_id, None)
        self._unscheduled.pop(request_id, None)
        if (sequence := self._cleared.pop(request_id, None)) is not None:
            if sequence.adapter is not None:
                self._cache.release(sequence.adapter, now)
            self._policy.finish(sequence, now)
            if is_whole and num_output_tokens:
                sequence.tokens += [0] * num_output_tokens
                self._predictor.observe(sequence)
        elif request_id in self._waiting:
            self._leave(request_id, now)

    def _leave(self, request_id: str, now: float) -> None:
        sequence = self._waiting.pop(request_id)
        self._policy.remove(sequence)
        if sequence.adapter is not None:
            self._cache.unwant(sequence.adapter, now)

    def _find(self, name: str, path: str, now: float) -> KnownVersion:
        version, gone = self._versions.find(name, path)
        if version.weights.key not in self._cache.residencies:
            self._cache.add(version.weights, now, Tier.DISK)
        for old in gone:
            self._retired.append(old.weights.key)
            self._cache.retire(old.weights.key, now)
        return version

    # -- a step ------------------------------------------------------------------------------------------------------

    def may_run(self, request_id: str, now: float) -> bool:
        """Return whether a waiting request may be scheduled in this step."""
        if not self._has_begun:
            self._has_begun = True
            self._clear(now)
        return request_id in self._cleared

    def scheduled(self, request_id: str) -> None:
        """Learn that vLLM has given a request its blocks: it runs, or fails with the next step."""
        self._unscheduled.pop(request_id, None)
        if request_id in self.doomed:
            self._failing.append(request_id)

    def end_step(self, now: float) -> SlotOrders:
        """End the scheduling of a step; return what it brings to the workers."""
        self._has_begun = False
        self._prefetcher.launch(now, is_busy=bool(self._waiting or self._cleared))
        orders, self._failing = SlotOrders(self._outbox.take(), tuple(self._failing)), []
        for key in [key for key in self._retired if key not in self._cache.residencies]:
            self._retired.remove(key)
            del self._versions.by_key[key]
        return orders

    def stepped(self, num_tokens: int, took_s: float) -> None:
        """Learn the duration of a step, for orders by size."""
        self._costs.step.observe(num_tokens, took_s)

    def learn(self, report: Report, now: float) -> None:
        """Take in what workers report."""
        self._outbox.learn(report)
        for key, error in self._loader.poll(now).failed:
            for request_id in [name for name, sequence in self._waiting.items() if sequence.adapter == key]:
                self.doomed[request_id] = f"adapter {self._waiting[request_id].name!r}: {error}"
                self._leave(request_id, now)

    def _clear(self, now: float) -> None:
        """Clear requests in the policy's order, up to the seats and the tokens of a step."""
        limits, policy = self._limits, self._policy
        room = limits.max_num_batched_tokens - sum(self._unscheduled.values())
        policy.begin(now)
        while room > 0 and len(self._cleared) < limits.max_num_seqs and (sequence := policy.offer()) is not None:
            is_first = sequence is policy.first_in_line
            outcome = self._look(sequence, now, Depth.WANTED if is_first else Depth.IDLE)
            policy.report(sequence, outcome)
            if outcome is Outcome.ADMITTED:
                self._admit(sequence, now)
                room -= sequence.num_prompt_tokens

    def _look(self, sequence: Sequence, now: float, depth: Depth) -> Outcome:
        """Return whether a request can run now; if not, bring its adapter nearer."""
        if (version := sequence.version) is None:
            return Outcome.ADMITTED
        residency = self._cache.residencies[version.key]
        is_resident = residency.device is TierState.RESIDENT
        self.counters.num_adapter_hits += sequence.looked_at(is_resident=is_resident) and is_resident
        if is_resident:
            return Outcome.ADMITTED
        # A copy that follows its read saves a step; behind other reads, it would keep its slot empty for long.
        self._loader.ensure(version, now, depth, at_once=not self._loader.loads.to(Tier.HOST))
        return Outcome.ADAPTER_LOADING if residency.is_loading else Outcome.ADAPTER_NO_PAGES

    def _admit(self, sequence: Sequence, now: float) -> None:
        request_id, key = sequence.request.request_id, sequence.adapter
        self._cleared[request_id] = self._waiting.pop(request_id)
        self._unscheduled[request_id] = sequence.num_prompt_tokens
        sequence.admitted(now, shared=(), pages=())
        if key is not None:
            self._cache.hold(key, now)
            self._cache.unwant(key, now)
        waited_s = now - sequence.arrived_at
        self._telemetry.emit(RequestAdmitted(now, request_id, key, waited_s, 0, sequence.found_resident))

    # -- its state ---------------------------------------------------------------------------------------------------

    def residency(self) -> dict[str, tuple[str, int]]:
        """Return the tier and the rank of every adapter above the disk, by its name in vLLM's API."""
        found: dict[str, tuple[str, int]] = {}
        for key in (*self._cache.host.recent(), *self._cache.in_pages):  # the device last: it counts for both
            residency = self._cache.residencies[key]
            if residency.tier is not Tier.DISK:
                found[self._versions.by_key[key].name] = residency.tier.value, residency.version.rank
        return found

    def check_integrity(self) -> None:
        """Assert that slots, references and requests agree; for tests and soak runs."""
        check_integrity(
            sequences=[*self._waiting.values(), *self._cleared.values()],
            running=[],
            num_waiting=len(self._waiting) + len(self._cleared),
            plans=(),
            page_cache=self._page_cache,
            cache=self._cache,
            block_size=SLOT_TOKENS,
        )
        assert len(self._policy) == len(self._waiting)
        assert set(self._versions.by_key) >= set(self._cache.residencies)
