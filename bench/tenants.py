"""Do tenants disturb each other? Fair shares against arrival and against limits, in virtual time.

    python bench/tenants.py [--quick]

Simulated: Llama-3-8B on an H100, chats with prompts of 100 to 400 tokens and answers of 50 to 150, an adapter for each
tenant. The *capacity* is the rate at which a queue that never empties is served.

1. *Two tenants* with equal weights. `light` asks for half of its share, `flood` for 50 times its own. How late are the
   first tokens of `light`, beside those when `flood` keeps to its share, and when `light` has the device for itself?
   Under `fifo`, under `fifo` with a limit of requests in ten seconds at `flood`'s share, and under `fair`. And what
   does `flood` get of the capacity that `light` leaves?
2. *Weights*: two tenants that both flood, with weights 1 and 3. How are tokens split?
3. *A thousand tenants*: 999 ask for 70 % (and 85 %) of the capacity together, one for 100 times what each of them
   does. Beside the run without that one: the first tokens of the others, and Jain's index of the part of its tokens
   that each tenant got within 10 s of asking.
4. *A decision* with one tenant and with a thousand (`decision.py`; processor time, rounds in turns).

Writes `results/tenants.json` and `.md`.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
from decision import SCALES, measure_decision
from publishing import arguments, publish, table
from ratios import ratio_by_round

from manylora.core.config import SchedulerConfig
from manylora.core.types import AdapterKey
from manylora.lab.bench.rounds import in_turns
from manylora.lab.costs.model import SyntheticSequence, synthetic_plan
from manylora.lab.measure import RequestRecord
from manylora.lab.sim.run.simulation import simulate
from manylora.lab.sim.setup import Setup, make_config
from manylora.lab.workloads import AdapterSpec, RequestSpec, Workload

MODEL, HARDWARE = "llama-3-8b", "h100"
PROMPT, ANSWER = (100, 400), (50, 150)
WARM_UP_S = 5.0
WINDOW_S = 10.0
SOON_S = 10.0
MANY = 1000
BASE_LOADS = (0.7, 0.85)
NUM_SEEDS = 5


@dataclass(frozen=True, slots=True)
class Engine:
    """Most running sequences, and most tokens of a step."""

    seats: int
    batch: int


ENGINES = {"seats are short": Engine(32, 2048), "steps are full": Engine(128, 512)}
"""What a flood takes from others: places in steps that have room, or the room in steps."""


def stream(tenant: str, rate: float, seconds: float, seed: int, *, weight: float = 1.0) -> list[RequestSpec]:
    """Return the requests of a tenant: a Poisson process, lengths spread evenly."""
    rng = np.random.default_rng(seed)
    times = np.sort(rng.uniform(0.0, seconds, rng.poisson(rate * seconds)))
    prompts, answers = rng.integers(*PROMPT, len(times)), rng.integers(*ANSWER, len(times))
    return [
        RequestSpec(
            arrival_s=at,
            num_prompt_tokens=prompt,
            num_output_tokens=answer,
            adapter=f"of-{tenant}",
            tenant=tenant,
            weight=weight,
        )
        for at, prompt, answer in zip(times.tolist(), prompts.tolist(), answers.tolist(), strict=True)
    ]


def limited(requests: Iterable[RequestSpec], rate: float) -> list[RequestSpec]:
    """Return the requests that a limit for each window of ``WINDOW_S`` lets pass."""
    counts: Counter[int] = Counter()
    kept = []
    for one in requests:
        window = int(one.arrival_s // WINDOW_S)
        counts[window] += 1
        if counts[window] <= rate * WINDOW_S:
            kept.append(one)
    return kept


Pairs = list[tuple[RequestSpec, RequestRecord]]


def run(engine: Engine, requests: Iterable[RequestSpec], policy: str, **options: object) -> Pairs:
    """Serve requests in virtual time; return each with its record."""
    ordered = tuple(sorted(requests, key=lambda one: one.arrival_s))
    names = sorted({one.adapter for one in ordered if one.adapter is not None})
    workload = Workload(
        name="tenants", requests=ordered, adapters=tuple(AdapterSpec(name=name, rank=16) for name in names)
    )
    scheduler = SchedulerConfig(
        policy=policy,
        policy_options=options,
        max_num_seqs=engine.seats,
        max_num_batched_tokens=engine.batch,
        max_waiting=10_000_000,
        predictor="oracle",
    )
    config = make_config(Setup(model=MODEL, hardware=HARDWARE, scheduler=scheduler))
    return list(zip(ordered, simulate(workload, config).records, strict=True))


def capacity(engine: Engine) -> float:
    """Return the requests per second of a queue that never empties."""
    done = run(engine, stream("a", 2000.0, 2.0, 0), "fifo")
    ends = sorted(record.finished_at for _, record in done)
    return len(ends) * 0.8 / (ends[int(0.9 * len(ends))] - ends[int(0.1 * len(ends))])


def ttft_ms(pairs: Pairs, tenants: frozenset[str] | None = None) -> tuple[float, float]:
    """Return the median and the 99th percentile of the time to first token, after the warm-up, in milliseconds."""
    waits = [
        1e3 * record.ttft_s
        for spec, record in pairs
        if spec.arrival_s >= WARM_UP_S and record.ttft_s is not None and (tenants is None or spec.tenant in tenants)
    ]
    return float(np.percentile(waits, 50)), float(np.percentile(waits, 99))


def tokens_by(pairs: Pairs, begin_s: float, end_s: float) -> Counter[str]:
    """Return tokens of answers by tenant between two times, an answer's spread evenly from its first to its last."""
    tokens: Counter[str] = Counter()
    for spec, record in pairs:
        if record.first_token_at is None:
            continue
        span_s = max(1e-9, record.finished_at - record.first_token_at)
        part = max(0.0, min(end_s, record.finished_at) - max(begin_s, record.first_token_at)) / span_s
        tokens[spec.tenant] += part * spec.num_output_tokens  # type: ignore[assignment]
    return tokens


