"""vLLM's slots in the simulator: requests as in ``vllm_plugin.py`` in virtual time, and the loads that they need.

    python bench/vllm_twin.py       # a minute; writes results/vllm_loads.md

The simulator's engine with ``num_slots`` has vLLM's slots. Under vLLM's rules (first come, first served; steps wait for
loads; the adapter goes that has not run for longest) it is vLLM; under those of an arm it is vLLM with the plug-in.

Run as a script, it counts loads, which need no clock: those of vLLM's own rules, ours, and the fewest possible. The
fewest for an order of requests are known: an interval between two uses of an adapter saves a load if the adapter stays,
and at no time may more stay than there is room for. That is a linear program with a whole solution (its matrix is one
of intervals), solved exactly; with equal sizes it is Belady's rule. Adapters of different sizes have different savings.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from publishing import arguments, publish, table
from vllm_log import Served

from manylora.core.adapters.shape import BaseShape
from manylora.core.config import AdapterConfig, SchedulerConfig
from manylora.core.events import AdapterLoaded, AdapterLoadStarted, Event, RequestArrived, TokensEmitted
from manylora.core.types import AdapterKey, AdapterVersion, Tier
from manylora.lab.catalog.models import base_shape
from manylora.lab.costs.model import CostModel, FixedCost
from manylora.lab.sim.run.contents import adapter_versions
from manylora.lab.sim.run.simulation import SimulationConfig, simulate
from manylora.lab.sim.setup import read_dims
from manylora.lab.workloads import AdapterSpec, RequestSpec, Workload

NUM_ADAPTERS, NUM_SLOTS, NUM_HOST, NUM_SEATS = 64, 8, 16, 16
RANK, ZIPF = 64, 0.92
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPT_TOKENS, ANSWER_TOKENS = (8, 32), (8, 32)

Rules = tuple[SchedulerConfig, AdapterConfig]
"""Options of a simulated engine."""

UNBOUNDED = 1 << 50
"""Bytes of host memory where the number of adapters is the limit."""


def draw_requests(*, seconds: float, rate: float, seed: int, num_asked: int = NUM_ADAPTERS) -> list[RequestSpec]:
    """Draw requests that come at random, for adapters of popularity ``place ** -ZIPF``.

    Args:
        seconds: Duration of the arrivals.
        rate: Requests per second.
        seed: Of all draws.
        num_asked: Adapters that are asked for; others are replaced by these.
    """
    rng, weights = random.Random(seed), [place**-ZIPF for place in range(1, NUM_ADAPTERS + 1)]
    requests = []
    at = rng.expovariate(rate)
    while at < seconds:
        adapter = rng.choices(range(NUM_ADAPTERS), weights)[0] % num_asked
        lengths = rng.randint(*PROMPT_TOKENS), rng.randint(*ANSWER_TOKENS)
        requests.append(
            RequestSpec(arrival_s=at, num_prompt_tokens=lengths[0], num_output_tokens=lengths[1], adapter=f"a{adapter}")
        )
        at += rng.expovariate(rate)
    return requests


def vllm_rules(
    *, num_slots: int = NUM_SLOTS, num_host: int = NUM_HOST, num_seats: int = NUM_SEATS, num_tokens: int | None = None
) -> Rules:
    """Return the options under which the simulated engine does what vLLM does.

    A step has the requests whose adapters fit into the slots, and then waits for those that it has to load. From both
    tiers the adapter leaves that has not run for longest, whatever requests wait.
    """
    most: dict[str, Any] = {} if num_tokens is None else {"max_num_batched_tokens": num_tokens}
    scheduler = SchedulerConfig(policy="fifo", max_num_seqs=num_seats, max_loras=num_slots, **most)
    return scheduler, AdapterConfig(
        eviction="lru",
        look_ahead=0,
        max_cpu_loras=num_host,
        host_bytes=UNBOUNDED,
        background_reads=False,
        cold_start="layers",
        by_last_run=True,
    )


def plugin_rules(options: dict[str, Any]) -> Rules:
    """Return the options of an engine with the plug-in, whose own options are ``options``."""
    scheduler, adapters = vllm_rules()
    composition = "s-lora-chunked" if options.get("blocking_loads") else "mixed"
    policy, eviction = options.get("policy", "adapter-aware"), options.get("eviction", "price")
    order, look_ahead = "price" if eviction == "price" else "lru", options.get("look_ahead", 10)
    return (
        replace(scheduler, policy=policy, step_composition=composition, max_loras=None),
        replace(
            adapters,
            eviction=eviction,
            host_eviction=order,
            look_ahead=look_ahead,
            cold_start="auto",
            by_last_run=False,
        ),
    )


def config_of(rules: Rules, base: BaseShape, cost: CostModel, **options: Any) -> SimulationConfig:
    """Return an engine of these rules, which has as many slots as they allow adapters in a step."""
    return SimulationConfig(
        base=base,
        cost=cost,
        num_pages=2,
        num_slots=rules[0].max_loras or NUM_SLOTS,
        scheduler=rules[0],
        adapters=rules[1],
        waits_by_layer=rules[1].cold_start == "layers",
        exact_caps=True,
        **options,
    )


def make_adapters(ranks: Sequence[int] = (RANK,)) -> tuple[AdapterSpec, ...]:
    """Return the adapters, the most popular first; ranks take turns."""
    return tuple(
        AdapterSpec(name=f"a{number}", rank=ranks[number % len(ranks)], targets=TARGETS)
        for number in range(NUM_ADAPTERS)
    )


class Listener:
    """Takes down what ``Served`` has from the events of a simulated engine."""

    def __init__(self, versions: dict[str, AdapterVersion]) -> None:
        self.served = Served({}, {}, [], 0.0)
        self._names = {version.key: name for name, version in versions.items()}
        self._versions = versions
        self._began: dict[tuple[Tier, AdapterKey], float] = {}
        self._ended = {Tier.HOST: 0.0, Tier.DEVICE: 0.0}
        self._read_at: dict[AdapterKey, float] = {}

    def heard(self, event: Event) -> None:
        """Take in an event."""
        asked, times, loads, _ = self.served
        match event:
            case RequestArrived():
                asked[event.request_id], times[event.request_id] = (event.name, event.at), []
            case TokensEmitted():
                for request in event.request_ids:
                    times[request].append(event.at)
            case AdapterLoadStarted():
                self._began[event.tier, event.adapter] = event.at
            case AdapterLoaded():
                tier, key = event.tier, event.adapter
                began = max(self._began[tier, key], self._ended[tier])  # a link has one load at a time
                if tier is Tier.DEVICE:
                    began = max(began, self._read_at[key])
                else:
                    self._read_at[key] = event.at
                self._ended[tier] = event.at
                name, is_read = self._names[key], tier is Tier.HOST
                num_bytes = self._versions[name].disk_bytes if is_read else 0
                loads.append(("read" if is_read else "copy", name, num_bytes, began, event.at))


def serve_simulated(
    requests: Sequence[RequestSpec],
    rules: Rules,
    base: BaseShape,
    cost: CostModel,
    *,
    interference: dict[Tier, float] | None = None,
    ranks: Sequence[int] = (RANK,),
) -> Served:
    """Serve requests in virtual time.

    Args:
        requests: In order of arrival.
        rules: Options of the engine.
        base: The model.
        cost: Durations of steps and loads.
        interference: Slow-down of steps by loads beside them.
        ranks: Ranks of the adapters, which take turns.
    """
    adapters = make_adapters(ranks)
    workload = Workload(name="vllm", requests=tuple(requests), adapters=adapters)
    listener = Listener(adapter_versions(adapters, base))
    config = config_of(rules, base, cost, interference=interference or {})
    run = simulate(workload, config, sinks=(listener.heard,))
    return listener.served._replace(took_s=run.duration_s)


def count_lru(asked: Sequence[str]) -> tuple[set[int], set[int]]:
    """Return the requests that read, and those that copy, under vLLM's rules: both tiers by last use, one in the other.

    A request is served alone, which is kind to the rules: those that run at once hold slots.
    """
    slots: OrderedDict[str, None] = OrderedDict()
    host: OrderedDict[str, None] = OrderedDict()
    reads, copies = set(), set()
    for number, adapter in enumerate(asked):
        if adapter not in host:
            reads.add(number)
            if len(host) == NUM_HOST:
                slots.pop(host.popitem(last=False)[0], None)
        if adapter not in slots:
            copies.add(number)
            if len(slots) == NUM_SLOTS:
                slots.popitem(last=False)
        for tier in (host, slots):
            tier[adapter] = None
            tier.move_to_end(adapter)
    return reads, copies


def fewest_known(asked: Sequence[str], cost: dict[str, float], room: int) -> float:
    """Return the cost of loads of the rule that is best for draws at random where popularities are known, and no more.

    It keeps the adapters with most cost times popularity, and in the last place the adapter of the present request.

    Source: Aho, Denning and Ullman, "Principles of optimal page replacement" (1971), policy A0.
    """
    worth = sorted(cost, key=lambda name: cost[name] * (int(name[1:]) + 1) ** -ZIPF, reverse=True)
    kept, there, total, last = set(worth[: room - 1]), set(), 0.0, ""
    for adapter in asked:
        if adapter not in there and adapter != last:
            total += cost[adapter]
        if adapter in kept:
            there.add(adapter)
        else:
            last = adapter
    return total


def fewest(asked: Sequence[str], cost: dict[str, float], room: int) -> float:
    """Return the least cost of loads for an order of requests, of any rule that knows all requests to come.

    Args:
        asked: The adapter of each request.
        cost: The cost of a load, by adapter.
        room: Adapters that may be kept; the adapter of the present request is one of them.
    """
    from scipy.optimize import linprog
    from scipy.sparse import csr_matrix

    last: dict[str, int] = {}
    saved: list[float] = []
    rows: list[int] = []
    columns: list[int] = []
    for number, adapter in enumerate(asked):
        if adapter in last:
            between = range(last[adapter] + 1, number)
            rows += between
            columns += [len(saved)] * len(between)
            saved.append(cost[adapter])
        last[adapter] = number
    kept = csr_matrix((np.ones(len(rows)), (rows, columns)), shape=(len(asked), len(saved)))
    solved = linprog(-np.array(saved), A_ub=kept, b_ub=np.full(len(asked), room - 1.0), bounds=(0, 1), method="highs")
    assert solved.success, solved.message
    return sum(cost[adapter] for adapter in asked) + float(solved.fun)


class Loads(NamedTuple):
    """Loads that requests needed: their numbers, and their megabytes together."""

    num_reads: float
    num_copies: float
    mb: float


def by_rules(asked: Sequence[str], mb: dict[str, float]) -> Loads:
    """Return the loads of requests served one by one under vLLM's rules."""
    reads, copies = count_lru(asked)
    return Loads(len(reads), len(copies), sum(mb[asked[number]] for tier in (reads, copies) for number in tier))


