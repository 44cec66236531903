"""The decisions about isolated functions: greedy against exact, and the time of one.

    python bench/functions_decisions.py            # 1,000 instances of each choice, about two minutes
    python bench/functions_decisions.py --quick    # 50, without writing

Share of the optimum: the greedy value over the exact one, of every instance; mean, 1st percentile and least. Time of a
decision: processor time, the median of 200, for the sizes given. Instances are random, with the sizes and times of real
models.
"""

import random
import statistics
import time
from collections.abc import Callable

from functions_exact import solve_offload, solve_preload, value_of
from publishing import arguments, publish, table
from tqdm import tqdm

from manylora.functions.decisions.artefacts import Artefact, ArtefactKind, MemoryKind, Place, PreloadProblem
from manylora.functions.decisions.offload import Held, choose_offload
from manylora.functions.decisions.preload import Preloader

GB = 10**9
REPEATS = 200


def preload_instance(
    rng: random.Random, num_functions: int, *, num_nodes: int = 1, num_devices: int = 1, num_backbones: int = 2
) -> PreloadProblem:
    """Return functions with skewed rates over backbones of 13 and 26 GB, on nodes that cannot hold all of it."""
    host, device = MemoryKind.HOST, MemoryKind.DEVICE
    places = []
    for node in range(num_nodes):
        free = int(rng.uniform(4, 40) * GB)
        places.append(Place(name=f"host{node}", memory=host, node=str(node), free_bytes=free))
        for number in range(num_devices):
            free = int(rng.uniform(10, 48) * GB)
            places.append(Place(name=f"device{node}.{number}", memory=device, node=str(node), free_bytes=free))
    rates = [rng.paretovariate(1.2) * 0.01 for _ in range(num_functions)]
    backbone_of = [rng.randrange(num_backbones) for _ in range(num_functions)]
    artefacts = [
        Artefact(
            name="libraries",
            kind=ArtefactKind.LIBRARIES,
            num_bytes={host: 3 * GB},
            saves_s={host: 8.0},
            requests_per_s=sum(rates),
        )
    ]
    for backbone in range(num_backbones):
        size = rng.choice([13, 26]) * GB
        artefacts.append(
            Artefact(
                name=f"backbone{backbone}",
                kind=ArtefactKind.BACKBONE,
                num_bytes={host: size, device: size},
                saves_s={host: size / 2e9, device: size / 2e9 + size / 16e9},
                requests_per_s=sum(rate for rate, on in zip(rates, backbone_of, strict=True) if on == backbone),
                parent="libraries",
            )
        )
    for function, (rate, backbone) in enumerate(zip(rates, backbone_of, strict=True)):
        size = int(rng.uniform(0.05, 0.6) * GB)
        artefacts.append(
            Artefact(
                name=f"adapter{function}",
                kind=ArtefactKind.ADAPTER,
                num_bytes={host: size, device: size},
                saves_s={host: size / 2e9 + 0.1, device: size / 2e9 + 0.1 + size / 10e9},
                requests_per_s=rate,
                parent=f"backbone{backbone}",
            )
        )
        artefacts.append(
            Artefact(
                name=f"kernels{function}",
                kind=ArtefactKind.KERNELS,
                num_bytes={device: 473_000_000},
                saves_s={device: rng.uniform(0.5, 3.0)},
                requests_per_s=rate,
                parent=f"backbone{backbone}",
            )
        )
    return PreloadProblem(tuple(artefacts), tuple(places))


def offload_instance(rng: random.Random, num_functions: int, *, num_backbones: int = 2) -> list[Held]:
    """Return what a device holds: backbones, and adapters and kernels of functions, a tenth of them in use."""
    held = []
    for backbone in range(num_backbones):
        size = rng.choice([13, 26]) * GB
        held.append(
            Held(
                name=f"backbone{backbone}",
                num_bytes=size,
                value=rng.uniform(1, 20),
                host_value=rng.uniform(0, 1),
                host_bytes=rng.choice([0, size]),
            )
        )
    for function in range(num_functions):
        value, size = rng.paretovariate(1.2) * 0.05, int(rng.uniform(0.05, 0.6) * GB)
        parent = f"backbone{rng.randrange(num_backbones)}"
        adapter = Held(
            name=f"adapter{function}",
            num_bytes=size,
            value=value,
            host_value=0.8 * value,
            host_bytes=rng.choice([0, size]),
            parent=parent,
            in_use=rng.random() < 0.1,
        )
        kernels = Held(name=f"kernels{function}", num_bytes=473_000_000, value=2 * value, parent=parent)
        held += [adapter, kernels]
    return held


def shares_of_preloading(num_instances: int) -> list[float]:
    rng = random.Random(0)
    shares = []
    for _ in tqdm(range(num_instances), desc="pre-loading", leave=False, disable=None):
        problem = preload_instance(
            rng, rng.choice([4, 8, 12, 20]), num_nodes=rng.choice([1, 2]), num_devices=rng.choice([1, 2])
        )
        best = value_of(problem, solve_preload(problem))
        shares.append(value_of(problem, Preloader(problem).choose()) / best if best else 1.0)
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
