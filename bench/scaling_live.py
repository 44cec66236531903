"""A stretch of the day of `scaling.py` over HTTP: simulated devices in engines that start and drain by the load.

Each engine is a process with the speed of an A10 under Llama-2 7B on the wall clock, on this machine or on a Ray
cluster of several raylets on it. The simulator serves the same requests by the same decisions in virtual time, with the
mean time that a start took live. Figures are those of `scaling.py`; seconds are of the compressed day.

    python bench/scaling_live.py --trace gentd26_qps.csv.gz            # ten minutes, up to four engines
    python bench/scaling_live.py --trace gentd26_qps.csv.gz --ray      # on five raylets
    python bench/scaling_live.py --trace gentd26_qps.csv.gz --quick    # a minute, up to two engines
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
from live import VOCABULARY, http_arrivals, write_adapters
from publishing import Others, arguments, publish, reason_if_busy, table
from scaling import count_flaps, make_day, replica_seconds

from manylora.core.config import AdapterConfig, EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from manylora.core.scaling.autoscaler import ScalingPolicy
from manylora.core.server_config import FleetConfig
from manylora.demo import demo_model_path
from manylora.lab.bench.load import run_load
from manylora.lab.bench.rounds import machine
from manylora.lab.bench.target import Target
from manylora.lab.measure import RequestRecord
from manylora.lab.sim.run.scaling import ReplicaSpan, SimulatedScaling
from manylora.lab.sim.run.simulation import simulate
from manylora.lab.sim.setup import Setup, make_config
from manylora.lab.workloads import Workload
from manylora.serving.server import BackgroundServer, LoraModule

TTFT_S = 2.0
LOOK_S = 0.2
"""Seconds between two looks at the states of the engines."""
ADAPTERS = AdapterConfig(host_bytes=10**12)
SCHEDULER = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=512, max_waiting=1_000_000)

QUICK_DEATHS = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000}
"""A node counts as dead after five seconds in place of fifteen, so that its place is filled sooner."""

Figures = dict[str, float]


class LocalRay:
    """A head, and nodes with room for one engine each, as a context manager.

    Args:
        num_nodes: Nodes beside the head.
    """

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes
        self._cluster: Any = None

    def __enter__(self) -> LocalRay:
        """Start the cluster."""
        from ray.cluster_utils import Cluster

        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - this is the name
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": QUICK_DEATHS}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(self._num_nodes):
            self.add_node()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop every node."""
        self._cluster.shutdown()

    @property
    def address(self) -> str:
        """The address of the head."""
        return str(self._cluster.address)

    def add_node(self) -> None:
        """Start a node."""
        self._cluster.add_node(num_cpus=1)

    def lose(self, node: str) -> None:
        """Kill the raylet of a node, named as in ``/status``, with every process of it."""
        begin = node.rpartition("/")[2]
        (lost,) = (one for one in self._cluster.worker_nodes if one.node_id.startswith(begin))
        self._cluster.remove_node(lost, allow_graceful=False)


def stretch(options: argparse.Namespace) -> Workload:
    """Return the requests of some hours of the day, from time 0."""
    day = make_day(options.trace, compression=options.compression, peak_rate=options.rate, seed=0)
    first, last = (3600 * hour / options.compression for hour in options.hours)
    kept = [one for one in day.requests if first <= one.arrival_s < last]
    return replace(day, requests=tuple(replace(one, arrival_s=one.arrival_s - first) for one in kept))


async def watch(url: str, spans: list[ReplicaSpan]) -> None:
    """Note the lives of engines by ``/status``, until cancelled; those that are alive then have no end."""
    now = asyncio.get_running_loop().time
    began_at = now()
    async with aiohttp.ClientSession() as client:
        while True:
            async with client.get(f"{url}/status?adapters=0") as answer:
                rows = {row["index"]: row["state"] for row in (await answer.json())["replicas"]}
            at_s = now() - began_at
            for span in spans:
                if math.isinf(span.ended_at):
                    state = rows.pop(span.index, None)
                    if state is None:
                        span.ended_at = at_s
                    if state == "serving":
                        span.serving_at = min(span.serving_at, at_s)
                    if state in (None, "draining", "stopped"):
                        span.draining_at = min(span.draining_at, at_s)
            spans += [ReplicaSpan(index=index, asked_at=at_s) for index in rows]
            await asyncio.sleep(LOOK_S)


async def ask(url: str, workload: Workload) -> tuple[list[RequestRecord], list[ReplicaSpan]]:
    """Send the requests at their times; return their records, and the lives of engines."""
    target = Target(url=url)
    questions = http_arrivals(workload, target, VOCABULARY)
    spans: list[ReplicaSpan] = []
    watching = asyncio.create_task(watch(url, spans))
    began_at = asyncio.get_running_loop().time()
    run = await run_load(target, questions, warm_up=questions[:1])
    took_s = asyncio.get_running_loop().time() - began_at
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    for span in spans:
        span.ended_at = min(span.ended_at, took_s)
    return [answer.record for answer in run.answers], spans