def at_least(
    asked: Sequence[str], mb: dict[str, float], rule: Callable[[Sequence[str], dict[str, float], int], float]
) -> Loads:
    """Return loads of which a rule needs no fewer, and bytes of which it needs no less: each tier is taken by itself.

    An adapter that is in a slot or in host memory, either of them, need not be read.
    """
    ones, rooms = dict.fromkeys(mb, 1.0), (NUM_SLOTS + NUM_HOST, NUM_SLOTS)
    num_reads, num_copies = (rule(asked, ones, room) for room in rooms)
    return Loads(num_reads, num_copies, sum(rule(asked, mb, room) for room in rooms))


def simulated(requests: Sequence[RequestSpec], rules: Rules, ranks: Sequence[int]) -> Loads:
    """Return the loads of requests in virtual time."""
    served = serve_simulated(requests, rules, BASE, COST, ranks=ranks)
    mb = sizes(ranks)
    kinds = [kind for kind, *_ in served.loads]
    return Loads(kinds.count("read"), kinds.count("copy"), sum(mb[name] for _, name, *_ in served.loads))


def sizes(ranks: Sequence[int]) -> dict[str, float]:
    """Return megabytes by adapter."""
    return {name: one.disk_bytes / 1e6 for name, one in adapter_versions(make_adapters(ranks), BASE).items()}


