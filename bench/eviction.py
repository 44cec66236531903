"""How much of what clairvoyance could save does each eviction policy save, on independent and on real-life draws?

One stream of uses over adapters of rank 8 to 128 (a Llama-2-7B shape, equal numbers of each rank) goes through the
page store and adapter cache that manylora serves with, on the virtual clock, one use after the other, with room for
a share of all adapters. What counts is loading avoided, in bytes (so in seconds of the link) against loading at
every use; the *bound* is what the best policy could avoid that knows all uses beforehand (``clairvoyant.py``).

* **independent**: every use drawn afresh from Zipf-Mandelbrot, s = 1.14, q = 3.6: recency tells nothing;
* **sessions**: users who come, use one adapter some times and leave, lengths and gaps as measured;
* **stack**: LRU stack distances as measured on a production trace of adapters: recency tells almost everything;
* **replay**: that trace itself, in its order (it has no timestamps: uses are spread as a Poisson process).

Run it: ``python bench/eviction.py --traces DIR`` writes ``results/eviction.json``, ``.md`` and (with matplotlib)
``.png``. DIR holds GenTD26's ``gentd26_lora_lru_stack_distance.csv`` and ``gentd26_data_trace_processed.csv.gz``;
without it the first two kinds run and nothing is written. ``--quick`` is a tenth.
"""

from __future__ import annotations

import argparse
import ast
import csv
import gzip
import json
import math
import random
import sys
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from time import perf_counter

from clairvoyant import most_saved

from manylora.adapters.layout import lay_out
from manylora.catalog.models import base_shape
from manylora.clock import VirtualClock
from manylora.config import AdapterConfig
from manylora.costs.model import FixedCost
from manylora.engine.adapter_cache import AdapterCache
from manylora.memory import EVICTION_POLICIES, Depth, Owner, PageCache, ReloadCosts, make_eviction_policy
from manylora.plan import ON_DEVICE
from manylora.sim.run.executor import SimulatedExecutor
from manylora.types import AdapterKey, AdapterVersion

RESULTS = Path(__file__).parent / "results"
RANKS = (8, 16, 32, 64, 128)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
POLICIES = ("price", "lru", "gdsf", "fair", "chameleon", "none")
SHARES = (0.05, 0.10, 0.20, 0.40)
NUM_ADAPTERS, NUM_USES = 500, 12_000
RATE = 8.0
"""Uses per second, all adapters together: Chameleon's medium load."""

BASE = base_shape("llama-2-7b")

Uses = list[tuple[float, int]]  # seconds, adapter


# -- sequences of uses -------------------------------------------------------------------------------------------------


def mandelbrot(num_adapters: int, s: float, q: float) -> list[float]:
    """Return cumulative weights of Zipf-Mandelbrot's law, ``(rank + q) ** -s``."""
    return list(accumulate((rank + q) ** -s for rank in range(1, num_adapters + 1)))


def arrivals(rng: random.Random) -> Iterator[float]:
    """Yield the times of a Poisson process, in seconds."""
    now = 0.0
    while True:
        now += rng.expovariate(RATE)
        yield now


def independent(num_uses: int, rng: random.Random) -> Uses:
    """Draw every use afresh; which adapter is popular has nothing to do with its rank."""
    weights = mandelbrot(NUM_ADAPTERS, 1.14, 3.6)
    ids = rng.sample(range(NUM_ADAPTERS), NUM_ADAPTERS)
    return [
        (at, ids[bisect_left(weights, rng.random() * weights[-1])])
        for at, _ in zip(arrivals(rng), range(num_uses), strict=False)
    ]


def sessions(num_uses: int, rng: random.Random, *, num_at_once: int = 100) -> Uses:
    """Overlap sessions of the measured lengths and gaps, gaps scaled so that ``num_at_once`` make up the rate."""
    weights = mandelbrot(NUM_ADAPTERS, 0.95, 6.5)
    ids = rng.sample(range(NUM_ADAPTERS), NUM_ADAPTERS)
    mean_length, mean_gap_s = math.exp(0.97 + 0.94**2 / 2) + 0.5, math.exp(4.81 + 1.01**2 / 2)
    scale = num_at_once / (RATE * mean_gap_s)
    uses: Uses = []
    begin = 0.0
    while len(uses) < 1.5 * num_uses:
        begin += rng.expovariate(RATE / mean_length)
        adapter = ids[bisect_left(weights, rng.random() * weights[-1])]
        at = begin
        for _ in range(max(1, math.ceil(rng.lognormvariate(0.97, 0.94)))):
            uses.append((at, adapter))
            at += rng.lognormvariate(4.81, 1.01) * scale
    uses.sort()
    warm = len(uses) // 10  # the first sessions have no others beside them
    return uses[warm : warm + num_uses]


