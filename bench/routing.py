"""Which replica should get a request? Every router before eight replicas, under kernels that pad and that do not.

The set-up is CaraServe's as far as it is published: Llama2-7B on eight A10s, adapters on q, k and v, 36 ms promised for
each token after the first. How often a promise is kept depends on how many large ranks share a batch; what is loaded
depends on at how many replicas an adapter is asked for. No router is told how long an answer will be.

Run it: `python bench/routing.py` (`--quick` for a smoke test). It writes `results/routing.json` and `.md`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from manylora.config import AdapterConfig, SchedulerConfig
from manylora.measure import Slo
from manylora.routing import ROUTERS
from manylora.sim.run.simulation import simulate
from manylora.sim.setup import Setup, make_config
from manylora.workloads import AdapterSet, Workload, WorkloadSpec, make_workload
from manylora.workloads.arrivals import PoissonArrivals
from manylora.workloads.distributions import GammaTokens
from manylora.workloads.lengths import ParametricLengths, TokenBounds
from manylora.workloads.popularity import ZipfShares

RESULTS = Path(__file__).parent / "results"
TARGETS = ("q_proj", "k_proj", "v_proj")
TPOT_S = 0.036
RATE, NUM_REQUESTS, WARM_UP_S = 14.0, 1500, 10.0
KERNELS = {"padded": "BGMV: every row pays for the largest rank", "ragged": "rows pay for their own rank"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one run showed; times in seconds, shares in [0, 1]."""

    kernel: str
    router: str
    within_slo: float
    tpot_p50_s: float
    tpot_p99_s: float
    ttft_p99_s: float
    hit_rate: float
    copies: int
    spread: float


def asked(rate: float, num_requests: int, seed: int) -> Workload:
    """Draw a workload: 512 adapters, a few popular, lengths as in a chat."""
    spec = WorkloadSpec(
        name="routing",
        num_requests=num_requests,
        arrivals=PoissonArrivals(rate=rate),
        lengths=ParametricLengths(
            prompt=GammaTokens(shape=1.0, scale=160.0),
            output=GammaTokens(shape=1.5, scale=100.0),
            bounds=TokenBounds(min_prompt=4, max_prompt=1024, min_output=2, max_output=512),
        ),
        adapters=AdapterSet(count=512, ranks=(8, 16, 32, 64), targets=TARGETS),
        popularity=ZipfShares(),
    )
    return make_workload(spec, seed)


def measure(kernel: str, router: str, workload: Workload, num_replicas: int) -> Row:
    """Simulate one combination."""
    setup = Setup(
        model="llama-2-7b",
        hardware="a10",
        lora_kernel=kernel,
        num_replicas=num_replicas,
        router=router,
        router_options={"tbt_s": TPOT_S},
        scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=512, max_waiting=1_000_000),
        adapters=AdapterConfig(host_bytes=1 << 50),
    )
    run = simulate(workload, make_config(setup, targets=TARGETS))
    summary = run.summary(slo=Slo(tpot_s=TPOT_S), warm_up_s=WARM_UP_S)
    assert summary.tpot is not None
    assert summary.ttft is not None
    sent = [sum(record.replica == index for record in run.records) for index in range(num_replicas)]
    return Row(
        kernel=kernel,
        router=router,
        within_slo=summary.slo_attainment,
        tpot_p50_s=summary.tpot.p50,
        tpot_p99_s=summary.tpot.p99,
        ttft_p99_s=summary.ttft.p99,
        hit_rate=summary.hit_rate or 0.0,
        copies=sum(stats.num_loads for stats in run.stats),
        spread=max(sent) / (sum(sent) / num_replicas),
    )


def report(rows: Seq[Row], settings: str) -> str:
    """Return the result for people."""
    lines = ["# Routers", "", settings, ""]
    for kernel, remark in KERNELS.items():
        lines += [
            f"## `{kernel}` kernels ({remark})",
            "",
            "| router | within 36 ms a token | TPOT P50 | P99 | TTFT P99 | hit rate | copies | busiest over mean |",
            "|---|---:|---:|---:|---:|---:|---:|---:|",
            *(
                f"| {row.router} | {row.within_slo:.1%} "
                f"| {row.tpot_p50_s * 1e3:.1f} ms | {row.tpot_p99_s * 1e3:.1f} ms | {row.ttft_p99_s * 1e3:,.0f} ms "
                f"| {row.hit_rate:.1%} | {row.copies:,} | {row.spread:.2f} |"
                for row in rows
                if row.kernel == kernel
            ),
            "",
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=RATE, help="requests per second, all replicas together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="two hundred requests, nothing written")
    options = parser.parse_args()
    workload = asked(options.rate, 200 if options.quick else NUM_REQUESTS, options.seed)
    rows = []
    for kernel, router in product(KERNELS, ROUTERS):
        rows.append(measure(kernel, router, workload, options.replicas))
        print(rows[-1], file=sys.stderr, flush=True)
    if options.quick:
        return
    settings = (
        f"`python bench/routing.py`: Llama2-7B on {options.replicas} A10s, {len(workload.requests):,} requests at "
        f"{options.rate:g} a second over 512 adapters of rank 8, 16, 32 and 64 on q, k and v, Zipf popularity; "
        "promised are 36 ms for each token after the first. Times in virtual "
        "time: the same on any machine. One seed: shares within two points of each other are not told apart."
    )
    RESULTS.mkdir(exist_ok=True)
    content = {"settings": settings, "rows": [asdict(row) for row in rows]}
    (RESULTS / "routing.json").write_text(json.dumps(content, indent=1) + "\n")
    (RESULTS / "routing.md").write_text(report(rows, settings))


if __name__ == "__main__":
    main()
