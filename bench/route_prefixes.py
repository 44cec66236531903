"""Does a router that counts prefixes, queues and memory make a fleet faster? Simulated backends, and live ones.

    python bench/route_prefixes.py simulated [--quick]
    python bench/route_prefixes.py live [--quick]

The requests are conversations: each begins with one of twelve system prompts of different length and popularity, is for
one of 48 adapters or the base, and every turn repeats the turns before it. *Simulated* backends are four replicas with
prefix caches on one virtual clock: manylora's (one pool for KV and adapters) and such as vLLM's (adapters in memory of
their own, LRU). *Live* ones are three servers (`manylora serve`, the demo model, on this CPU) behind `manylora route`,
started anew for each router and round, so that each begins with empty caches. Every round is another seed, the same for
all routers. Hits are the share of prompt tokens that prefix caches held, by the servers' own counters. Writes
`results/route_prefixes_simulated.md` and `results/route_prefixes_live.md`.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from live import VOCABULARY, http_arrivals
from publishing import Others, arguments, publish, reason_to_refuse, table
from ratios import ratio_by_round
from route import started

from manylora.core.config import AdapterConfig, SchedulerConfig
from manylora.demo import demo_adapters, demo_model_path
from manylora.lab.bench.load import run_load
from manylora.lab.bench.report import make_report
from manylora.lab.bench.rounds import in_turns, machine
from manylora.lab.bench.target import Target
from manylora.lab.measure import Slo
from manylora.lab.sim.run.simulation import simulate
from manylora.lab.sim.setup import Setup, make_config
from manylora.lab.workloads import AdapterSet, RequestSpec, Workload
from manylora.lab.workloads.workload import Streams

BLOCK = 64
"""Tokens of the blocks that prompts share."""

NUM_SYSTEMS = 12
BASE_SHARE = 0.25
MEAN_TURNS, GAP_S = 4.0, 8.0
ROUTERS: Mapping[str, Mapping[str, Any]] = {
    "least-loaded": {"router": "least-loaded"},
    "affinity": {"router": "affinity"},
    "auto without prefixes": {"router": "auto", "router_options": {"prefixes": False}},
    "auto": {"router": "auto"},
}
BEFORE = {"simulated": "auto without prefixes", "live": "affinity"}
"""The default before prefixes counted: of fleets and simulations, and of `manylora route`."""

BACKENDS: Mapping[str, Mapping[str, Any]] = {
    "manylora": {"adapters": AdapterConfig()},
    "like vLLM": {"all_resident": True, "adapters": AdapterConfig(eviction="lru")},
}

Figures = dict[str, float]


def conversations(
    rate: float, num_requests: int, seed: int, *, names: Sequence[str], most_tokens: int, scale: float = 1.0
) -> tuple[RequestSpec, ...]:
    """Draw requests: conversations arrive by Poisson's law, and their turns follow one another.

    Args:
        rate: Requests per second.
        num_requests: The first so many, by time.
        seed: Of all draws.
        names: The adapters, the most popular first.
        most_tokens: Longest prompt, at which a conversation ends.
        scale: Factor on the lengths of system prompts and turns.
    """
    rng = Streams(seed).of("conversations")
    blocks = iter(range(10**9))
    systems = [[next(blocks) for _ in range(max(1, round(scale * (4 + 3 * place))))] for place in range(NUM_SYSTEMS)]
    rng.shuffle(systems)  # a long one may be popular or not
    requests: list[RequestSpec] = []
    begins_s = 0.0
    while len(requests) < 3 * num_requests:
        begins_s += rng.exponential(MEAN_TURNS / rate)
        adapter = None if rng.random() < BASE_SHARE else names[_zipf(rng, len(names))]
        prefix, at_s = list(systems[_zipf(rng, NUM_SYSTEMS)]), begins_s
        for _ in range(rng.geometric(1 / MEAN_TURNS)):
            prefix += [next(blocks) for _ in range(1 + int(rng.exponential(2.0 * scale)))]
            num_answer = 1 + int(min(400, rng.exponential(120 * scale)))
            num_prompt = BLOCK * len(prefix) + 1 + int(rng.integers(BLOCK))
            if num_prompt > most_tokens:
                break
            requests.append(
                RequestSpec(
                    arrival_s=at_s,
                    num_prompt_tokens=num_prompt,
                    num_output_tokens=num_answer,
                    adapter=adapter,
                    prefix=tuple(prefix),
                    prefix_block_tokens=BLOCK,
                )
            )
            prefix += [next(blocks) for _ in range(num_answer // BLOCK)]  # the next turn repeats the answer
            at_s += rng.exponential(GAP_S) + num_answer / 25
    requests.sort(key=lambda one: one.arrival_s)
    middle = requests[num_requests // 2 : num_requests // 2 + num_requests]  # conversations of every age
    return tuple(replace(one, arrival_s=one.arrival_s - middle[0].arrival_s) for one in middle)


def _zipf(rng: np.random.Generator, count: int) -> int:
    weights = 1 / np.arange(1, count + 1)
    return int(rng.choice(count, p=weights / weights.sum()))


# -- simulated ---------------------------------------------------------------------------------------------------------


def simulated(backend: str, router: str, rate: float, num_requests: int, seed: int) -> Figures:
    """Serve the requests of a round by four simulated replicas."""
    adapters = AdapterSet(count=48, ranks=(8, 16, 32, 64)).specs()
    requests = conversations(rate, num_requests, seed, names=[one.name for one in adapters], most_tokens=7000)
    setup = Setup(
        model="llama-3-8b",
        hardware="a40",
        num_replicas=4,
        num_pages=9000,
        prefix_caching=True,
        scheduler=SchedulerConfig(policy="fifo"),
        **BACKENDS[backend],
        **ROUTERS[router],
    )
    run = simulate(Workload(name="conversations", requests=requests, adapters=adapters), make_config(setup, seed=seed))
    ttft = np.array([one.ttft_s for one in run.records if one.ttft_s is not None])
    assert len(ttft) == len(requests)
    return {
        "ttft_p50_s": float(np.percentile(ttft, 50)),
        "ttft_p99_s": float(np.percentile(ttft, 99)),
        "ttft_mean_s": float(ttft.mean()),
        "hits": sum(one.num_cached_tokens for one in run.stats) / sum(one.num_prompt_tokens for one in run.stats),
        "loads": float(sum(one.num_loads for one in run.stats)),
        "most_of_mean": max(one.num_answers for one in run.stats) * len(run.stats) / len(requests),
        "errors": float(sum(one.error is not None for one in run.records)),
    }


# -- live --------------------------------------------------------------------------------------------------------------

NUM_SERVERS = 3
SERVE = ("--memory", "24MiB", "--max-model-len", "2048")
COUNTERS = re.compile(r"^vllm:prefix_cache_(hits|queries)_total\S* (\S+)", re.MULTILINE)
LOADS = re.compile(r'^manylora_adapter_loads_total\{tier="device"\} (\S+)', re.MULTILINE)


def counters(urls: Iterable[str]) -> Figures:
    """Return the servers' counters of prompt tokens, of those that were cached, and of loads."""
    totals = {"hits": 0.0, "queries": 0.0, "loads": 0.0}
    for url in urls:
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            text = answer.read().decode()
        for name, value in COUNTERS.findall(text):
            totals[name] += float(value)
        totals["loads"] += sum(map(float, LOADS.findall(text)))
    return totals