def stack(num_uses: int, rng: random.Random, distances: Path) -> Uses:
    """Draw the LRU stack distance of each use from the measured distribution; beyond it, an adapter not used yet."""
    with distances.open() as file:
        rows = [(int(row["slots"]), float(row["lru_hit_all"])) for row in csv.DictReader(file)]
    segments = list(pairwise([(0, 0.0), *rows]))
    order: list[int] = []  # adapters by last use, the latest last
    uses: Uses = []
    for at, _ in zip(arrivals(rng), range(num_uses), strict=False):
        draw = rng.random()
        segment = next((one for one in segments if draw < one[1][1]), None)
        depth = len(order)
        if segment is not None:
            (low, below), (high, above) = segment
            depth = low + int((high - low) * (draw - below) / (above - below))
        if depth < len(order):
            adapter = order.pop(-1 - depth)
        elif len(order) < NUM_ADAPTERS:
            adapter = len(order)
        else:
            adapter = order.pop(0)
        order.append(adapter)
        uses.append((at, adapter))
    return uses


def replay(num_uses: int, rng: random.Random, trace: Path) -> Uses:
    """Take the adapters of a production trace in its order."""
    ids: dict[str, int] = {}
    with gzip.open(trace, "rt") as file:
        names = (one["modelVersionId"] for row in csv.DictReader(file) for one in ast.literal_eval(row["lora_args"]))
        return [
            (at, ids.setdefault(name, len(ids)))
            for at, name, _ in zip(arrivals(rng), names, range(num_uses), strict=False)
        ]


# -- running them ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one policy made of one sequence with room for one share.

    Args:
        hit_rate: Uses that found their adapter on the device.
        loaded_bytes: Bytes copied to the device.
        saved_bytes: Bytes not copied because the adapter was there.
        num_evictions: Adapters dropped.
        share_of_bound: ``saved_bytes`` of what the clairvoyant bound saves.
        use_us: Bookkeeping per use, in microseconds of this machine.
    """

    hit_rate: float
    loaded_bytes: int
    saved_bytes: int
    num_evictions: int
    share_of_bound: float
    use_us: float


def versions() -> list[AdapterVersion]:
    """Return what adapters of each rank are on this base."""
    made = []
    for rank in RANKS:
        ranks = {one.name: rank for one in BASE.modules if one.name.rpartition(".")[2] in TARGETS}
        num_pages = lay_out(ranks, BASE).num_pages
        num_bytes = num_pages * BASE.page.num_bytes
        made.append(
            AdapterVersion(
                key=AdapterKey(f"rank-{rank}"),
                source="",
                rank=rank,
                total_rank=sum(ranks.values()),
                num_modules=len(ranks),
                target_modules=TARGETS,
                num_pages=num_pages,
                weight_bytes=num_bytes,
                host_bytes=num_bytes,
                disk_bytes=num_bytes,
            )
        )
    return made


def version_of(adapter: int, kinds: list[AdapterVersion]) -> AdapterVersion:
    """Return an adapter's version: ranks take turns, so each has as many."""
    kind = kinds[adapter % len(kinds)]
    fields = {name: getattr(kind, name) for name in kind.__dataclass_fields__} | {"key": AdapterKey(f"a{adapter}")}
    return AdapterVersion(**fields)


