"""The time of a scheduling round for isolated functions, under the heaviest load.

    python bench/functions_rounds.py            # one to two minutes
    python bench/functions_rounds.py --quick    # a short run, without writing

A simulated run of 64 functions of two models on 16 devices, in bursts (CoV 6) of 16 requests a second in all. Timed in
processor time: each round over all waiting functions (windows, choice of process, room), each decision to
pre-load one node, and each time that room is made on a device. The time of a round includes the simulator's own work
in it: starts, batches and accounts.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

from publishing import arguments, publish, table

from manylora.functions.decisions.preload import Preloader
from manylora.lab.functions.holding import Holding
from manylora.lab.functions.setup import FunctionsSetup
from manylora.lab.functions.simulation import FunctionsSimulation
from manylora.lab.workloads import make_workload
from manylora.lab.workloads.callers import GammaCallers
from manylora.lab.workloads.lengths import LognormalTokens, ParametricLengths
from manylora.lab.workloads.spec import AdapterSet, WorkloadSpec

FUNCTIONS = 64
GOAL_MS = 6.0


def timed(owner: Any, name: str, took: list[float]) -> Callable[[], None]:
    """Time every call of a method; return the function that stops it."""
    method = getattr(owner, name)

    def measured(*positional: Any, **named: Any) -> Any:
        began_at = time.process_time()
        try:
            return method(*positional, **named)
        finally:
            took.append(time.process_time() - began_at)

    setattr(owner, name, measured)
    return lambda: setattr(owner, name, method)


def row(name: str, took: list[float]) -> tuple[object, ...]:
    ordered = sorted(1e3 * one for one in took)
    p99 = ordered[int(0.99 * (len(ordered) - 1))]
    return name, len(ordered), f"{statistics.median(ordered):.3f}", f"{p99:.3f}", f"{ordered[-1]:.2f}"


def main() -> None:
    options = arguments(__doc__, quick="one minute of arrivals").parse_args()
    spec = WorkloadSpec(
        arrivals=GammaCallers(rate=16.0 / FUNCTIONS, cov=6.0, num_callers=FUNCTIONS),
        lengths=ParametricLengths(
            prompt=LognormalTokens(mu=4.095, sigma=0.39), output=LognormalTokens(mu=4.628, sigma=0.484)
        ),
        duration_s=60.0 if options.quick else 900.0,
        adapters=AdapterSet(count=FUNCTIONS, ranks=(16,)),
    )
    rounds: list[float] = []
    preloads: list[float] = []
    rooms: list[float] = []
    simulation = FunctionsSimulation(make_workload(spec, 0), FunctionsSetup(preload_every_s=30.0))
    timed(simulation, "decide", rounds)
    stop = [timed(Preloader, "revise", preloads), timed(Holding, "make_room", rooms)]
    run = simulation.run()
    for one in stop:
        one()
    kinds = {"a round over all waiting functions": rounds, "pre-loading one node": preloads, "making room": rooms}
    rows = [row(name, took) for name, took in kinds.items() if took]
    share = sum(1e3 * one <= GOAL_MS for one in rounds) / len(rounds)
    lines = [
        "# Scheduling rounds for isolated functions",
        "",
        f"{FUNCTIONS} functions of two models, 16 devices, {len(run.calls)} requests in bursts; {share:.2%} of the"
        f" rounds take at most {GOAL_MS:g} ms.",
        "",
        *table(("decision", "times", "median ms", "P99 ms", "longest ms"), rows),
    ]
    figures = {
        "functions": FUNCTIONS,
        "requests": len(run.calls),
        "counts": run.counts,
        "rounds_within_goal": share,
        "ms": {name: dict(zip(("times", "median", "p99", "longest"), one, strict=True)) for name, *one in rows},
    }
    publish("functions_rounds", figures, "\n".join(lines), is_kept=not options.quick)


if __name__ == "__main__":
    main()
