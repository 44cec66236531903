"""CaraServe's figure 20 over HTTP: eight simulated A10s behind one server, router by router, beside the simulator.

Each router gets a server of its own, `manylora serve demo --simulate a10:llama-2-7b --replicas 8`, and the same
arrivals: Llama-2-7B at the speed of an A10 on the wall clock, adapters of rank 8 to 64. The simulator serves the same
requests with the same settings in virtual time. A request meets the SLO if the mean time of its tokens after the first
is within 36 ms.

    python bench/router_live.py                 # a quiet machine, three minutes a router
    python bench/router_live.py --routers auto,rank-aware --rate 10
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from live_arrivals import http_arrivals
from publishing import Others, arguments, publish, reason_if_busy, table

from manylora.core.config import AdapterConfig, SchedulerConfig
from manylora.core.routing import ROUTERS
from manylora.demo import demo_model_path
from manylora.lab.bench.load import run_load
from manylora.lab.bench.target import Target
from manylora.lab.measure import RequestRecord
from manylora.lab.sim.run.simulation import simulate
from manylora.lab.sim.setup import Setup, make_config
from manylora.lab.workloads import AdapterSet, Workload, WorkloadSpec, make_workload
from manylora.lab.workloads.arrivals import PoissonArrivals
from manylora.lab.workloads.distributions import GammaTokens
from manylora.lab.workloads.lengths import ParametricLengths, TokenBounds
from manylora.lab.workloads.popularity import ZipfShares

SLO_S = 0.036
NUM_REPLICAS = 8
RANKS = (8, 16, 32, 64)
TARGETS = ("q_proj", "k_proj", "v_proj")
START_S = 600.0
VOCABULARY = 100
"""Tokens that prompts are drawn from: the demo's tokenizer has a few more."""
SCHEDULER = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=512, max_waiting=1_000_000)
SPEC = WorkloadSpec(
    arrivals=PoissonArrivals(rate=14.0),
    lengths=ParametricLengths(
        prompt=GammaTokens(shape=1.0, scale=160.0),
        output=GammaTokens(shape=1.5, scale=100.0),
        bounds=TokenBounds(min_prompt=4, max_prompt=1024, min_output=2, max_output=512),
    ),
    adapters=AdapterSet(count=512, ranks=RANKS, targets=TARGETS),
    popularity=ZipfShares(),
)


def main() -> None:
    """Serve and simulate the requests under every router."""
    parser = arguments(__doc__, quick="40 requests, two routers, two replicas")
    parser.add_argument("--routers", default=",".join(ROUTERS), help="names, with commas between them")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--rate", type=float, default=14.0, help="requests per second")
    options = parser.parse_args()
    if options.quick:
        options.requests, options.routers, options.replicas = 40, "auto,least-loaded", 2
    else:
        options.replicas = NUM_REPLICAS
    spec = replace(SPEC, arrivals=PoissonArrivals(rate=options.rate), num_requests=options.requests)
    workload = make_workload(spec, seed=0)
    figures, others = {}, Others()
    with tempfile.TemporaryDirectory(prefix="manylora-") as folder:
        write_adapters(Path(folder), workload)
        for router in options.routers.split(","):
            figures[router] = {
                "live": live(router, workload, Path(folder), options),
                "simulated": simulated(router, workload, options),
            }
            print(router, figures[router], flush=True)
    rows = [
        [router, *(f"{one[kind]['attained']:.1%}" for kind in ("live", "simulated"))]
        + [f"{one[kind][key] * 1e3:.1f}" for key in ("tpot_p50_s", "ttft_p99_s") for kind in ("live", "simulated")]
        + [one["live"]["loads"], one["simulated"]["loads"], one["live"]["errors"]]
        for router, one in figures.items()
    ]
    heads = ["router", "SLO, live", "simulated", "ms per token, live", "simulated", "P99 ms to first token, live"]
    heads += ["simulated", "loads, live", "simulated", "errors, live"]
    text = "\n".join(
        [
            "# Routers over HTTP and in the simulator",
            "",
            f"{options.replicas} replicas of an A10 with Llama-2-7B, {options.rate:g} requests a second, "
            f"{options.requests} requests, SLO {SLO_S * 1e3:.0f} ms a token. Published (CaraServe, figure 20): "
            "rank-aware meets the SLO for up to 99 %, above most idle (least-loaded here), first-fit and random. "
            f"One run of each; kernels do not pad. `python bench/router_live.py --routers {options.routers} "
            f"--requests {options.requests} --rate {options.rate:g}`",
            "",
            *table(heads, rows),
        ]
    )
    publish("router_live", figures, text, is_kept=not options.quick, refused=reason_if_busy(others.share()))