def live(urls: Sequence[str], router: str, rate: float, num_requests: int, seed: int, turn: int) -> Figures:
    """Send the requests of a round through one router; ``turn`` makes their tokens new to all servers."""
    names = sorted(demo_adapters())
    requests = conversations(rate, num_requests, seed, names=names, most_tokens=1900, scale=0.4)
    own = tuple(
        replace(one, num_output_tokens=min(40, one.num_output_tokens), prefix=tuple(name + turn for name in one.prefix))
        for one in requests
    )
    options = ROUTERS[router]
    given = [f"{key}={str(value).lower()}" for key, value in options.get("router_options", {}).items()]
    flags = ["--router", options["router"], *(flag for one in given for flag in ("--router-option", one))]
    backends = [flag for url in urls for flag in ("--backend", url)]
    with started(["route", *backends, *flags]) as (url,):
        target = Target(url=url)
        before = counters(urls)
        run = asyncio.run(run_load(target, http_arrivals(Workload(name="live", requests=own), target, VOCABULARY)))
        after = counters(urls)
    summary = make_report(run, slo=Slo(ttft_s=1.0), offered_per_s=rate).summary
    assert summary.ttft is not None
    delta = {name: after[name] - before[name] for name in after}
    return {
        "ttft_p50_s": summary.ttft.p50,
        "ttft_p99_s": summary.ttft.p99,
        "ttft_mean_s": summary.ttft.mean,
        "hits": delta["hits"] / delta["queries"],
        "loads": delta["loads"],
        "errors": summary.num_errors,
    }