def run(uses: Uses, policy: str, num_pages: int, bound_bytes: float) -> Outcome:
    """Send uses one after the other through the real store and cache, on a virtual clock."""
    kinds = versions()
    clock = VirtualClock()
    costs = ReloadCosts()
    executor = SimulatedExecutor(FixedCost(), vocab_size=BASE.vocab_size)
    page_cache = PageCache(
        num_pages,
        BASE.page.num_bytes,
        BASE.page.block_size,
        policy=make_eviction_policy(policy, costs),
        on_adapter_dropped=lambda key, now: cache.on_dropped(key, now),
        on_prefix_dropped=lambda num_pages, now: None,
    )
    cache = AdapterCache(
        page_cache=page_cache,
        executor=executor,
        config=AdapterConfig(host_bytes=2**60),
        costs=costs,
        is_pinned=lambda key: False,
        emit=lambda event: None,
    )
    known = {adapter: version_of(adapter, kinds) for adapter in {adapter for _, adapter in uses}}
    for version in known.values():
        cache.add(version, 0.0)
    num_hits = saved_bytes = loaded_bytes = 0
    begun = perf_counter()
    for at, adapter in uses:
        version = known[adapter]
        clock.wait_until(max(at, clock.now()))
        cache.ask(version.key, clock.now())
        if cache.ensure(version, clock.now(), Depth.WANTED).placement is ON_DEVICE:
            num_hits += 1
            saved_bytes += version.host_bytes
        else:
            loaded_bytes += version.host_bytes
            clock.wait_until(cache.next_event_at())
            cache.poll(clock.now())
        cache.hold(version.key, clock.now())
        cache.unwant(version.key, clock.now())
        cache.release(version.key, clock.now())
    took_s = perf_counter() - begun
    page_cache.check_integrity()
    assert cache.num_loads == len(uses) - num_hits
    assert page_cache.allocator.count(Owner.ADAPTER) <= num_pages
    return Outcome(
        hit_rate=num_hits / len(uses),
        loaded_bytes=loaded_bytes,
        saved_bytes=saved_bytes,
        num_evictions=cache.num_evictions,
        share_of_bound=saved_bytes / bound_bytes,
        use_us=took_s / len(uses) * 1e6,
    )


def compare(uses: Uses, shares: tuple[float, ...]) -> dict[str, dict[str, object]]:
    """Run every policy with room for each share of all adapters in the sequence."""
    kinds = versions()
    order = [adapter for _, adapter in uses]
    num_pages_of = {adapter: kinds[adapter % len(kinds)].num_pages for adapter in order}
    total = sum(num_pages_of.values())
    results: dict[str, dict[str, object]] = {}
    for share in shares:
        num_pages = max(round(share * total), max(num_pages_of.values()))
        bound_pages = most_saved(order, num_pages_of, num_pages_of, num_pages)
        bound_hits = most_saved(order, num_pages_of, dict.fromkeys(num_pages_of, 1), num_pages)
        bound_bytes = bound_pages * BASE.page.num_bytes
        outcomes = {policy: run(uses, policy, num_pages, bound_bytes) for policy in POLICIES}
        results[f"{share:.0%}"] = {
            "num_pages": num_pages,
            "bound_saved_bytes": round(bound_bytes),
            "bound_hit_rate": bound_hits / len(order),
            "asked_bytes": sum(num_pages_of[adapter] for adapter in order) * BASE.page.num_bytes,
            "policies": {policy: asdict(outcome) for policy, outcome in outcomes.items()},
        }
        print(f"    {share:.0%} of {total} pages done", file=sys.stderr)
    return results


# -- reports -----------------------------------------------------------------------------------------------------------


