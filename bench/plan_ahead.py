"""How long does a device stand still between two steps, planned one after the other or ahead?

    python bench/plan_ahead.py [--quick]

The real core, loop and wall clock, with a thread for a device: a step is a sleep, as long as a decode step of an 8B
model on a data-centre GPU, and like one it needs no Python meanwhile. *Gap* is from the end of a step to the beginning
of the next on that thread: taking tokens in, deciding, waking up. The time of a device's own inputs
(`results/graph_inputs.md`) is not in it. Every sequence has an adapter; requests arrive as others end. Both ways
alternate. Writes `bench/results/plan_ahead.json` and `.md`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise

import torch
from publishing import Others, arguments, publish, reason_to_refuse, table
from ratios import ratio_by_round

from manylora.core.adapters.shape import BaseShape
from manylora.core.clock import WallClock
from manylora.core.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.core.engine.core import EngineCore
from manylora.core.engine.loop import EngineLoop
from manylora.core.engine.steps.plan_ahead import fill_in
from manylora.core.plan import AdapterLoad, LoadResult, StepPlan, StepResult
from manylora.core.ports import CoreParts, Work
from manylora.core.types import AdapterKey, Request, SampledToken, SamplingParams, Tier
from manylora.execution.device import describe_machine
from manylora.execution.executor import FutureWork
from manylora.lab.bench.rounds import in_turns
from manylora.lab.catalog.models import base_shape
from manylora.lab.sim.run.contents import adapter_versions
from manylora.lab.sim.run.executor import SimulatedWork
from manylora.lab.workloads import AdapterSpec

STEP_S = 0.004
NUM_ADAPTERS = 64
WAYS = ("one by one", "ahead")
NUM_TOKENS = 200
"""Of an answer, on average: one of the batch ends every few steps."""


@dataclass(frozen=True)
class Gaps:
    """What stands between steps.

    Args:
        batch: Sequences in a step.
        plan_ahead: How they were planned.
        p50_us: The gap in the middle, in microseconds.
        p90_us: One in ten is longer.
        share: Of the time, that the device stood still.
        steps: Number of steps.
    """

    batch: int
    plan_ahead: bool
    p50_us: float
    p90_us: float
    share: float
    steps: int


class SleepingDevice:
    """Sleeps for every step, on a thread of its own.

    Args:
        clock: Woken when a step is over.
    """

    def __init__(self, clock: WallClock) -> None:
        self._clock = clock
        self._thread = ThreadPoolExecutor(1)
        self._tokens: dict[int, SampledToken] = {}
        self.spans: list[tuple[float, float, int]] = []

    def launch(self, plan: StepPlan, now: float) -> Work:
        """Start a step."""
        future = self._thread.submit(self._run, plan)
        future.add_done_callback(lambda _: self._clock.wake())
        return FutureWork(future)

    def _run(self, plan: StepPlan) -> StepResult:
        began_at = time.perf_counter()
        plan = fill_in(plan, self._tokens)
        time.sleep(STEP_S)
        self._tokens = {part.seq_id: SampledToken(token_id=7) for part in plan.sequences if part.is_sampled}
        self.spans.append((began_at, time.perf_counter(), len(plan.sequences)))
        return StepResult(tokens=self._tokens)

    def load_adapter(self, load: AdapterLoad, now: float) -> Work:
        """Load at once."""
        return SimulatedWork(0.0, LoadResult())

    def drop_adapter(self, key: AdapterKey, tier: Tier) -> None:
        """Nothing is kept."""


def measure(base: BaseShape, batch: int, *, plan_ahead: bool, num_steps: int) -> Gaps:
    clock = WallClock()
    device = SleepingDevice(clock)
    core = EngineCore(
        CoreParts(base=base, num_pages=1 << 16, executor=device),
        EngineConfig(
            model=ModelConfig(model="base"),
            scheduler=SchedulerConfig(max_num_seqs=batch, plan_ahead=plan_ahead),
            memory=MemoryConfig(),
            adapters=AdapterConfig(),
        ),
        served_name="base",
    )
    specs = [AdapterSpec(name=f"a{index}", rank=16, targets=("q_proj", "v_proj")) for index in range(NUM_ADAPTERS)]
    for name, version in adapter_versions(specs, base).items():
        core.adapters.register(name, version, clock.now())

    def arrivals() -> Iterator[tuple[float, Request]]:
        """As many as it takes: the next one a few steps after an answer's end."""
        index = 0
        while len(device.spans) < num_steps:
            length = NUM_TOKENS // 2 + (index * 7919) % NUM_TOKENS
            yield (
                0.0 if index < 2 * batch else clock.now() + STEP_S * NUM_TOKENS / batch,
                Request(
                    request_id=str(index),
                    prompt=(1,) * 100,
                    sampling=SamplingParams(max_tokens=length, ignore_eos=True),
                    model=f"a{index % NUM_ADAPTERS}",
                ),
            )
            index += 1

    # A server would send outputs to its API process; that is measured elsewhere.
    EngineLoop(core, clock, on_outputs=lambda outputs, now: None, arrivals=arrivals()).run()
    full = [span for span in device.spans if span[2] >= 0.9 * batch][20:]
    gaps = [after[0] - before[1] for before, after in pairwise(full)]
    gaps = [gap for gap in gaps if gap < 10 * STEP_S]  # steps between them were not full
    deciles = statistics.quantiles(gaps, n=10)
    took_s = sum(end - begin for begin, end, _ in full)
    share = sum(gaps) / (sum(gaps) + took_s)
    return Gaps(batch, plan_ahead, statistics.median(gaps) * 1e6, deciles[8] * 1e6, share, len(gaps))