# -- results -----------------------------------------------------------------------------------------------------------


def rows_of(results: Mapping[str, Sequence[Figures]], before: str) -> list[list[object]]:
    """Return a row for each router: medians, and ratios to the choice before within rounds."""
    rows: list[list[object]] = []
    for name, rounds in results.items():
        middle = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        row = [name, *(f"{1e3 * middle[key]:.0f}" for key in ("ttft_p50_s", "ttft_p99_s"))]
        for key in ("ttft_p50_s", "ttft_p99_s"):
            row.append(str(ratio_by_round([one[key] for one in rounds], [one[key] for one in results[before]])))
        rows.append([*row, f"{100 * middle['hits']:.1f}", f"{middle['loads']:.0f}", f"{middle['errors']:.0f}"])
    return rows


HEADS = (
    "router",
    "TTFT P50 ms",
    "P99",
    "P50, of before",
    "P99, of before",
    "prompt tokens cached %",
    "loads",
    "errors",
)


def main() -> None:
    parser = arguments(__doc__, quick="one short round")
    parser.add_argument("which", choices=("simulated", "live"))
    parser.add_argument("--rate", type=float, default=None, help="requests per second")
    parser.add_argument("--requests", type=int, default=None, help="in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--routers", default=",".join(ROUTERS))
    options = parser.parse_args()
    is_live, before = options.which == "live", BEFORE[options.which]
    rate = options.rate or (20.0 if is_live else 8.0)
    num_requests = options.requests or (300 if is_live else 2000)
    rounds, num_requests = (1, 60) if options.quick else (options.rounds, num_requests)
    routers, others = options.routers.split(","), Others()
    results: dict[str, dict[str, list[Figures]]] = {}
    if is_live:
        results["live"] = {name: [] for name in routers}
        serve = ["serve", str(demo_model_path()), "--served-model-name", "demo", *SERVE]
        serve += [flag for name, path in demo_adapters().items() for flag in ("--lora-modules", f"{name}={path}")]
        with started(*[serve] * NUM_SERVERS) as urls:
            for turn, (number, name) in enumerate(in_turns(routers, rounds, num_warm_up=0)):
                found = live(urls, name, rate, num_requests, number, 10**6 * turn)
                results["live"][name].append(found)
                print(f"round {number}, {name}: {found}", flush=True)
    else:
        for backend in BACKENDS:
            results[backend] = {name: [] for name in routers}
            for seed in range(rounds):
                for name in routers:
                    results[backend][name].append(simulated(backend, name, rate, num_requests, seed))
                    print(f"{backend}, seed {seed}, {name}: {results[backend][name][-1]}", flush=True)
    command = (
        f"python bench/route_prefixes.py {options.which} --rate {rate:g} --requests {num_requests} --rounds {rounds}"
    )
    about = machine()
    where = (
        f" on {about['cpu']}, {about['cores']} cores: {NUM_SERVERS} servers of the demo model with 12 adapters, each"
        " with 24 MiB for KV and adapters, behind `manylora route`; servers, router and client share the machine."
        if is_live
        else ": four simulated replicas of Llama-3-8B on A40 with 48 adapters of rank 8 to 64."
    )
    lines = [
        f"# Prefixes in the choice: {options.which} backends",
        "",
        f"`{command}`{where}",
        f"Conversations of {MEAN_TURNS:g} turns; {NUM_SYSTEMS} system prompts and the adapters by Zipf's law,"
        f" {100 * BASE_SHARE:.0f} % for the base. The choice before was `{before}`. Medians over seeds; ratios are"
        " taken within a seed, with the 95 % interval of their median.",
    ]
    for backend, of_backend in results.items():
        lines += ["", *([] if is_live else [f"Backends {backend}:", ""]), *table(HEADS, rows_of(of_backend, before))]
    refused = reason_to_refuse(rounds, others.share()) if is_live else None
    publish(
        f"route_prefixes_{options.which}",
        {"command": command, "machine": about, "results": results},
        "\n".join(lines),
        is_kept=not options.quick,
        refused=refused,
    )


if __name__ == "__main__":
    main()
