"""Does a router that knows adapters make a fleet faster? `manylora route` over three servers, against round robin.

    python bench/route.py [--quick]

Three servers as people start them (`manylora serve --simulate a40:llama-7b`, HTTP, real core and cache, simulated steps
and copies) hold the same adapters in memory that fits a third of them, and less in host memory, so that a load comes
from disk. `manylora route` stands in front of them, started anew for each router; the servers stay. The same requests
(Poisson arrivals, adapters by Zipf's law) go through each router in turn, round after round, in another order each
round. Loads and hits are the servers' own counters. Writes `results/route.json` and `.md`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any

from publishing import arguments, publish, table

from manylora.bench.ask import Question
from manylora.bench.load import run_load
from manylora.bench.machine import machine
from manylora.bench.report import make_report
from manylora.bench.target import Target
from manylora.demo import demo_model_path
from manylora.measure import Slo
from manylora.workloads import AdapterSet, WorkloadSpec, make_workload
from manylora.workloads.arrivals import PoissonArrivals
from manylora.workloads.distributions import ExponentialTokens
from manylora.workloads.lengths import ParametricLengths, TokenBounds
from manylora.workloads.popularity import ZipfShares

NUM_SERVERS = 3
NUM_ADAPTERS = 48
RANK = 64
SLO_TTFT_S = 0.5
ROUTERS = {
    "round robin": f"{Path(__file__).resolve().parents[1]}/examples/round_robin.py:RoundRobin",
    "least-loaded": "least-loaded",
    "affinity": "affinity",
}
SERVE = ("--simulate", "a40:llama-7b", "--memory", "4GiB", "--host-memory", "2GiB", "--max-model-len", "1024")
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


def write_adapters(folder: Path) -> list[str]:
    """Write folders of adapters without weights: a simulated server reads their configuration."""
    names = [f"adapter-{index:02}" for index in range(NUM_ADAPTERS)]
    for name in names:
        (folder / name).mkdir()
        settings = {
            "peft_type": "LORA",
            "r": RANK,
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
            "base_model_name_or_path": name,  # adapters are known by their content
        }
        (folder / name / "adapter_config.json").write_text(json.dumps(settings))
    return names


def num_loads(urls: Sequence[str]) -> Figures:
    """Return the loads of all servers so far, by tier."""
    totals: Figures = {}
    for url in urls:
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            for tier, value in LOADS.findall(answer.read().decode()):
                totals[tier] = totals.get(tier, 0.0) + float(value)
    return totals


def questions(names: Sequence[str], target: Target, rate: float, num_requests: int, seed: int) -> list[Question]:
    """Draw the requests of a round."""
    spec = WorkloadSpec(
        name="route",
        arrivals=PoissonArrivals(rate=rate),
        lengths=ParametricLengths(
            prompt=ExponentialTokens(mean=120),
            output=ExponentialTokens(mean=40),
            bounds=TokenBounds(min_prompt=2, max_prompt=600, max_output=200),
        ),
        adapters=AdapterSet(count=NUM_ADAPTERS, ranks=(RANK,)),
        popularity=ZipfShares(),
        num_requests=num_requests,
    )
    rng = Random(seed)
    ours = {one.name: name for one, name in zip(spec.adapters.specs(), names, strict=True)}
    found = []
    for index, request in enumerate(make_workload(spec, seed).requests):
        name = "demo" if request.adapter is None else ours[request.adapter]
        prompt = [rng.randrange(10, 100) for _ in range(request.num_prompt_tokens)]
        body = target.body(name, request, prompt)
        found.append(
            Question(
                request_id=str(index),
                at_s=request.arrival_s,
                adapter=name,
                num_prompt_tokens=len(prompt),
                body=body,
            )
        )
    return found


def measure(
    urls: Sequence[str], names: Sequence[str], router: str, rate: float, num_requests: int, seed: int
) -> Figures:
    """Send the requests of a round through one router."""
    flags = [flag for url in urls for flag in ("--backend", url)]
    with started(["route", *flags, "--router", router]) as (url,):
        target = Target(url=url)
        before = num_loads(urls)
        run = asyncio.run(run_load(target, questions(names, target, rate, num_requests, seed)))
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
    parser.add_argument("--requests", type=int, default=540, help="in a round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rounds, num_requests = (1, 40) if options.quick else (options.rounds, options.requests)
    results: dict[str, list[Figures]] = {name: [] for name in ROUTERS}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        names = write_adapters(folder)
        serve = ["serve", str(demo_model_path()), "--served-model-name", "demo", *SERVE, "--lora-dir", str(folder)]
        urls = stack.enter_context(started(*[serve] * NUM_SERVERS))
        for turn in range(rounds):
            order = list(ROUTERS)[turn % len(ROUTERS) :] + list(ROUTERS)[: turn % len(ROUTERS)]
            for name in order:
                results[name].append(measure(urls, names, ROUTERS[name], options.rate, num_requests, seed=turn))
    command = f"python bench/route.py --rate {options.rate:g} --requests {num_requests} --rounds {rounds}"
    report(results, command, is_kept=not options.quick)


def report(results: dict[str, list[Figures]], command: str, *, is_kept: bool) -> None:
    about: dict[str, Any] = machine()
    rows = []
    for name, rounds in results.items():
        middle = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        rows.append(
            [
                name,
                *(f"{1e3 * middle[key]:.0f}" for key in ("ttft_mean_s", "ttft_p50_s", "ttft_p99_s")),
                f"{100 * middle['within_slo']:.1f}",
                f"{middle['device_loads']:.0f}",
                f"{middle['disk_loads']:.0f}",
                f"{middle['device_loads'] / middle['requests']:.2f}",
                f"{sum(one['errors'] for one in rounds):.0f}",
            ]
        )
    heads: tuple[str, ...] = ("router", "TTFT mean ms", "P50", "P99", f"within {SLO_TTFT_S:g} s %")
    heads += ("loads to device", "from disk", "loads a request", "errors")
    text = [
        "# Adapters over three servers, by router",
        "",
        f"`{command}` on {about['cpu']}, {about['cores']} cores, load average {os.getloadavg()[0]:.1f}: {NUM_ADAPTERS}",
        f"adapters of rank {RANK} of Llama-7B on {NUM_SERVERS} simulated A40 with 4 GiB for KV and adapters, 2 GiB of",
        "host memory. `manylora route` in front, HTTP throughout; medians over rounds.",
        "",
        *table(heads, rows),
    ]
    publish("route", {"command": command, "machine": about, "results": results}, "\n".join(text), is_kept=is_kept)


if __name__ == "__main__":
    main()