def main() -> None:
    parser = arguments(__doc__, quick="few steps, one round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    num_rounds, num_steps = (1, 100) if options.quick else (options.rounds, 600)
    base, others = base_shape("llama-3-8b", block_size=16), Others()
    found: list[Gaps] = []
    rows = []
    for batch in (1, 32, 64, 128, 256):
        rounds: dict[str, list[Gaps]] = {WAYS[0]: [], WAYS[1]: []}
        for _, way in in_turns(WAYS, num_rounds, num_warm_up=0):
            rounds[way].append(measure(base, batch, plan_ahead=way == WAYS[1], num_steps=num_steps))
        found += rounds[WAYS[0]] + rounds[WAYS[1]]
        steps_per_s = [[1.0 - one.share for one in rounds[way]] for way in reversed(WAYS)]
        cells = [cell for way in WAYS for cell in _middle(rounds[way])]
        rows.append((batch, *cells, ratio_by_round(*steps_per_s)))
    busy_share = others.share()
    heads = (
        "batch",
        "gap P50",
        "P90",
        "of the time",
        "ahead: P50",
        "P90",
        "of the time",
        "steps a second, ahead over not",
    )
    head = HEAD.format(
        machine=describe_machine(torch.device("cpu")), busy=busy_share, step_ms=STEP_S * 1e3, rounds=num_rounds
    )
    text = "\n".join([head, *table(heads, rows, left=0)])
    refused = reason_to_refuse(num_rounds, busy_share)
    publish("plan_ahead", [asdict(one) for one in found], text, is_kept=not options.quick, refused=refused)


def _middle(rounds: list[Gaps]) -> list[str]:
    p50, p90, share = zip(*((one.p50_us, one.p90_us, one.share) for one in rounds), strict=True)
    return [f"{statistics.median(p50):.0f}", f"{statistics.median(p90):.0f}", f"{statistics.median(share):.1%}"]


HEAD = """# The gap between two steps

`python bench/plan_ahead.py` on {machine}: how long a device that takes {step_ms:.0f} ms a step stands still between
two of them, in microseconds; the real core and loop, every sequence with an adapter. {rounds} rounds of 600 steps, both
ways in turn: medians, and in the last column the ratio of each round, its median and a 95 % interval. Others took
{busy:.1%} of the machine's processor time.
"""


if __name__ == "__main__":
    main()
