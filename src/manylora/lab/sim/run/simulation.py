"""A simulated run: a workload, one or more engines, and a virtual clock.

The server's own code schedules, caches and evicts; only the device is simulated. A run is a deterministic
function of its workload and its configuration, to the byte, on any machine.

::

    Workload --requests--> Dispatcher --+--> EngineCore 0 --> SimulatedExecutor (cost model)
                                        +--> EngineCore 1 --> ...          all on one VirtualClock
                                                 |
                                                 +--events--> Recorder --> records, timeline --> Summary

Only the simulated device knows the length of an answer: it ends the sequence with a token. The engine sees the cap
alone, as in a live run; the ``oracle`` and ``noisy`` predictors know the length.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from manylora.core.adapters.shape import BaseShape
from manylora.core.clock import VirtualClock
from manylora.core.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.core.engine.core import EngineCore
from manylora.core.engine.loop import RequestsByTime
from manylora.core.engine.status import EngineStats
from manylora.core.errors import ConfigError, ManyloraError
from manylora.core.events import EventSink
from manylora.core.options import check_options, option, require
from manylora.core.plan import AdapterLoad, PlannedSequence
from manylora.core.plugins import options_for
from manylora.core.ports import CoreParts
from manylora.core.routing import DEFAULT_ROUTER, ROUTERS, Dispatcher, ReplicaReport, Router, RouterContext, make_router
from manylora.core.scaling.autoscaler import ScalingDecision
from manylora.core.scaling.controller import ScalingController
from manylora.core.scaling.watch import LoadWatch, WatchedDispatcher
from manylora.core.scheduling import PREDICTORS, LengthPredictor, Sequence
from manylora.core.scheduling.prediction.predictor import NoisyPredictor, OraclePredictor
from manylora.core.types import Output, Request, SampledToken, SamplingParams, Tier
from manylora.lab.costs.fitted import MachineSpeed
from manylora.lab.costs.model import CostModel
from manylora.lab.costs.workers import AssistCost
from manylora.lab.measure import Recorder, RequestRecord, Slo, Summary, Timeline, summarise
from manylora.lab.sim.run.cold_steps import ColdSteps
from manylora.lab.sim.run.contents import PromptMaker, adapter_versions
from manylora.lab.sim.run.driver import drive
from manylora.lab.sim.run.executor import SimulatedExecutor
from manylora.lab.sim.run.scaling import ReplicaSpan, SimulatedScaling, SimulatedStarts
from manylora.lab.workloads import RequestSpec, Workload

__all__ = ["Progress", "Run", "SimulationConfig", "simulate"]

BASE_NAME = "base"
REPORT_EVERY_S = 1.0
"""Virtual seconds between two reports of the replicas to the router, at least: they come with a request."""

TOKEN, END = SampledToken(token_id=3), SampledToken(token_id=4)

Progress = Callable[[int, float], None]  # called with the number of ended requests, and the virtual time in seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """The engines that serve the workload."""

    base: BaseShape  # the base model's shape; a page spans all devices of a replica
    cost: CostModel  # times of steps and loads
    num_pages: int = option(at_least=2, help="Pages in each replica's pool.")
    # Adapters on the device of each replica, in slots of equal size beside KV that is never short, as in vLLM; a copy
    # begins once its whole adapter is read, and all adapters begin on disk. ``None`` for one pool.
    num_slots: int | None = option(None, at_least=1, help="Slots for adapters beside the pool.")
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    # Block size and prefix caching; its sizes are not used.
    memory: MemoryConfig = field(default_factory=lambda: MemoryConfig(prefix_caching=False))
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    num_replicas: int = option(
        1, at_least=1, help="Engines that share the workload; with ``scaling`` as many as that allows."
    )
    scaling: SimulatedScaling | None = None  # starts and drains engines over time; ``None`` for a fixed number
    router: str = DEFAULT_ROUTER  # name in ``routing.ROUTERS``, or a plug-in
    router_options: Mapping[str, Any] = field(default_factory=dict)
    scheduler_time_s: float = option(0.0, at_least=0, unit="s", help="Time to decide a step.")
    # Slow-down of a step by a load beside it, by tier; see ``SimulatedExecutor``.
    interference: Mapping[Tier, float] = field(default_factory=dict)
    # Whether steps can read an adapter's weights from host memory: by ``assist``, else in place.
    reads_host: bool = False
    waits_by_layer: bool = False  # whether steps can run on an adapter that is on its way, and wait for each layer
    assist: AssistCost | None = None  # prices CPU workers beside an accelerator
    all_resident: bool = False  # keep every adapter on the device from the start, in pages beside ``num_pages``
    # Makes the speed over time of the replica with this number; constant when ``None``.
    speed: Callable[[int], MachineSpeed | None] | None = None
    max_tokens: int | None = option(None, at_least=1, help="Cap of every request; as many as fit when ``None``.")
    # Set each request's cap to the length of its answer, as benchmark clients do; for engines that reserve it.
    exact_caps: bool = False
    sample_every_s: float = option(1.0, above=0, unit="s", help="Virtual time between two samples of the timeline.")
    seed: int = 0  # seeds the router and the noisy predictor

    def __post_init__(self) -> None:
        check_options(self)
        if self.num_slots is not None:
            is_possible = not (self.all_resident or self.memory.prefix_caching)
            require(is_possible, "num_slots", self.num_slots, "no slots with all_resident or prefix_caching")
        fleet = self.num_replicas if self.scaling is None else self.scaling.policy.max_replicas
        require(self.num_replicas == fleet, "num_replicas", self.num_replicas, f"{fleet}, as in scaling")
        if self.memory.block_size != self.base.page.block_size:
            raise ConfigError(f"Got block_size = {self.memory.block_size}, and a base with {self.base.page.block_size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The outcome of a simulated run."""

    workload: str
    records: list[RequestRecord]  # every request, in order of arrival; refused ones have an ``error``
    timelines: list[Timeline]  # a timeline for each replica
    stats: list[EngineStats]  # the counters of each engine at its end
    duration_s: float  # virtual time of the last event
    # The lives of replicas that were started and drained; empty for a fixed number.
    spans: list[ReplicaSpan] = field(default_factory=list)
    # Decisions about the number of replicas, with their times in seconds.
    decisions: list[tuple[float, ScalingDecision]] = field(default_factory=list)

    def summary(
        self, *, slo: Slo | None = None, warm_up_s: float = 0.0, group: Callable[[RequestRecord], str] | None = None
    ) -> Summary:
        """Return statistics of the run; see ``measure.summarise``."""
        return summarise(self.records, slo=slo, warm_up_s=warm_up_s, group=group)


