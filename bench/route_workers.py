"""Several workers of `manylora route`: what is one book worth, and what does it cost?

    python bench/route_workers.py book [--quick]
    python bench/route_workers.py cost [--quick]

*Book*, in virtual time: 1, 2 and 4 routers take the requests of one fleet at random, as a port deals connections out.
*Apart*, each knows its own requests and prefixes, and of the others' what backends report once a second: how many
requests there are, and which adapters are on the device. *One book* is what workers share. Backends and conversations
are those of `route_prefixes.py`.

*Cost*, live: a client keeps 128 requests under way, each of one token, through one worker and through two, over three
backends of `proxy_parts.py`. Processor time of the workers for a request, and requests a second. Client, source and
workers share the machine: on few processors two workers cannot be twice as fast as one.

Writes `results/route_workers_book.json`, `results/route_workers_cost.json` and `.md`.
"""

from __future__ import annotations

import asyncio
import copy
import statistics
import sys
import time
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import uvloop
from http_cost import cpu_seconds
from proxy import NUM_PORTS, started
from publishing import Others, arguments, publish, reason_to_refuse, table
from ratios import Ratio, ratio_by_round
from route_prefixes import Figures, simulated

from manylora.core.routing import Dispatcher, ReplicaReport, Router
from manylora.core.types import Request
from manylora.lab.bench.rounds import in_turns, machine
from manylora.lab.sim.run import simulation

POLICIES = ("auto", "affinity", "least-loaded")
NUM_APART = (1, 2, 4)
RATE, NUM_REQUESTS = 8.0, 2000
NUM_UNDER_WAY, NUM_GROUPS = 128, 50
REQUEST = b'{"model":"paced","prompt":[1,%d],"max_tokens":1,"ignore_eos":true,"stream":true}'
END = b"0\r\n\r\n"


class Apart:
    """Dispatchers of routers that know nothing of each other, in place of a simulation's only one."""

    def __init__(self, num: int, seed: int) -> None:
        self._num, self._rng = num, Random(seed)
        self._of: dict[str, Dispatcher] = {}

    def __call__(self, router: Router, num_replicas: int, ranks: Mapping[str, int], *, caches_prefixes: bool) -> Apart:
        self._each = [
            Dispatcher(copy.deepcopy(router), num_replicas, ranks, caches_prefixes=caches_prefixes)
            for _ in range(self._num)
        ]
        return self

    def dispatch(self, request: Request, serving: Container[int] | None = None) -> int:
        self._of[request.request_id] = chosen = self._rng.choice(self._each)
        return chosen.dispatch(request, serving)

    def started(self, request_id: str) -> None:
        self._of[request_id].started(request_id)

    def ended(self, request_id: str) -> int:
        return self._of.pop(request_id).ended(request_id)

    def report(self, replica: int, report: ReplicaReport) -> None:
        """Tell each what a backend reports: of the requests there, those that are not its own are others'."""
        for one in self._each:
            view = one.views[replica]
            view.num_foreign = max(0, (report.num_requests or 0) - view.num_requests)
            one.report(replica, replace(report, num_requests=None))


def book(rounds: int, num_requests: int) -> dict[str, list[Figures]]:
    """Return the figures of every policy and number of routers, by seed."""
    found: dict[str, list[Figures]] = {}
    for policy in POLICIES:
        for num in NUM_APART:
            name = f"{policy}, {'one book' if num == 1 else f'{num} apart'}"
            found[name] = []
            for seed in range(rounds):
                with patch.object(simulation, "Dispatcher", Apart(num, seed)):
                    found[name].append(simulated("manylora", policy, RATE, num_requests, seed))
            print(name, found[name], flush=True)
    return found


class Caller(asyncio.Protocol):
    """Asks again as soon as it is answered."""

    def __init__(self, index: int, ended: list[float]) -> None:
        body = REQUEST % index
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        )
        self._request, self._ended, self._rest = head % len(body) + body, ended, b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._rest = self._rest[-len(END) :] + data
        if self._rest.endswith(END):
            assert b"HTTP/1.1 4" not in self._rest and b"HTTP/1.1 5" not in self._rest
            self._ended.append(time.perf_counter())
            self._rest = b""
            self._transport.write(self._request)


async def ask(port: int, seconds: float) -> float:
    """Keep requests under way; return how many a second were answered."""
    loop, ended = asyncio.get_running_loop(), list[float]()
    callers = [
        await loop.create_connection(lambda index=index: Caller(index, ended), "127.0.0.1", port)  # type: ignore[misc]
        for index in range(NUM_UNDER_WAY)
    ]
    await asyncio.sleep(seconds)
    for transport, _ in callers:
        transport.abort()
    return len(ended) / seconds


