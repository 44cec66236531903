"""The cost of a scheduling decision: planning one step with many running and waiting requests and many adapters.

    python bench/decision.py [--quick] [--policy fifo] [--rounds 5]

The real core on an executor that does nothing and is done at once. Every sequence decodes, requests end all the
time and others take their place, the pool is too small for all adapters, so that a step admits, loads and evicts
as it would in service. Timed is `launch` (squash, plan, admit, describe), which is what stands between two steps
of the device, and beside it the whole turn with `collect` (taking tokens in, ending requests). The *floor* is what no
planner in Python can leave out: a look at the pages of each running sequence, and its record in the plan; nothing for
those that wait. Writes `results/decision.json` and `.md`.
"""

from __future__ import annotations

import gc
import platform
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from time import perf_counter, thread_time

from publishing import Others, arguments, middle_of_rounds, publish, reason_to_refuse, table

from manylora.core.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.core.engine.core import EngineCore
from manylora.core.plan import AdapterLoad, LoadResult, PlannedSequence, StepPlan, StepResult
from manylora.core.ports import CoreParts
from manylora.core.scheduling import POLICIES
from manylora.core.types import AdapterKey, AdapterVersion, Request, SampledToken, SamplingParams, Tier
from manylora.lab.bench.rounds import in_turns
from manylora.lab.catalog.models import base_shape
from manylora.lab.sim.run.executor import SimulatedWork

STEP_S = 0.03
TOKEN = SampledToken(token_id=1)
BLOCK_SIZE = MemoryConfig().block_size


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything, and the microseconds that one decision may take; ``used`` adapters are asked, or all.

    The requests are of ``tenants`` in turn.
    """

    running: int
    waiting: int
    adapters: int
    goal_us: float
    used: int | None = None
    tenants: int = 1


SCALES = (Scale(64, 1_000, 1_000, 50.0), Scale(128, 3_000, 3_000, 500.0), Scale(256, 10_000, 10_000, 1500.0))
"""From a small service to more than one engine ever has."""


@dataclass(slots=True)
class _Step:
    """A step that was over when it began; its result is made when it is asked for."""

    ready_at: float
    tokens: dict[int, SampledToken]

    def poll(self, now: float) -> StepResult:
        return StepResult(tokens=self.tokens)


class _NullExecutor:
    """Does nothing; a load takes two steps' time.

    Attributes:
        planned: The sequences of the last step.
        tokens: The tokens of the last step, which are made between two turns.
    """

    def __init__(self) -> None:
        self.planned: Sequence[PlannedSequence] = ()
        self.tokens: dict[int, SampledToken] = {}

    def launch(self, plan: StepPlan, now: float) -> _Step:
        self.planned, self.tokens = plan.sequences, {}
        return _Step(now, self.tokens)

    def run(self) -> None:
        self.tokens.update({part.seq_id: TOKEN for part in self.planned if part.is_sampled})

    def load_adapter(self, load: AdapterLoad, now: float) -> SimulatedWork:
        return SimulatedWork(now + 2 * STEP_S, LoadResult())

    def drop_adapter(self, key: AdapterKey, tier: Tier) -> None:
        pass


@dataclass(frozen=True, slots=True)
class DecisionCost:
    """Microseconds a step, over the steps timed in one round; ``launch_cpu_us`` is the thread's processor time.

    ``floor_us`` is that of ``records``.
    """

    policy: str
    running: int
    waiting: int
    adapters: int
    goal_us: float
    launch_us: float
    launch_p90_us: float
    launch_cpu_us: float
    floor_us: float
    turn_us: float
    admitted_per_step: float
    mean_running: float


def records(planned: Sequence[PlannedSequence]) -> list[PlannedSequence]:
    """Write the records of a step's sequences again, those that their pages have room for."""
    return [
        PlannedSequence(
            one.seq_id,
            one.tokens,
            one.num_prompt_tokens,
            one.start,
            one.num_tokens,
            one.pages,
            one.adapter,
            one.rank,
            one.sampling,
            one.is_sampled,
            one.seed,
            one.awaits_token,
            one.placement,
        )
        for one in planned
        if one.start < len(one.pages) * BLOCK_SIZE
    ]