def two_tenants(engine: Engine, seconds: float) -> dict[str, Any]:
    """Measure the light tenant beside a flood, under each order."""
    share = capacity(engine) / 2
    light = stream("light", share / 2, seconds, 1)
    polite, flood = stream("flood", share, seconds, 2), stream("flood", 50 * share, seconds, 3)
    cases = {
        "`light` alone": run(engine, light, "fair"),
        "`flood` keeps to its share, `fair`": run(engine, [*light, *polite], "fair"),
        "flood, `fifo`": run(engine, [*light, *flood], "fifo"),
        "flood, `fifo`, a limit each 10 s": run(engine, [*light, *limited(flood, share)], "fifo"),
        "flood, `fair`": run(engine, [*light, *flood], "fair"),
        "flood, `fair`, no burst": run(engine, [*light, *flood], "fair", fair_burst_s=0),
    }
    figures = {}
    for name, pairs in cases.items():
        tokens = tokens_by(pairs, WARM_UP_S, seconds)
        figures[name] = {
            "ttft_ms": ttft_ms(pairs, frozenset(["light"])),
            "light_tokens_per_s": tokens["light"] / (seconds - WARM_UP_S),
            "flood_tokens_per_s": tokens["flood"] / (seconds - WARM_UP_S),
            "squashes": sum(record.num_squashes for _, record in pairs),
        }
    return figures


def by_seed(engine: Engine, seconds: float, seeds: Sequence[int]) -> dict[str, Any]:
    """Return the P99 of the light tenant for several seeds, alone, beside a polite other and beside a flood."""
    share = capacity(engine) / 2
    found: dict[str, Any] = {"alone": [], "polite": [], "flood": [], "floor": floor_ms(engine)}
    for seed in seeds:
        light = stream("light", share / 2, seconds, 10 * seed + 1)
        others = {
            "alone": [],
            "polite": stream("flood", share, seconds, 10 * seed + 2),
            "flood": stream("flood", 10 * share, seconds, 10 * seed + 3),
        }
        for name, beside in others.items():
            found[name].append(ttft_ms(run(engine, [*light, *beside], "fair"), frozenset(["light"]))[1])
    return found


def floor_ms(engine: Engine) -> float:
    """Return the P99 of a first token beside a flood if no order could do better.

    A request comes at any time of a step, waits for its end, and has its whole prompt in the next one, beside a token
    of every other sequence. Steps are of decoding alone if the flood's prompts can be spread (fewer tokens come than
    make a step longer), else full.
    """
    cost = make_config(Setup(model=MODEL, hardware=HARDWARE)).cost
    rng = np.random.default_rng(0)
    decoding = [SyntheticSequence(300, 1, AdapterKey("flood"), 16) for _ in range(engine.seats - 1)]

    def step_ms(num_tokens: int) -> float:
        plan = synthetic_plan([*decoding, SyntheticSequence(0, max(1, num_tokens), AdapterKey("light"), 16)])
        return 1e3 * cost.step_time_s(plan)

    per_step = engine.seats / np.mean(ANSWER) * np.mean(PROMPT)
    before = step_ms(min(engine.batch - engine.seats, int(per_step)))
    own = [step_ms(int(num)) for num in rng.integers(*PROMPT, 2000)]
    return float(np.percentile(rng.uniform(0.0, before, 2000) + own, 99))