def cost(rounds: int, seconds: float) -> dict[str, list[Figures]]:
    """Return requests a second, and microseconds of all workers' processor time for one, by round."""
    with ExitStack() as stack:
        parts = str(Path(__file__).parent / "proxy_parts.py")
        _, ports = stack.enter_context(started([sys.executable, parts, "source", str(NUM_PORTS), str(NUM_GROUPS)]))
        flags = [flag for port in ports for flag in ("--backend", f"http://127.0.0.1:{port}")]
        command = [sys.executable, "-m", "manylora", "route", *flags, "--port", "0", "--log-level", "error"]
        ways: dict[str, tuple[list[int], int]] = {}
        for name, num in (("one worker", 1), ("two workers", 2)):
            pid, numbers = stack.enter_context(started([*command, "--workers", str(num)]))
            time.sleep(1)
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            ways[name] = [int(child) for child in children] or [pid], numbers[-1]
        found: dict[str, list[Figures]] = {name: [] for name in ways}
        for _, name in in_turns(list(ways), rounds, num_warm_up=1):
            pids, port = ways[name]
            before = sum(cpu_seconds(pid) or 0.0 for pid in pids)
            per_s = uvloop.run(ask(port, seconds))
            used = sum(cpu_seconds(pid) or 0.0 for pid in pids) - before
            found[name].append({"per_s": per_s, "us": 1e6 * used / (per_s * seconds)})
            print(name, found[name][-1], flush=True)
        return {name: each[-rounds:] for name, each in found.items()}


Compared = Iterator[tuple[str, Figures, Ratio]]


def compared(found: Mapping[str, list[Figures]], key: str, beside: Callable[[str], str]) -> Compared:
    """Yield each side with its medians, and the ratio of a figure to that of the side ``beside`` it."""
    for name, each in found.items():
        middle = {one: statistics.median(figures[one] for figures in each) for one in each[0]}
        yield name, middle, ratio_by_round(*([one[key] for one in side] for side in (each, found[beside(name)])))


def text_of_book(found: Mapping[str, list[Figures]], command: str) -> list[str]:
    """Return the figures of routers apart as Markdown."""
    rows = []
    for name, middle, ratio in compared(found, "ttft_mean_s", lambda name: f"{name.partition(',')[0]}, one book"):
        ttft = [f"{1e3 * middle[key]:.0f}" for key in ("ttft_mean_s", "ttft_p50_s", "ttft_p99_s")]
        rows.append([name, *ttft, ratio, f"{100 * middle['hits']:.1f}", f"{middle['loads']:.0f}"])
    heads = ("routers", "TTFT mean ms", "P50", "P99", "mean, to one book", "prompt tokens cached %", "loads")
    return [
        "# Routers apart and one book",
        "",
        f"`{command}`: four simulated replicas of Llama-3-8B on A40 with prefix caches and 48 adapters, "
        f"{NUM_REQUESTS:,} requests of conversations at {RATE:g} a second. Medians over seeds; ratios to one book are "
        "taken within a seed, with the 95 % interval of their median.",
        "",
        *table(heads, rows),
    ]


def text_of_cost(found: Mapping[str, list[Figures]], command: str) -> list[str]:
    """Return the figures of workers as Markdown."""
    rows = [
        [name, f"{middle['per_s']:,.0f}", f"{middle['us']:.0f}", ratio]
        for name, middle, ratio in compared(found, "us", lambda name: "one worker")
    ]
    about = machine()
    return [
        "# The cost of one book",
        "",
        f"`{command}` on {about['cpu']}, {about['cores']} cores, which source, client and workers share: "
        f"{NUM_UNDER_WAY} requests of one token under way. Medians over rounds; the ratio is of processor times within "
        "a round.",
        "",
        *table(("workers", "requests/s", "us a request, of all workers", "to one worker"), rows),
    ]


def main() -> None:
    parser = arguments(__doc__, quick="one short round")
    parser.add_argument("which", choices=("book", "cost"))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rounds, others, refused = 1 if options.quick else options.rounds, Others(), None
    command = f"python bench/route_workers.py {options.which} --rounds {rounds}"
    if options.which == "book":
        found = book(rounds, 200 if options.quick else NUM_REQUESTS)
        text = text_of_book(found, command)
    else:
        found = cost(rounds, 1.0 if options.quick else 4.0)
        text = text_of_cost(found, command)
        refused = None if options.quick else reason_to_refuse(rounds, others.share())
    figures = {"machine": machine(), "figures": found}
    publish(f"route_workers_{options.which}", figures, "\n".join(text), is_kept=not options.quick, refused=refused)


if __name__ == "__main__":
    main()