def synthetic_version(index: int) -> AdapterVersion:
    """Return a version of two to twenty pages without weights."""
    num_pages = (2, 3, 5, 10, 20)[index % 5]
    return AdapterVersion(
        key=AdapterKey(f"{index:032x}"),
        source="",
        rank=8,
        num_modules=1,
        target_modules=("q_proj",),
        num_pages=num_pages,
        weight_bytes=num_pages << 21,
        host_bytes=num_pages << 21,
        disk_bytes=num_pages << 21,
    )


class FullEngine:
    """An engine whose every decision has something to admit, load and evict.

    What waits is counted from the plans: `EngineCore.stats` walks every request, and a decision right after that
    would be timed with the processor's caches emptied.

    Args:
        policy: Scheduling policy.
        eviction: Eviction policy of adapters.
        scale: Running and waiting requests, and adapters.
    """

    def __init__(self, policy: str, eviction: str, scale: Scale) -> None:
        self.num_asked = 0
        self._scale = scale
        self._now = 0.0
        self._rng = random.Random(0)
        self._executor = _NullExecutor()
        self._admitted: set[int] = set()
        self.core = EngineCore(
            CoreParts(base=base_shape("llama-3-8b"), num_pages=scale.running * 40, executor=self._executor),
            EngineConfig(
                model=ModelConfig(model="base"),
                scheduler=SchedulerConfig(
                    policy=policy, max_num_seqs=scale.running, max_waiting=10 * scale.waiting, predictor="noisy"
                ),
                memory=MemoryConfig(prefix_caching=False),
                adapters=AdapterConfig(eviction=eviction, host_bytes=1 << 50),
            ),
            served_name="base",
        )
        for index in range(scale.adapters):
            self.core.adapters.register(f"a{index}", synthetic_version(index), 0.0)
        # Zipf popularity with the exponent of real adapters.
        num_used = scale.adapters if scale.used is None else min(scale.used, scale.adapters)
        weights = [(rank + 1) ** -0.92 for rank in range(num_used)]
        names = [f"a{index}" for index in range(num_used)]
        self._names = iter(self._rng.choices(names, weights=weights, k=400_000))

    def turn(self) -> tuple[float, float, float, float]:
        """Run one turn of the loop.

        Returns:
            Seconds of ``launch``, of the turn, of ``launch`` on a processor, and of ``records`` for the same step.
        """
        self._now += STEP_S
        while self.num_asked - len(self._admitted) < self._scale.waiting:
            self._ask()
        began = perf_counter()
        self.core.collect(self._now)
        planned, cpu_before = perf_counter(), thread_time()
        self.core.launch(self._now)
        cpu_after, ended = thread_time(), perf_counter()
        self._executor.run()
        self._admitted.update(part.seq_id for part in self._executor.planned)
        floor_began = perf_counter()
        records(self._executor.planned)
        return ended - planned, ended - began, cpu_after - cpu_before, perf_counter() - floor_began

    @property
    def num_running(self) -> int:
        """Sequences of the last step."""
        return len(self._executor.planned)

    def _ask(self) -> None:
        self.num_asked += 1
        prompt = tuple(range(self._rng.randint(16, 128)))
        sampling = SamplingParams(max_tokens=self._rng.randint(10, 200), ignore_eos=True)
        request = Request(
            request_id=f"r{self.num_asked}",
            prompt=prompt,
            sampling=sampling,
            model=next(self._names),
            tenant=f"t{self.num_asked % self._scale.tenants}",
        )
        self.core.add_request(request, self._now)