def simulate(
    workload: Workload,
    config: SimulationConfig,
    *,
    on_progress: Progress | None = None,
    sinks: tuple[EventSink, ...] = (),
) -> Run:
    """Serve a workload to its end, in virtual time; ``sinks`` receive every event of every replica.

    ``ConfigError`` if the configuration names a policy, predictor or router that does not exist; ``AdapterError`` if an
    adapter applies to no module of the base; ``Stalled`` if a policy stranded a request.
    """
    fleet = _Fleet(workload, config, sinks, on_progress)
    arrivals = RequestsByTime(_arrivals(workload, config), on_rejected=fleet.refuse)
    drive(fleet.cores, fleet.clock, arrivals, dispatch=fleet.dispatch, on_outputs=fleet.take, starts=fleet.starts)
    return fleet.outcome()


class _Fleet:
    """The engines of a run on one clock, the dispatcher before them, and the records of their requests.

    Its arguments are those of ``simulate``.
    """

    def __init__(
        self, workload: Workload, config: SimulationConfig, sinks: tuple[EventSink, ...], on_progress: Progress | None
    ) -> None:
        self._workload, self._config, self._sinks, self._on_progress = workload, config, sinks, on_progress
        ranks = {spec.name: spec.rank for spec in workload.adapters}
        self._recorders = [
            Recorder(replica=index, ranks=ranks, sample_every_s=config.sample_every_s)
            for index in range(config.num_replicas)
        ]
        self._waiting: set[str] = set()
        self._num_ended, self._report_at = 0, REPORT_EVERY_S
        self._engines: list[EngineCore] = []  # every engine of the run
        self.cores: dict[int, EngineCore] = {}  # engines in use at this moment, by replica
        self.clock = VirtualClock()
        self.starts: SimulatedStarts | None = None
        self._dispatcher: Dispatcher | _OnlyReplica
        if config.scaling is None and config.num_replicas == 1:
            options_for("router", config.router, ROUTERS, config.router_options)  # names a mistake
            self._dispatcher = _OnlyReplica()
            self.cores[0] = self._start(0)
            return
        router, caches = _make_router(config, ranks), config.memory.prefix_caching
        if config.scaling is None:
            self._dispatcher = Dispatcher(router, config.num_replicas, ranks, caches_prefixes=caches)
            self.cores.update((replica, self._start(replica)) for replica in range(config.num_replicas))
            return
        watch = LoadWatch(config.scaling.policy.ttft_s)
        self._dispatcher = watched = WatchedDispatcher(
            router, config.num_replicas, ranks, watch=watch, now=self.clock.now, caches_prefixes=caches
        )
        scaler = None if config.scaling.make_scaler is None else config.scaling.make_scaler()
        controller = ScalingController(config.scaling.policy, watched.views, watch, scaler=scaler)
        self.starts = SimulatedStarts(
            config.scaling, controller, self.cores, self._start, self._begin, seed=config.seed
        )

    def _start(self, replica: int) -> EngineCore:
        recorder = self._recorders[replica]
        engine = _make_core(self._workload, self._config, replica, (recorder, *self._sinks))
        self._engines.append(engine)
        recorder.watch(engine.stats)
        return engine

    def _begin(self, replica: int) -> None:
        """Note that an engine takes requests from now on."""
        self._dispatcher.restarted(replica)
        self._report(replica)

    def _report(self, replica: int) -> None:
        report = ReplicaReport.of(self.cores[replica].stats(), self._config.memory.block_size)
        self._dispatcher.report(replica, report)

    def dispatch(self, request: Request) -> int:
        """Return the replica for a request; reports of all replicas that are due come first."""
        now = self.clock.now()
        if now >= self._report_at and len(self._recorders) > 1:
            self._report_at = now + REPORT_EVERY_S
            for replica in self.cores:
                self._report(replica)
        self._waiting.add(request.request_id)
        return self._dispatcher.dispatch(request, None if self.starts is None else self.starts.serving)

    def take(self, outputs: list[Output], now: float) -> None:
        """Note the outputs of an engine's turn."""
        num_ended = 0
        for output in outputs:
            if output.request_id in self._waiting:
                self._waiting.discard(output.request_id)
                self._dispatcher.started(output.request_id)
            if output.finish is not None:
                self._dispatcher.ended(output.request_id)
                num_ended += 1
        self._num_ended += num_ended
        if num_ended and self._on_progress is not None:
            self._on_progress(self._num_ended, now)

    def refuse(self, request: Request, error: ManyloraError, now: float) -> None:
        """Note a request that its engine refused."""
        self._num_ended += 1
        self._waiting.discard(request.request_id)
        self._recorders[self._dispatcher.ended(request.request_id)].refuse(request, error, now)

    def outcome(self) -> Run:
        """End the engines, and return the run."""
        if self.starts is not None:
            self.starts.close(self.clock.now())
        records = [record for recorder in self._recorders for record in recorder.records]
        return Run(
            workload=self._workload.name,
            records=sorted(records, key=lambda record: int(record.request_id)),
            timelines=[recorder.timeline for recorder in self._recorders],
            stats=[engine.stats() for engine in self._engines],
            duration_s=self.clock.now(),
            spans=[] if self.starts is None else self.starts.spans,
            decisions=[] if self.starts is None else self.starts.decisions,
        )


