"""The decisions about isolated functions: greedy against exact, and the time of one.

    python bench/functions_decisions.py            # 1,000 instances of each choice, about two minutes
    python bench/functions_decisions.py --quick    # 50, without writing

Share of the optimum: the greedy value over the exact one, of every instance; mean, 1st percentile and least. Time of a
decision: processor time, the median of 200, for the sizes given. Instances are random;
`manylora.lab.bench.function_instances` draws them.
"""

import random
import statistics
import time
from collections.abc import Callable

from publishing import arguments, publish, table
from tqdm import tqdm

from manylora.functions.decisions import Preloader, choose_offload, choose_preload
from manylora.functions.decisions.exact import solve_offload, solve_preload
from manylora.lab.bench.function_instances import GB, offload_instance, preload_instance

REPEATS = 200


def shares_of_preloading(num_instances: int) -> list[float]:
    rng = random.Random(0)
    shares = []
    for _ in tqdm(range(num_instances), desc="pre-loading", leave=False, disable=None):
        problem = preload_instance(
            rng, rng.choice([4, 8, 12, 20]), num_nodes=rng.choice([1, 2]), num_devices=rng.choice([1, 2])
        )
        best = problem.value(solve_preload(problem))
        shares.append(problem.value(choose_preload(problem)) / best if best else 1.0)
    return shares


def shares_of_offloading(num_instances: int) -> list[float]:
    """Return least value lost over the greedy choice's, where there is a choice."""
    rng = random.Random(0)
    shares = []
    for _ in tqdm(range(num_instances), desc="offloading", leave=False, disable=None):
        held = offload_instance(rng, rng.choice([3, 8, 16]))
        need, host = int(rng.uniform(0.1, 20) * GB), int(rng.uniform(0, 4) * GB)
        chosen, best = choose_offload(held, need, host_free_bytes=host), solve_offload(held, need, host_free_bytes=host)
        if chosen is not None and best is not None:
            shares.append(best[1] / chosen.lost if chosen.lost > 1e-9 else 1.0)
    return shares


def median_us(decide: Callable[[], object]) -> float:
    took = []
    for _ in range(REPEATS):
        began_at = time.process_time()
        decide()
        took.append(time.process_time() - began_at)
    return 1e6 * statistics.median(took)


def times() -> dict[str, float]:
    rng = random.Random(0)
    found = {}
    for num_devices in (1, 2, 8):
        preloader = Preloader(preload_instance(rng, 100, num_devices=num_devices))
        found[f"pre-loading, 100 functions, {num_devices} devices"] = median_us(lambda: preloader.choose({}))  # noqa: B023
    for num_functions in (16, 100):
        held = offload_instance(rng, num_functions)
        found[f"offloading, {num_functions} functions on a device"] = median_us(lambda: choose_offload(held, 5 * GB))  # noqa: B023
    return found


def main() -> None:
    options = arguments(__doc__, quick="50 instances").parse_args()
    num_instances = 50 if options.quick else 1000
    shares = {
        "pre-loading": shares_of_preloading(num_instances),
        "offloading": shares_of_offloading(num_instances),
    }
    rows = []
    figures: dict[str, object] = {}
    for name, ones in shares.items():
        ones.sort()
        mean, low, least = statistics.mean(ones), ones[len(ones) // 100], ones[0]
        rows.append((name, len(ones), f"{100 * mean:.2f} %", f"{100 * low:.1f} %", f"{100 * least:.1f} %"))
        figures[name] = {"instances": len(ones), "mean": mean, "percentile_1": low, "least": least}
    took = times()
    figures["median_us"] = took
    lines = ["# Decisions about isolated functions", "", "Share of the exact optimum:", ""]
    lines += table(("choice", "instances", "mean", "1st percentile", "least"), rows)
    lines += ["", f"Processor time of a decision, median of {REPEATS}:", ""]
    lines += table(("decision", "us"), [(name, f"{one:.0f}") for name, one in took.items()])
    publish("functions_decisions", figures, "\n".join(lines), is_kept=not options.quick)


if __name__ == "__main__":
    main()