def weights(engine: Engine, seconds: float) -> dict[str, float]:
    """Return tokens per second of two tenants that both flood, with weights 1 and 3."""
    rate = capacity(engine)
    both = [*stream("one", 2 * rate, seconds, 4), *stream("three", 2 * rate, seconds, 5, weight=3.0)]
    tokens = tokens_by(run(engine, both, "fair"), WARM_UP_S, seconds)
    return {name: tokens[name] / (seconds - WARM_UP_S) for name in ("one", "three")}


def thousand(engine: Engine, load: float, seconds: float, seed: int = 0) -> dict[str, Any]:
    """Measure 999 tenants with and without one that asks for a hundred times as much."""
    each, first = load * capacity(engine) / (MANY - 1), 100 + 5000 * seed
    others = [one for index in range(MANY - 1) for one in stream(f"t{index:03}", each, seconds, first + index)]
    names = frozenset(one.tenant for one in others)
    flood = stream("flood", 100 * each, seconds, 6 + seed)
    figures = {}
    for name, policy, requests in (
        ("without it, `fair`", "fair", others),
        ("with it, `fifo`", "fifo", [*others, *flood]),
        ("with it, `fair`", "fair", [*others, *flood]),
    ):
        pairs = run(engine, requests, policy)
        figures[name] = {"ttft_ms": ttft_ms(pairs, names), "jain": jain(soon(pairs, names))}
    return figures


def soon(pairs: Pairs, names: frozenset[str]) -> Mapping[str, float]:
    """Return for each tenant the part of the tokens it asked for that it got within ``SOON_S`` of asking."""
    asked: Counter[str] = Counter()
    got: Counter[str] = Counter()
    for spec, record in pairs:
        if spec.tenant in names:
            asked[spec.tenant] += spec.num_output_tokens
            got[spec.tenant] += spec.num_output_tokens if record.e2e_s <= SOON_S else 0
    return {name: got[name] / num for name, num in asked.items()}


def jain(shares: Mapping[str, float]) -> float:
    """Return Jain's index of fairness: 1 if all are equal, 1 / n if one has all."""
    values = np.array(list(shares.values()))
    return float(values.sum() ** 2 / (len(values) * (values**2).sum())) if values.any() else 0.0


def decisions(rounds: int, num_steps: int) -> dict[str, list[float]]:
    """Return the processor time of a decision in microseconds, by case and round."""
    cases = {"`fifo`": ("fifo", 1), "`fair`, 1 tenant": ("fair", 1), "`fair`, 1,000 tenants": ("fair", MANY)}
    costs: dict[str, list[float]] = {name: [] for name in cases}
    for _, name in in_turns(list(cases), rounds, num_warm_up=0):
        policy, num_tenants = cases[name]
        scale = replace(SCALES[0], tenants=num_tenants)
        costs[name].append(measure_decision(policy, "price", scale, num_steps=num_steps).launch_cpu_us)
    return costs


