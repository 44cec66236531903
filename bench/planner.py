"""Is a planned capacity true? At it the SLO is met, and at 1.1 times it the SLO is missed, for requests never seen.

Two services are planned as `manylora plan` does; then each is simulated directly, with other seeds than the search had,
at shares of the capacity that was found. A percentile that is measured has a spread: five runs are judged together, and
the range of their single percentiles stands beside it.

* **chat**: a hundred adapters of a fitted popularity, Llama-3-8B on an A40; the SLO limits P99 of time to first token;
* **tenants**: four hundred adapters used in sessions, Llama-3-8B on an L40S, the `chameleon` policy; the SLO limits
  time to first token and between tokens.

Run it: ``python bench/planner.py`` (minutes; ``--quick`` is a smoke test) writes ``results/planner.json`` and ``.md``.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from publishing import arguments, publish, table

from manylora.lab.measure import RequestRecord, Slo
from manylora.lab.planning.load_test import Objective, SearchBudget, at_rate
from manylora.lab.planning.plan import Plan, TrafficDemand, make_plan
from manylora.lab.sim.run.simulation import simulate
from manylora.lab.sim.scenario import Scenario, read_scenario
from manylora.lab.workloads import make_workload

SHARES = (0.9, 1.0, 1.1)
FRESH_SEEDS = range(100, 105)
SERVICES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


@dataclass(frozen=True, slots=True)
class Outcome:
    """One share of the planned capacity, served with requests the search has not seen.

    Args:
        share: Of the capacity.
        rate: Requests per second.
        measured_s: Each limited metric at its percentile over all runs.
        single_runs_s: Its least and greatest over the runs.
        is_met: Whether the SLO was met.
    """

    share: float
    rate: float
    measured_s: dict[str, float]
    single_runs_s: dict[str, tuple[float, float]]
    is_met: bool


def serve(scenario: Scenario, objective: Objective, rate: float, seed: int, num_requests: int) -> list[RequestRecord]:
    """Simulate one run without the planner, and return the requests that count."""
    num = max(num_requests, math.ceil(30 * objective.longest_s * rate))
    workload = make_workload(replace(at_rate(scenario.workload, rate), num_requests=num), seed)
    run = simulate(workload, replace(scenario, seed=seed).make_config())
    return run.records[num // 10 :]


def check(
    scenario: Scenario, objective: Objective, capacity: float, seeds: Sequence[int], num_requests: int
) -> list[Outcome]:
    outcomes = []
    for share in SHARES:
        runs = [serve(scenario, objective, share * capacity, seed, num_requests) for seed in seeds]
        measured = objective.measure([record for run in runs for record in run])
        single = [objective.measure(run) for run in runs]
        ranges = {name: (min(one[name] for one in single), max(one[name] for one in single)) for name in measured}
        outcomes.append(Outcome(share, share * capacity, measured, ranges, objective.is_met(measured)))
    return outcomes


def report(made: dict[str, tuple[Objective, Plan, list[Outcome]]], num_requests: int) -> str:
    lines = [
        "# Planned capacity against direct simulation",
        "",
        f"Command: `python bench/planner.py`. What follows from a seed is exact. Searches: 2 seeds, runs of at least "
        f"{num_requests:,} requests, tolerance 2 %; checks: 5 other seeds.",
        "",
    ]
    heads: tuple[str, ...]
    heads = ("service", "SLO", "capacity, req/s", "never idle, req/s", "load tests", "binds", "hit rate")
    rows: list[tuple[object, ...]] = []
    for name, (objective, plan, _) in made.items():
        limits = ", ".join(
            f"P{objective.percentile:g} {what.upper()} <= {limit:g} s" for what, limit in objective.limits()
        )
        hit_rate = plan.usage.hit_rate if plan.usage is not None and plan.usage.hit_rate is not None else math.nan
        capacity, tests = f"{plan.capacity.rate:.3f}", len(plan.capacity.load_tests)
        rows.append((name, limits, capacity, f"{plan.most_per_s:.2f}", tests, plan.binds, f"{hit_rate:.1%}"))
    lines += [*table(heads, rows, left=2), ""]
    heads, rows = ("service", "of capacity", "req/s", "measured (range over single runs)", "SLO"), []
    for name, (_, _, outcomes) in made.items():
        for one in outcomes:
            measured = ", ".join(
                f"{what.upper()} {seconds:.3f} s ({one.single_runs_s[what][0]:.3f} to {one.single_runs_s[what][1]:.3f})"
                for what, seconds in one.measured_s.items()
            )
            rows.append((name, f"{one.share:g}", f"{one.rate:.3f}", measured, "met" if one.is_met else "missed"))
    return "\n".join([*lines, *table(heads, rows)])


def main() -> None:
    parser = arguments(__doc__, quick="few requests")
    parser.add_argument("--requests", type=int, default=2000, help="of each run, at least")
    args = parser.parse_args()
    num_requests = 150 if args.quick else args.requests
    made = {}
    for name, service in SERVICES.items():
        scenario = read_scenario(service)
        objective = Objective(slo=Slo(**service["slo"]))
        search_budget = SearchBudget(num_requests=num_requests, spans=5.0 if args.quick else 30.0)
        plan = make_plan(scenario, objective, TrafficDemand(search_budget=search_budget))
        seeds = FRESH_SEEDS[:1] if args.quick else FRESH_SEEDS
        made[name] = (objective, plan, check(scenario, objective, plan.capacity.rate, seeds, num_requests))
    text = report(made, num_requests)
    figures = {
        name: {
            "capacity_requests_per_s": plan.capacity.rate,
            "binds": plan.binds,
            "load_tests": [[one.rate, one.is_met] for one in plan.capacity.load_tests],
            "checks": [asdict(one) for one in outcomes],
        }
        for name, (_, plan, outcomes) in made.items()
    }
    publish("planner", figures, text, is_kept=not args.quick)


if __name__ == "__main__":
    main()