def report(results: dict[str, dict[str, dict[str, object]]], num_uses: dict[str, int]) -> str:
    """Write one table per sequence, and the mean over all of them."""
    lines = [
        "# Eviction policies against clairvoyance",
        "",
        f"`python bench/eviction.py --traces DIR`: adapters of rank {', '.join(map(str, RANKS))} in equal number on a "
        f"{BASE.name} shape ({', '.join(TARGETS)}; pages of {BASE.page.num_bytes >> 20} MiB), {RATE:g} uses a second, "
        "through manylora's page store and adapter cache on the virtual clock. *Room* is the share of all adapters' "
        "pages that the pool holds. Each cell: **share of the bound** (bytes of loading avoided, of what a clairvoyant "
        "policy could avoid at most), then the hit rate. Every figure follows from the seed.",
        "",
    ]
    sums = dict.fromkeys(POLICIES, 0.0)
    least = dict.fromkeys(POLICIES, 1.0)
    num_cells = 0
    for name, by_share in results.items():
        lines += [f"## {name} ({num_uses[name]:,} uses)", ""]
        lines += [f"| room | bound: hit rate | {' | '.join(POLICIES)} |", f"|---:|---:|{'---:|' * len(POLICIES)}"]
        for share, cell in by_share.items():
            outcomes: dict[str, dict[str, float]] = cell["policies"]  # type: ignore[assignment]
            best = max(outcomes[policy]["share_of_bound"] for policy in POLICIES)
            cells = []
            for policy in POLICIES:
                reached = outcomes[policy]["share_of_bound"]
                sums[policy] += reached
                least[policy] = min(least[policy], reached)
                shown = f"**{reached:.1%}**" if reached == best else f"{reached:.1%}"
                cells.append(f"{shown} ({outcomes[policy]['hit_rate']:.1%})")
            num_cells += 1
            lines.append(f"| {share} | {cell['bound_hit_rate']:.1%} | {' | '.join(cells)} |")
        lines.append("")
    lines += [
        "## Over all of them",
        "",
        f"| share of the bound | {' | '.join(POLICIES)} |",
        f"|---|{'---:|' * len(POLICIES)}",
        f"| mean | {' | '.join(f'{sums[policy] / num_cells:.1%}' for policy in POLICIES)} |",
        f"| least | {' | '.join(f'{least[policy]:.1%}' for policy in POLICIES)} |",
        "",
        "*The bound* on bytes and the bound on hits are two maxima, not reached together. `none` still hits when the "
        "same adapter is asked for before the last request on it has ended; here uses follow one another, so it never "
        "does.",
        "",
        "*Chameleon's order of merit (none < LRU < fair < chameleon) does not appear.* Its score is per adapter, so a "
        "large one that nobody uses outlives a dozen small ones that are used: S = 0.45 against F = 0.45 times the "
        "adapter's uses over those of the most used, which under a power law is small for all but a few. That pays "
        "while memory is plentiful and the few large adapters dominate the tail of TTFT, the published setting; where "
        "room is short it costs hits and bytes alike. Weights closer to `fair` lessen it; reckoned per page, as `gdsf` "
        "and `price` do, it is gone.",
        "",
    ]
    return "\n".join(lines)


def plot(results: dict[str, dict[str, dict[str, object]]], path: Path) -> None:
    """Draw the share of the bound over the room, one panel per sequence."""
    try:
        import matplotlib
    except ImportError:
        print("no matplotlib: no plot", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(results), figsize=(4 * len(results), 3.4), sharey=True, squeeze=False)
    for panel, (name, by_share) in zip(panels[0], results.items(), strict=True):
        for policy in POLICIES[:-1]:
            reached = [cell["policies"][policy]["share_of_bound"] for cell in by_share.values()]  # type: ignore[index]
            panel.plot(list(by_share), reached, marker="o", label=policy, linewidth=2.5 if policy == "price" else 1.2)
        panel.set_title(name)
        panel.set_xlabel("room, of all adapters")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("loading avoided, of the clairvoyant bound")
    panels[0][-1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, help="directory with the GenTD26 files")
    parser.add_argument("--quick", action="store_true", help="a tenth of the uses; writes nothing")
    args = parser.parse_args()
    assert set(POLICIES) == set(EVICTION_POLICIES)
    num_uses = NUM_USES // 10 if args.quick else NUM_USES
    sequences = {
        "independent": independent(num_uses, random.Random(1)),
        "sessions": sessions(num_uses, random.Random(2)),
    }
    if args.traces is not None:
        distances = args.traces / "gentd26_lora_lru_stack_distance.csv"
        trace = args.traces / "gentd26_data_trace_processed.csv.gz"
        sequences["stack"] = stack(num_uses, random.Random(3), distances)
        sequences["replay"] = replay(num_uses if args.quick else 100_000, random.Random(4), trace)
    results = {}
    for name, uses in sequences.items():
        print(f"{name}: {len(uses):,} uses of {len({adapter for _, adapter in uses})} adapters", file=sys.stderr)
        results[name] = compare(uses, SHARES)
    text = report(results, {name: len(uses) for name, uses in sequences.items()})
    print(text)
    if args.traces is not None and not args.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "eviction.md").write_text(text)
        (RESULTS / "eviction.json").write_text(json.dumps(results, indent=2) + "\n")
        plot(results, RESULTS / "eviction.png")


if __name__ == "__main__":
    main()