READING = """
*One by one* no request waits, and the order is given. *At least* takes slots and host memory each by itself: where the
future is known by a linear program, where popularities alone are known by the rule that is best for draws at random
(A0). No rule that keeps the order needs less. With requests that wait the order is chosen too: vLLM's scheduler passes
over requests whose adapter has no slot. Simulated, it passes each 64 times at most.
"""
BASE = base_shape(read_dims("llama-3-8b"), block_size=16)
COST = FixedCost(step_s=0.03, token_s=0.0004, disk_bytes_per_s=7e9, copy_bytes_per_s=20e9)
"""Loads of a tenth of a second and less, beside answers of half a second."""
ONE_BY_ONE = "one by one"
MEASURED = "one by one, the rounds of vllm_plugin.py"
RATES = {ONE_BY_ONE: 0.2, "half the seats taken": 8.0, "all seats taken": 24.0, "twice as many as it can serve": 60.0}
ORDERS = {
    "price alone": {"policy": "fifo", "look_ahead": 0},
    "order alone": {"policy": "adapter-aware", "eviction": "lru", "look_ahead": 0},
    "plug-in": {},
}


def orders(num_requests: int) -> Iterator[tuple[str, list[RequestSpec]]]:
    """Yield requests, by the name of their load."""
    for name, rate in RATES.items():
        yield name, draw_requests(seconds=num_requests / rate, rate=rate, seed=1)
    measured = [one for seed in range(10) for one in draw_requests(seconds=9.0, rate=4.0, seed=seed)]
    yield MEASURED, [replace(one, arrival_s=number / RATES[ONE_BY_ONE]) for number, one in enumerate(measured)]