def write_adapters(folder: Path, workload: Workload) -> None:
    """Write the settings of every adapter: a simulated engine reads no weights."""
    for spec in workload.adapters:
        place = folder / spec.name
        place.mkdir()
        settings = {"peft_type": "LORA", "r": spec.rank, "lora_alpha": spec.rank, "target_modules": list(spec.targets)}
        (place / "adapter_config.json").write_text(json.dumps({**settings, "bias": "none", "name": spec.name}))


def simulated(router: str, workload: Workload, options: argparse.Namespace) -> dict[str, float]:
    """Serve the workload in virtual time."""
    setup = Setup(
        model="llama-2-7b",
        hardware="a10",
        num_replicas=options.replicas,
        router=router,
        router_options={"tbt_s": SLO_S},
        scheduler=SCHEDULER,
        adapters=AdapterConfig(host_bytes=10**12),
        exact_caps=True,
    )
    run = simulate(workload, make_config(setup, targets=TARGETS))
    return summary(run.records) | {"loads": sum(stats.num_loads for stats in run.stats)}


def live(router: str, workload: Workload, adapters: Path, options: argparse.Namespace) -> dict[str, float]:
    """Serve the workload over HTTP."""
    with serving(router, adapters, options.replicas) as url:
        target = Target(url=url)
        questions = http_arrivals(workload, target, VOCABULARY)
        run = asyncio.run(run_load(target, questions, warm_up=questions[:1]))  # one that fails ends the run
        with urllib.request.urlopen(f"{url}/status?adapters=0") as answer:
            status = json.load(answer)
    return summary([answer.record for answer in run.answers]) | {"loads": status["engine"]["num_loads"]}


@contextlib.contextmanager
def serving(router: str, adapters: Path, num_replicas: int) -> Iterator[str]:
    """Start a server; yield its address once it serves."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "manylora", "serve", str(demo_model_path()), "--served-model-name", "demo"]
    command += ["--simulate", "a10:llama-2-7b", "--replicas", str(num_replicas), "--lora-dir", str(adapters)]
    command += ["--router", router, "--router-option", f"tbt_s={SLO_S}", "--host-memory", "1TB"]
    command += ["--max-num-seqs", str(SCHEDULER.max_num_seqs), "--no-prefix-caching", "--port", str(port)]
    command += ["--max-num-batched-tokens", str(SCHEDULER.max_num_batched_tokens), "--max-waiting", "1000000"]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    url = f"http://127.0.0.1:{port}"
    try:
        began = time.monotonic()
        while not answers(f"{url}/health"):
            if process.poll() is not None or time.monotonic() - began > START_S:
                raise SystemExit(f"the server did not start: {' '.join(command)}")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def answers(url: str) -> bool:
    """Whether a server answers with 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def summary(records: list[RequestRecord]) -> dict[str, float]:
    """Return the share of requests within the SLO, and percentiles; a failed request misses the SLO."""
    good = [one for one in records if one.error is None and one.ttft_s is not None]
    tpot = sorted(one.tpot_s for one in good if one.tpot_s is not None)
    ttft = sorted(one.ttft_s for one in good if one.ttft_s is not None)
    late = sum(one > SLO_S for one in tpot)
    return {
        "attained": (len(good) - late) / max(1, len(records)),
        "errors": len(records) - len(good),
        "tpot_p50_s": tpot[len(tpot) // 2],
        "tpot_p99_s": tpot[len(tpot) * 99 // 100],
        "ttft_p99_s": ttft[len(ttft) * 99 // 100],
    }


if __name__ == "__main__":
    main()
