"""Does a router that knows adapters make a fleet faster? `manylora route` over three servers, against round robin.

    python bench/route.py [--quick]

Three servers as people start them (`manylora serve --simulate a40:llama-7b`, HTTP, real core and cache, simulated steps
and copies) hold the same adapters in memory that fits a third of them, and less in host memory, so that a load comes
from disk. `manylora route` stands in front of them, started anew for each router; the servers stay. The same requests
(Poisson arrivals, adapters by Zipf's law) go through each router in turn, round after round, in another order each
round. Loads are the servers' own counters. Writes `results/route.json` and `.md`.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from live import VOCABULARY, http_arrivals, write_adapters
from publishing import Others, arguments, publish, reason_to_refuse, table
from ratios import Ratio, ratio_by_round

from manylora.demo import demo_model_path
from manylora.lab.bench.load import run_load
from manylora.lab.bench.report import make_report
from manylora.lab.bench.rounds import in_turns, machine
from manylora.lab.bench.target import Target
from manylora.lab.measure import Slo
from manylora.lab.workloads import AdapterSet, Workload, WorkloadSpec, make_workload
from manylora.lab.workloads.arrivals import PoissonArrivals
from manylora.lab.workloads.lengths import ExponentialTokens, ParametricLengths, TokenBounds
from manylora.lab.workloads.popularity import ZipfShares

NUM_SERVERS = 3
NUM_ADAPTERS = 48
ADAPTERS = AdapterSet(count=NUM_ADAPTERS, ranks=(64,), targets=("q_proj", "k_proj", "v_proj", "o_proj"))
SLO_TTFT_S = 0.5
ROUND_ROBIN = "round robin"
ROUTERS = {
    ROUND_ROBIN: f"{Path(__file__).resolve().parents[1]}/examples/round_robin.py:RoundRobin",
    "least-loaded": "least-loaded",
    "affinity": "affinity",
}
MEMORY = ("--memory", "4GiB", "--host-memory", "2GiB", "--max-model-len", "1024")
SERVE = ("--simulate", "a40:llama-7b", *MEMORY, "--no-prefix-caching")  # every router gets the same prompts
LOADS = re.compile(r'^manylora_adapter_loads_total\{tier="(\w+)"\} (\S+)', re.MULTILINE)

Figures = dict[str, float]


@contextmanager
def started(*commands: Sequence[str]) -> Iterator[list[str]]:
    """Start commands of manylora that print their address last, all at once; yield the addresses."""
    flags = ("--port", "0", "--log-level", "error")
    runs = [[sys.executable, "-m", "manylora", *command, *flags] for command in commands]
    processes = [subprocess.Popen(run, stdout=subprocess.PIPE, text=True) for run in runs]
    try:
        lines = [process.stdout.readline() for process in processes if process.stdout is not None]
        assert all(lines), "a server did not start"
        yield [line.split()[-1] for line in lines]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.communicate()


def num_loads(urls: Sequence[str]) -> Figures:
    """Return the loads of all servers so far, by tier."""
    totals: Figures = {}
    for url in urls:
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            for tier, value in LOADS.findall(answer.read().decode()):
                totals[tier] = totals.get(tier, 0.0) + float(value)
    return totals


def make_requests(rate: float, num_requests: int, seed: int) -> Workload:
    """Draw the requests of a round."""
    spec = WorkloadSpec(
        name="route",
        arrivals=PoissonArrivals(rate=rate),
        lengths=ParametricLengths(
            prompt=ExponentialTokens(mean=120),
            output=ExponentialTokens(mean=40),
            bounds=TokenBounds(min_prompt=2, max_prompt=600, max_output=200),
        ),
        adapters=ADAPTERS,
        popularity=ZipfShares(),
        num_requests=num_requests,
    )
    return make_workload(spec, seed)


def measure(urls: Sequence[str], router: str, rate: float, workload: Workload) -> Figures:
    """Send the requests of a round through one router."""
    flags = [flag for url in urls for flag in ("--backend", url)]
    with started(["route", *flags, "--router", router]) as (url,):
        target = Target(url=url)
        before = num_loads(urls)
        run = asyncio.run(run_load(target, http_arrivals(workload, target, VOCABULARY)))
        after = num_loads(urls)
    report = make_report(run, slo=Slo(ttft_s=SLO_TTFT_S), offered_per_s=rate)
    summary = report.summary
    assert summary.ttft is not None
    return {
        "ttft_mean_s": summary.ttft.mean,
        "ttft_p50_s": summary.ttft.p50,
        "ttft_p99_s": summary.ttft.p99,
        "within_slo": summary.slo_attainment,
        "errors": summary.num_errors,
        "device_loads": after["device"] - before["device"],
        "disk_loads": after["host"] - before["host"],
        "requests": summary.num_requests,
    }


def main() -> None:
    parser = arguments(__doc__, quick="one short round")
    parser.add_argument("--rate", type=float, default=9.0, help="requests per second over all servers")
    parser.add_argument("--requests", type=int, default=270, help="in a round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rounds, num_requests = (1, 40) if options.quick else (options.rounds, options.requests)
    others = Others()
    results: dict[str, list[Figures]] = {name: [] for name in ROUTERS}
    workloads = [make_requests(options.rate, num_requests, seed) for seed in range(rounds)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_adapters(folder, workloads[0])
        serve = ["serve", str(demo_model_path()), "--served-model-name", "demo", *SERVE, "--lora-dir", str(folder)]
        urls = stack.enter_context(started(*[serve] * NUM_SERVERS))
        for turn, name in in_turns(list(ROUTERS), rounds, num_warm_up=0):
            results[name].append(measure(urls, ROUTERS[name], options.rate, workloads[turn]))
            print(f"round {turn}, {name}: {results[name][-1]}", flush=True)
    command = f"python bench/route.py --rate {options.rate:g} --requests {num_requests} --rounds {rounds}"
    refused = reason_to_refuse(rounds, others.share())
    report(results, command, is_kept=not options.quick, refused=refused)


def report(results: dict[str, list[Figures]], command: str, *, is_kept: bool, refused: str | None) -> None:
    about: dict[str, Any] = machine()

    def against(name: str, key: str) -> Ratio:
        return ratio_by_round(*([one[key] for one in results[side]] for side in (name, ROUND_ROBIN)))

    rows = []
    for name, rounds in results.items():
        middle = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        rows.append(
            [
                name,
                *(f"{1e3 * middle[key]:.0f}" for key in ("ttft_mean_s", "ttft_p50_s", "ttft_p99_s")),
                *(against(name, key) for key in ("ttft_mean_s", "ttft_p99_s", "device_loads")),
                f"{100 * middle['within_slo']:.1f}",
                f"{middle['device_loads']:.0f}",
                f"{middle['disk_loads']:.0f}",
                f"{sum(one['errors'] for one in rounds):.0f}",
            ]
        )
    heads = ["router", "TTFT mean ms", "P50", "P99", "mean, of round robin's", "P99", "loads"]
    heads += [f"within {SLO_TTFT_S:g} s %", "loads to device", "from disk", "errors"]
    text = [
        "# Adapters over three servers, by router",
        "",
        f"`{command}` on {about['cpu']}, {about['cores']} cores: {NUM_ADAPTERS} adapters of rank {ADAPTERS.ranks[0]}",
        f"of Llama-7B on {NUM_SERVERS} simulated A40 with 4 GiB for KV and adapters, 2 GiB of host memory.",
        "`manylora route` in front, HTTP throughout. Medians over rounds; ratios are taken within a round, with the",
        "95 % interval of their median.",
        "",
        *table(heads, rows),
    ]
    figures = {"command": command, "machine": about, "results": results}
    publish("route", figures, "\n".join(text), is_kept=is_kept, refused=refused)


if __name__ == "__main__":
    main()