def rows(ranks: Sequence[int], num_requests: int) -> Iterator[tuple[str, str, Loads, float]]:
    """Yield for each load and each rule the loads, and their bytes as a share of vLLM's under the same load."""
    mb = sizes(ranks)
    for name, requests in orders(num_requests):
        asked, is_alone = [str(request.adapter) for request in requests], name in (ONE_BY_ONE, MEASURED)
        base = by_rules(asked, mb) if is_alone else simulated(requests, vllm_rules(), ranks)
        found = {"vLLM": base}
        found |= {arm: simulated(requests, plugin_rules(options), ranks) for arm, options in ORDERS.items()}
        if is_alone:
            found["vLLM, simulated"] = simulated(requests, vllm_rules(), ranks)
            found["at least, popularities known"] = at_least(asked, mb, fewest_known)
            found["at least, future known"] = at_least(asked, mb, fewest)
        for rule, loads in found.items():
            yield name, rule, loads, loads.mb / base.mb


def main() -> None:
    """Count loads."""
    options = arguments(__doc__, quick="300 requests").parse_args()
    num_requests = 300 if options.quick else 2000
    heads = ("load", "rule", "reads", "copies", "MB read and copied", "of vLLM's")
    lines = [f"# Loads of {NUM_ADAPTERS} adapters in {NUM_SLOTS} slots", "", "`python bench/vllm_twin.py`: "]
    lines[-1] += f"{num_requests} requests, popularity Zipf {ZIPF}, {NUM_HOST} adapters in host memory."
    lines.append(READING.rstrip())
    figures: dict[str, list[tuple[str, str, Loads, float]]] = {}
    for title, ranks in {"equal sizes": (RANK,), "ranks 8, 16, 32, 64 in turns": (8, 16, 32, 64)}.items():
        figures[title] = list(rows(ranks, num_requests))
        cells = [
            (load, rule, *(f"{one:.0f}" for one in loads), f"{share:.2f}")
            for load, rule, loads, share in figures[title]
        ]
        lines += ["", f"## {title.capitalize()}", "", *table(heads, cells, left=2)]
    publish("vllm_loads", figures, "\n".join(lines) + "\n", is_kept=not options.quick)


if __name__ == "__main__":
    main()