def live(
    workload: Workload, options: argparse.Namespace, others: Others
) -> tuple[list[RequestRecord], list[ReplicaSpan], float]:
    """Serve the requests over HTTP.

    The third result is the share of others while everything runs: an engine of Ray has no parent here once its raylet
    has ended, and would count as another's.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="manylora-")))
        write_adapters(folder, workload)
        ray = stack.enter_context(LocalRay(options.most)) if options.ray else None
        engine = EngineConfig(
            model=ModelConfig(model=str(demo_model_path()), served_model_name="demo"),
            simulate="a10:llama-2-7b",
            scheduler=SCHEDULER,
            adapters=ADAPTERS,
        )
        fleet = FleetConfig(
            min_replicas=1, max_replicas=options.most, slo_ttft_s=TTFT_S, ray=None if ray is None else ray.address
        )
        modules = [LoraModule(one.name, str(folder / one.name)) for one in workload.adapters]
        server = stack.enter_context(BackgroundServer(engine, ServerConfig(port=0, fleet=fleet), modules))
        return *asyncio.run(ask(server.url, workload)), others.share()


def simulated(
    workload: Workload, options: argparse.Namespace, start_s: float
) -> tuple[list[RequestRecord], list[ReplicaSpan]]:
    """Serve the requests in virtual time."""
    setup = Setup(
        model="llama-2-7b",
        hardware="a10",
        num_replicas=options.most,
        router="auto",
        scheduler=SCHEDULER,
        adapters=ADAPTERS,
        exact_caps=True,
    )
    policy = ScalingPolicy(
        min_replicas=1, max_replicas=options.most, ttft_s=TTFT_S, max_num_seqs=SCHEDULER.max_num_seqs
    )
    scaling = SimulatedScaling(policy=policy, start_s=start_s)
    run = simulate(workload, replace(make_config(setup), scaling=scaling))
    return run.records, list(run.spans)


def summary(records: list[RequestRecord], spans: list[ReplicaSpan], start_s: float) -> Figures:
    """Return the figures of one run; a failed request misses the SLO."""
    met = sum(one.error is None and one.ttft_s is not None and one.ttft_s <= TTFT_S for one in records)
    changes = sorted([(one.asked_at, 1) for one in spans] + [(one.ended_at, -1) for one in spans])
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    late = [one.arrived_at for one in records if one.ttft_s is None or one.ttft_s > TTFT_S]
    return {
        "attainment": met / len(records),
        "last_late_s": max(late, default=0.0) - min(one.arrived_at for one in records) if late else 0.0,
        "errors": sum(one.error is not None for one in records),
        "replica_seconds": replica_seconds(spans),
        "most": most,
        "starts": len(started(spans)),
        "flaps": count_flaps(spans, 2 * start_s),
    }


def started(spans: list[ReplicaSpan]) -> list[ReplicaSpan]:
    """Return the engines that scaling has started, without those of the begin."""
    return [one for one in spans if one.asked_at > 2 * LOOK_S]


def main() -> None:
    """Serve the stretch live, then simulate it."""
    parser = arguments(__doc__, quick="one hour at half the rate, up to two engines")
    parser.add_argument("--trace", type=Path, required=True, help="requests per second of containers, as of GenTD26")
    parser.add_argument("--compression", type=float, default=60.0, help="seconds of the day in one second")
    parser.add_argument("--hours", type=float, nargs=2, default=(6.0, 16.0), help="first and last hour of the stretch")
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second in the busiest half hour")
    parser.add_argument("--most", type=int, default=4, help="engines at most")
    parser.add_argument("--ray", action="store_true", help="engines on a Ray cluster, a raylet for each")
    options = parser.parse_args()
    if options.quick:
        options.hours, options.most, options.rate = (8.0, 9.0), 2, 5.0
    workload, others = stretch(options), Others()
    records, spans, share = live(workload, options, others)
    starts = [one.serving_at - one.asked_at for one in started(spans) if math.isfinite(one.serving_at)]
    start_s = statistics.mean(starts) if starts else 1.0
    figures = {
        "live": summary(records, spans, start_s),
        "simulated": summary(*simulated(workload, options, start_s), start_s),
    }
    heads = ["fleet", "within the SLO", "last late", "errors", "replica-seconds", "most at once", "starts", "flaps"]
    rows = [
        [
            name,
            f"{one['attainment']:.2%}",
            f"{one['last_late_s']:.0f} s",
            one["errors"],
            f"{one['replica_seconds']:.0f}",
        ]
        + [one[key] for key in ("most", "starts", "flaps")]
        for name, one in figures.items()
    ]
    where = "on a Ray cluster" if options.ray else "on one machine"
    lines = [
        "# Scaling over HTTP and in the simulator",
        "",
        f"Hours {options.hours[0]:g} to {options.hours[1]:g} of GenTD26, a second for {options.compression:g} of the "
        f"day: {len(workload.requests)} requests. Up to {options.most} engines {where}, each an A10 with Llama-2 7B. "
        f"SLO: first token within {TTFT_S:g} s. A start took {start_s:.1f} s. The stretch begins with one engine and "
        "without a quiet hour before it; *last late*: when the last request came that missed the SLO.",
        "",
        *table(heads, rows),
    ]
    shown = {**vars(options), "trace": options.trace.name}
    kept = {"options": {key: str(value) for key, value in shown.items()}, "machine": machine(), **figures}
    name, refused = "scaling-live-ray" if options.ray else "scaling-live", reason_if_busy(share)
    publish(name, kept, "\n".join(lines), is_kept=not options.quick, refused=refused)


if __name__ == "__main__":
    main()