class _OnlyReplica:
    """Takes the place of a dispatcher before the only replica of a run, where there is nothing to choose or report."""

    def dispatch(self, request: Request, serving: Container[int] | None = None) -> int:
        return 0

    def started(self, request_id: str) -> None:
        pass

    def ended(self, request_id: str) -> int:
        return 0

    def report(self, replica: int, report: ReplicaReport) -> None:
        pass

    def restarted(self, replica: int) -> None:
        pass


class _WithoutLoads:
    """The cost of steps where adapters are on the device from the start."""

    def __init__(self, cost: CostModel) -> None:
        self.step_time_s = cost.step_time_s

    def load_time_s(self, load: AdapterLoad) -> float:
        return 0.0


def _make_router(config: SimulationConfig, ranks: Mapping[str, int]) -> Router:
    context = RouterContext(
        rng=Random(f"router/{config.seed}"),
        base_name=BASE_NAME,
        max_num_seqs=config.scheduler.max_num_seqs,
        ranks=ranks,
    )
    return make_router(config.router, context, config.router_options)


def _make_core(workload: Workload, config: SimulationConfig, replica: int, sinks: tuple[EventSink, ...]) -> EngineCore:
    lengths = [request.num_output_tokens for request in workload.requests]

    def choose(part: PlannedSequence) -> SampledToken:
        # A request's seed is its number in the workload.
        num_output = part.start + part.num_tokens - part.num_prompt_tokens + 1
        return END if num_output >= lengths[part.seed] else TOKEN

    def truth(sequence: Sequence) -> int:
        return lengths[sequence.seed]

    predictor: LengthPredictor | None = None  # the one that the configuration names
    if config.scheduler.predictor == "oracle":
        predictor = OraclePredictor(truth)
    elif config.scheduler.predictor == "noisy":
        options = options_for("predictor", "noisy", PREDICTORS, config.scheduler.predictor_options)
        predictor = NoisyPredictor(options.accuracy, config.seed, truth)
    scheduler = config.scheduler
    if config.assist is not None and scheduler.plan_ahead is None:  # on a device, by default it would be planned ahead
        scheduler = replace(scheduler, plan_ahead=False)
    versions, has_pool = adapter_versions(workload.adapters, config.base), config.num_slots is None
    if not has_pool:
        versions = {name: replace(version, num_pages=1) for name, version in versions.items()}
    num_resident_pages = sum(version.num_pages for version in versions.values()) if config.all_resident else 0
    cost = _WithoutLoads(config.cost) if config.all_resident else config.cost
    core = EngineCore(
        CoreParts(
            base=config.base,
            num_pages=config.num_slots or config.num_pages + num_resident_pages,
            executor=SimulatedExecutor(
                cost,
                vocab_size=config.base.vocab_size,
                choose=choose,
                scheduler_time_s=config.scheduler_time_s,
                interference=config.interference,
                speed=config.speed(replica) if config.speed is not None else None,
                cold_steps=ColdSteps(cost, config.base.num_layers if has_pool else 1, config.assist),
            ),
            reads_host=config.reads_host,
            waits_by_layer=config.waits_by_layer,
            chains_copies=not has_pool,
            has_kv=has_pool,
            is_accelerated=config.assist is not None,
        ),
        EngineConfig(
            model=ModelConfig(model="base"),
            scheduler=scheduler,
            memory=config.memory,
            adapters=config.adapters,
            seed=config.seed,
        ),
        served_name=BASE_NAME,
        sinks=sinks,
        predictor=predictor,
    )
    for name, version in versions.items():
        core.adapters.register(name, version, 0.0, tier=Tier.HOST if has_pool else Tier.DISK)
        if config.all_resident:
            core.adapters.pin(name, True, 0.0)
    return core


def _arrivals(workload: Workload, config: SimulationConfig) -> Iterator[tuple[float, Request]]:
    """Yield requests one by one, so that a long trace needs no memory."""
    prompts = PromptMaker(config.base.vocab_size, max((r.num_prompt_tokens for r in workload.requests), default=0))
    for index, spec in enumerate(workload.requests):
        yield (
            spec.arrival_s,
            Request(
                request_id=str(index),
                prompt=prompts.prompt(index, spec),
                sampling=SamplingParams(
                    max_tokens=_cap(spec, config), seed=index, stop_token_ids=(END.token_id,), ignore_eos=True
                ),
                model=spec.adapter or BASE_NAME,
                tenant=spec.tenant,
                weight=spec.weight,
            ),
        )


def _cap(spec: RequestSpec, config: SimulationConfig) -> int | None:
    """Return a request's cap: the configured one, cut to the context."""
    if config.exact_caps:
        return spec.num_output_tokens
    if config.max_tokens is None:
        return None
    return max(1, min(config.max_tokens, config.base.max_model_len - spec.num_prompt_tokens))