def text_of(figures: dict[str, Any], command: str) -> str:
    """Return the figures as Markdown."""
    split, costs = figures["weights"], figures["decisions"]
    one = median(costs["`fair`, 1 tenant"])
    lines = [
        "# Tenants that share an engine",
        "",
        f"`{command}`: {MODEL} on a simulated {HARDWARE.upper()}, prompts of {PROMPT[0]} to {PROMPT[1]} tokens and "
        f"answers of {ANSWER[0]} to {ANSWER[1]}, an adapter for each tenant. Times to first token in milliseconds.",
        "",
        "## Two tenants, one at 50 times its share",
        "",
        "`light` asks for half of its share. The columns of ratios divide the P99 by the P99 when the other tenant "
        "keeps to its share, and when there is no other. Where steps are full, the second cannot be 1: a request waits "
        "for the step that runs, and each step has the other's tokens in it.",
    ]
    for name, two in figures["two_tenants"].items():
        engine = ENGINES[name]
        lines += ["", f"{name.capitalize()} ({engine.seats} sequences, {engine.batch:,} tokens a step):", ""]
        lines += table(
            ("case", "P50", "P99", "to a polite other", "to alone", "light tok/s", "flood tok/s", "squashed"),
            rows_of_two(two),
        )
    lines += ["", "### Five seeds", ""]
    lines += [
        "The P99 of `light` by seed (some 190 requests in the first case, 400 in the second), and its ratio to that of "
        "`light` alone: median and 95 % interval. The flood asks for ten times its share, which to an order is as much "
        "as fifty: some of it always waits. The floor is the P99 if each request waited for the step that runs and had "
        "its whole prompt in the next one, beside decoding alone: the residual of a step, and a step.",
        "",
    ]
    rows = []
    for name, by in figures["by_seed"].items():
        for case in ("polite", "flood"):
            each = ", ".join(f"{one:.0f}" for one in by[case])
            rows.append([name, case, each, ratio_by_round(by[case], by["alone"]), ""])
        alone = ", ".join(f"{one:.0f}" for one in by["alone"])
        rows.append([name, "alone", alone, "", f"{by['floor']:.0f}, {by['floor'] / median(by['alone']):.2f}"])
    lines += table(("engine", "beside", "P99 by seed, ms", "to alone", "floor, and to alone"), rows, left=3)
    lines += ["", "## Weights", ""]
    lines += [
        f"Both flood, with weights 1 and 3: {split['one']:.0f} and {split['three']:.0f} tokens a second, a ratio of "
        f"{split['three'] / split['one']:.2f}.",
        "",
        f"## {MANY:,} tenants, one at 100 times what each other asks for",
        "",
        "The load is what the others ask for together. The ratio is of the P99 to its P99 without the one: the median "
        f"of {len(next(iter(figures['thousand'].values())))} seeds and its 95 % interval. Of Jain's indices the least.",
        "",
    ]
    rows = []
    for load, seeds in figures["thousand"].items():
        base = [each["without it, `fair`"]["ttft_ms"][1] for each in seeds]
        for name in seeds[0]:
            p50, p99 = (median(each[name]["ttft_ms"][place] for each in seeds) for place in (0, 1))
            ratio = ratio_by_round([each[name]["ttft_ms"][1] for each in seeds], base)
            worst = min(each[name]["jain"] for each in seeds)
            rows.append([load, name, f"{p50:.0f}", f"{p99:.0f}", ratio, f"{worst:.3f}"])
    lines += table(("load", "case", "P50 of the others", "P99", "ratio", "Jain"), rows, left=2)
    lines += [
        "",
        "## A decision",
        "",
        "Processor time of `EngineCore.launch`, 64 running and 1,000 waiting, medians of "
        f"{len(costs['`fifo`'])} rounds in turns, Python {platform.python_version()} on {platform.machine()}.",
        "",
        *table(
            ("order", "microseconds", "to one tenant"),
            [[name, f"{median(each):.1f}", f"{median(each) / one:.2f}"] for name, each in costs.items()],
        ),
    ]
    return "\n".join(lines)


def rows_of_two(two: dict[str, Any]) -> list[list[object]]:
    """Return the table's rows about two tenants."""
    polite = two["`flood` keeps to its share, `fair`"]["ttft_ms"][1]
    alone = two["`light` alone"]["ttft_ms"][1]
    return [
        [
            name,
            *(f"{value:,.0f}" for value in case["ttft_ms"]),
            *(f"{case['ttft_ms'][1] / other:,.2f}" for other in (polite, alone)),
            *(f"{case[f'{tenant}_tokens_per_s']:,.0f}" for tenant in ("light", "flood")),
            case["squashes"],
        ]
        for name, case in two.items()
    ]


def main() -> None:
    """Measure and publish."""
    parser = arguments(__doc__, quick="short runs")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    seconds, rounds, steps = (10.0, 1, 40) if options.quick else (25.0, options.rounds, 500)
    num_seeds = 1 if options.quick else NUM_SEEDS
    full = ENGINES["steps are full"]
    figures: dict[str, Any] = {
        "two_tenants": {name: two_tenants(engine, seconds) for name, engine in ENGINES.items()},
        "weights": weights(full, seconds),
        "by_seed": {name: by_seed(engine, seconds, range(num_seeds)) for name, engine in ENGINES.items()},
        "thousand": {
            f"{load:.0%}": [thousand(full, load, seconds, seed) for seed in range(num_seeds)] for load in BASE_LOADS
        },
        "decisions": decisions(rounds, steps),
    }
    publish("tenants", figures, text_of(figures, "python bench/tenants.py"), is_kept=not options.quick)


if __name__ == "__main__":
    main()