def measure_decision(policy: str, eviction: str, scale: Scale, *, num_steps: int) -> DecisionCost:
    """Fill an engine, let it settle, and time so many steps."""
    engine = FullEngine(policy, eviction, scale)
    for _ in range(200):
        engine.turn()
    num_before, num_running = engine.num_asked, 0
    times = []
    gc.collect()
    gc.freeze()
    for _ in range(num_steps):
        times.append([1e6 * seconds for seconds in engine.turn()])
        num_running += engine.num_running
    gc.unfreeze()
    launches, turns, cpu, floors = zip(*times, strict=True)
    return DecisionCost(
        policy=policy,
        running=scale.running,
        waiting=scale.waiting,
        adapters=scale.adapters,
        goal_us=scale.goal_us,
        launch_us=median(launches),
        launch_p90_us=quantiles(launches, n=10)[-1],
        launch_cpu_us=median(cpu),
        floor_us=median(floors),
        turn_us=median(turns),
        admitted_per_step=(engine.num_asked - num_before) / num_steps,
        mean_running=num_running / num_steps,
    )


def decision_table(
    costs: Sequence[DecisionCost], *, command: str, eviction: str, num_steps: int, busy_share: float
) -> str:
    """Return costs, of any number of rounds, as Markdown."""
    cases: dict[tuple[int, str], list[DecisionCost]] = {}
    for cost in costs:
        cases.setdefault((cost.running, cost.policy), []).append(cost)
    num_rounds = len(next(iter(cases.values())))
    heads = (
        *("policy", "running", "waiting", "adapters", "decision", "processor", "its P90", "goal", "floor", "turn"),
        "admitted a step",
    )
    rows = []
    for (running, policy), rounds in cases.items():
        one = rounds[0]
        middle = {
            name: median(getattr(each, name) for each in rounds)
            for name in ("mean_running", "launch_cpu_us", "launch_p90_us", "floor_us", "turn_us", "admitted_per_step")
        }
        row = [policy, f"{middle['mean_running']:.0f} of {running}", f"{one.waiting:,}", f"{one.adapters:,}"]
        row += [middle_of_rounds([each.launch_us for each in rounds]), f"{middle['launch_cpu_us']:.0f}"]
        row += [f"{middle['launch_p90_us']:.0f}", f"{one.goal_us:.0f}"]
        row += [f"{middle['floor_us']:.0f}", f"{middle['turn_us']:.0f}"]
        rows.append([*row, f"{middle['admitted_per_step']:.2f}"])
    lines = [
        "# The cost of a scheduling decision",
        "",
        f"`{command}`: {num_rounds} rounds of {num_steps} steps, medians in microseconds, eviction `{eviction}`, "
        f"Python {platform.python_version()} on {platform.machine()}, one core. Other processes took {busy_share:.1%} "
        "of the machine's processor time. The *decision* is `EngineCore.launch`: which sequences are squashed, run and "
        "admitted, which adapters are loaded and evicted for them, and the plan of the step; its median over the "
        "rounds has a 95 % interval. *Processor* is the thread's processor time of the same. The *floor* is a look at "
        "each running sequence's pages, and its record. The *turn* adds `collect`: tokens taken in, requests ended.",
        "",
        *table(heads, rows),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__, quick="the smallest scale, one short round")
    parser.add_argument("--policy", choices=sorted(POLICIES), action="append", help="repeatable; by default all")
    parser.add_argument("--eviction", default=AdapterConfig().eviction, help="eviction policy of adapters")
    parser.add_argument("--steps", type=int, default=1000, help="timed at each scale")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rounds, num_steps = (1, 20) if options.quick else (options.rounds, options.steps)
    others = Others()
    costs = []
    for scale in SCALES[:1] if options.quick else SCALES:
        for _, name in in_turns(options.policy or sorted(POLICIES), rounds, num_warm_up=0):
            print(f"{name}, {scale.running} running, {scale.waiting:,} waiting", flush=True)
            costs.append(measure_decision(name, options.eviction, scale, num_steps=num_steps))
    busy_share = others.share()
    command = f"python bench/decision.py --rounds {rounds}"
    text = decision_table(costs, command=command, eviction=options.eviction, num_steps=num_steps, busy_share=busy_share)
    report = {"command": command, "busy_share": busy_share, "costs": [asdict(cost) for cost in costs]}
    refused = reason_to_refuse(rounds, busy_share)
    publish("decision", report, text, is_kept=not options.quick, refused=refused)


if __name__ == "__main__":
    main()
