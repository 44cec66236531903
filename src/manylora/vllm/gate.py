"""The gate: which of vLLM's waiting requests may be scheduled, and which adapters move meanwhile.

vLLM asks a connector about each waiting request, and accepts "ask again later": a request is held while its adapter
loads, or while others go first. The gate is the engine core, and vLLM runs the steps. A slot is a page of its pool, and
an adapter takes one: vLLM's slots are all as large as ``--max-lora-rank``. KV is vLLM's, and not counted here.

A request is admitted once. From then on its adapter keeps its slot until the request ends, also while vLLM pre-empts
it, so admitted requests never have more adapters than there are slots, and vLLM's own limit never applies. Those that
vLLM has not scheduled yet count against the tokens of a step: no more are admitted than a step can take, so that vLLM,
which goes through them by arrival, keeps the policy's order up to a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from manylora.core.costs.online import StepLoad
from manylora.core.engine.core import EngineCore
from manylora.core.engine.steps.planner import StepBudget
from manylora.core.errors import AdapterError
from manylora.core.events import AdapterLoaded, Event, EventSink, RequestAdmitted
from manylora.core.ports import CoreParts
from manylora.core.scheduling import SequenceStatus
from manylora.core.types import AdapterVersion, FinishReason, Request, Tier
from manylora.vllm.messages import Outbox, Report, SlotOrders
from manylora.vllm.plugin import PluginOptions
from manylora.vllm.versions import SLOTS, AdapterRef, file_key, make_version

__all__ = ["RequestGate"]


class RequestGate(EngineCore):
    """Decides for one vLLM engine. Times are in seconds on any one clock; all calls come from the scheduler's thread.

    Attributes:
        doomed: Waiting requests that cannot run, and the reason.
        counters: The core's counts of events since the start.
        sums: Further counts, and seconds.
    """

    def __init__(self, options: PluginOptions, sinks: Sequence[EventSink] = ()) -> None:
        self._outbox, num_pages = Outbox(options.num_workers), options.num_slots
        parts = CoreParts(base=SLOTS, num_pages=num_pages, executor=self._outbox, chains_copies=True, has_kv=False)
        super().__init__(parts, options.engine, served_name="", sinks=(self._heard, *sinks))
        self.doomed: dict[str, str] = {}
        self.counters, self.sums = self._telemetry.counters, Counter[str]()
        self._pinned, self._most_tokens = options.pin, options.engine.scheduler.max_num_batched_tokens
        self._max_registered = options.engine.adapters.max_registered
        self._num_versions, self._has_forgotten = 0, False
        self._unscheduled: dict[str, int] = {}  # tokens of admitted requests that vLLM has not scheduled yet
        self._failing: list[str] = []
        self._has_begun = False

    def add(self, request: Request, lora: tuple[str, str] | None, now: float) -> AdapterRef | None:
        """Add a request for an adapter of this name and path; return the adapter as vLLM's engine is to know it."""
        ref = None
        if lora is not None:
            try:
                version = self._version(*lora, now)
            except (AdapterError, OSError) as error:
                self.doomed[request.request_id] = str(error)
                return None
            ref = AdapterRef.of(version.key, version.source, version.file_key)
            request = replace(request, model=lora[0])
        self.add_request(request, now)
        return ref

    def _version(self, name: str, path: str, now: float) -> AdapterVersion:
        """Return the version that a name means now: another one where its path or its files have changed."""
        registry, key = self._registry, file_key(name, path)
        known = registry.get(name).version if name in registry else None
        if known is not None and (known.source, known.file_key) == (path, key):
            return known
        if known is not None:
            registry.set_pinned(name, False)  # the new version is read when its request needs it
        elif len(registry) == self._max_registered:
            self.adapters.unregister(registry.first(1)[0].name, now)
            self._has_forgotten = True  # from now on a name may have meant other weights
        self._num_versions += 1
        is_first = known is None and not self._has_forgotten
        known_as = name if is_first else f"{name}@{key or path}"  # a hub's files have no key
        version = make_version(AdapterRef(self._num_versions, known_as, path, key))
        self.adapters.register(name, version, now, replace=True, tier=Tier.DISK)
        registry.set_pinned(name, name in self._pinned)
        return version

    def finish(self, request_id: str, num_output_tokens: int, now: float, *, is_whole: bool) -> None:
        """Take out a request that has ended; ``is_whole`` if it ended by itself or at its longest answer."""
        self.doomed.pop(request_id, None)
        self._unscheduled.pop(request_id, None)
        if (sequence := self._sequences.get(request_id)) is not None:
            sequence.tokens += [0] * num_output_tokens
            is_answer = is_whole and num_output_tokens
            self._answers.finish(sequence, FinishReason.STOP if is_answer else FinishReason.CANCELLED, now)
            self._answers.take()
            self._answers.take_released()

    # -- a step of vLLM ----------------------------------------------------------------------------------------------

    def may_run(self, request_id: str, now: float) -> bool:
        """Return whether a waiting request may be scheduled in this step."""
        if not self._has_begun:
            self._has_begun = True
            budget = StepBudget(self._most_tokens - sum(self._unscheduled.values()), self._step_costs)
            for admitted, num_tokens in self._planner.admit(budget, now)[0]:
                self._unscheduled[admitted.request.request_id] = num_tokens
        sequence = self._sequences.get(request_id)
        return sequence is not None and sequence.status is SequenceStatus.RUNNING

    def scheduled(self, request_id: str) -> None:
        """Learn that vLLM has given a request its blocks: it runs, or fails with the next step."""
        self._unscheduled.pop(request_id, None)
        if request_id in self.doomed:
            self._failing.append(request_id)

    def end_step(self, now: float) -> SlotOrders:
        """End the scheduling of a step; return what it brings to the workers."""
        self._has_begun = False
        self._prefetcher.launch(now, is_busy=self.has_requests)
        orders, self._failing = SlotOrders(self._outbox.take(), tuple(self._failing)), []
        return orders

    def stepped(self, num_tokens: int, took_s: float) -> None:
        """Learn the duration of a step, for orders by size."""
        if self._step_costs.is_asked:
            self._step_costs.observe(StepLoad(num_tokens, 1, num_tokens, 0, 0, 0), took_s)

    def learn(self, report: Report, now: float) -> None:
        """Take in what workers report."""
        self.sums["num_blocking"] += report.num_blocking
        self._outbox.learn(report)
        for output in self.collect(now):
            self.doomed[output.request_id] = output.error or ""

    def _heard(self, event: Event) -> None:
        if isinstance(event, AdapterLoaded):
            self.sums["num_failed"] += event.error is not None
            self.sums[f"{event.tier.value}_s"] += event.took_s  # type: ignore[assignment]
        elif isinstance(event, RequestAdmitted) and not event.adapter_was_resident:
            self.sums["waited_s"] += event.waited_s  # type: ignore[assignment]

    def residency(self) -> dict[str, tuple[str, int]]:
        """Return the tier and the rank of every adapter above the disk, by its name in vLLM's API."""
        cache, found = self._cache, {}
        for key in (*cache.host.recent(), *cache.in_pages):  # the device last: it counts for both
            residency = cache.residencies[key]
            for name in self._registry.names_of(key) if residency.tier is not Tier.DISK else ():
                found[name] = residency.tier.value, residency.version.rank
        return found
