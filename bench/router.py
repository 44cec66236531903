"""The cost of a routing decision: 64 replicas, 10,000 adapters, 2,000 requests under way.

A decision is one dispatch. An older request ends before it, and all replicas report ten times while 2,000 requests
arrive; reports are timed apart. The first decisions fill the fleet and are not counted. Prompts of 20 to 300 tokens
begin with one of 40 shared beginnings of 128 tokens. The decision of `manylora route` is timed apart, with 64 backends
and with 256, every one of which can take each request: with prompts of that length, and of 32,000 tokens, of which as
many blocks are hashed as are at most.

    python bench/router.py
"""

from __future__ import annotations

import random
import time
from collections import deque

from publishing import arguments, publish, table

from manylora.core.costs.step_model import PRIOR
from manylora.core.routing import DEFAULT_ROUTER, ROUTERS, Dispatcher, ReplicaReport, RouterContext, make_router
from manylora.core.routing.prefixes import MOST_BYTES
from manylora.core.types import Request, SamplingParams
from manylora.route.backend import Backend
from manylora.route.choice import Choice, PromptText, Ticket
from manylora.route.config import ProxyConfig
from manylora.route.upstream.address import parse_backend

LIMIT_US = 100.0


def adapters_asked(rng: random.Random, num: int, num_adapters: int) -> list[str]:
    """Return adapters by Zipf's law."""
    weights = [1.0 / (place + 1) for place in range(num_adapters)]
    return [f"adapter-{index}" for index in rng.choices(range(num_adapters), weights, k=num)]


def measure(name: str, num: int, *, replicas: int, adapters: int, under_way: int) -> dict[str, float]:
    """Return microseconds per decision and per report."""
    rng = random.Random(1)
    ranks = {f"adapter-{index}": 8 << index % 4 for index in range(adapters)}
    context = RouterContext(rng=rng, ranks=ranks, max_num_seqs=128)
    dispatcher = Dispatcher(make_router(name, context, {"tbt_s": 0.05}), replicas, ranks)
    requests = [
        Request(
            request_id=str(index),
            prompt=(*[rng.randrange(40)] * 128, *[index] * 172)[: rng.randint(20, 300)],
            model=model,
            sampling=SamplingParams(max_tokens=256),
        )
        for index, model in enumerate(adapters_asked(rng, under_way + num, adapters))
    ]
    in_flight: deque[str] = deque()
    decisions: list[float] = []
    reports: list[float] = []
    for index, request in enumerate(requests):
        if len(in_flight) == under_way:
            dispatcher.ended(in_flight.popleft())
        begin = time.thread_time()
        dispatcher.dispatch(request)
        took = time.thread_time() - begin
        in_flight.append(request.request_id)
        if index >= under_way:
            decisions.append(took * 1e6)
        if len(in_flight) > under_way // 20:
            dispatcher.started(in_flight[-under_way // 20])
        if index % (under_way // 10) == 0:
            for replica, view in enumerate(dispatcher.views):
                kept = list(view.resident)[-200:]  # as many as an engine's memory holds
                report = ReplicaReport(
                    num_requests=view.num_requests, kv_tokens=40_000, resident=kept, steps=PRIOR, num_answers=index
                )
                begin = time.thread_time()
                dispatcher.report(replica, report)
                reports.append((time.thread_time() - begin) * 1e6)
    return {**statistics_of(decisions), "report_us": sum(reports) / len(reports)}


def measure_proxy(
    router: str, num: int, *, backends: int, adapters: int, under_way: int, num_tokens: int | None = None
) -> dict[str, float]:
    """Return microseconds per decision of `manylora route`; prompts are of 20 to 300 tokens, or of ``num_tokens``."""
    rng, ranks = random.Random(1), dict[str, int]()
    choice = Choice(make_router(router, RouterContext(rng=rng, ranks=ranks, max_num_seqs=256), {}), ranks)
    shared = [rng.randbytes(512) for _ in range(40)]
    urls = tuple(f"http://10.0.0.1:{port}" for port in range(1, backends + 1))
    config = ProxyConfig(backends=urls)
    available = [Backend(parse_backend(url), config, is_warm=True) for url in urls]
    for backend in available:
        choice.join(backend)
    in_flight: deque[Ticket] = deque()
    decisions: list[float] = []
    for index, model in enumerate(adapters_asked(rng, under_way + num, adapters)):
        if len(in_flight) == under_way:
            in_flight.popleft().end()
        asked = num_tokens or rng.randint(20, 300)
        text = (rng.choice(shared) + rng.randbytes(4 * asked))[: 4 * asked]
        begin = time.thread_time()
        ticket = choice.choose(model, PromptText(text[:MOST_BYTES], len(text), asked), available)
        took = time.thread_time() - begin
        in_flight.append(ticket)
        if index >= under_way:
            decisions.append(took * 1e6)
    return statistics_of(decisions)


def statistics_of(decisions: list[float]) -> dict[str, float]:
    """Return the mean and percentiles of microseconds."""
    decisions = sorted(decisions)
    return {
        "mean_us": sum(decisions) / len(decisions),
        "p50_us": decisions[len(decisions) // 2],
        "p99_us": decisions[len(decisions) * 99 // 100],
    }


def main() -> None:
    """Measure every router."""
    options = arguments(__doc__, quick="a tenth of the requests").parse_args()
    num = 2_000 if options.quick else 20_000
    found = {name: measure(name, num, replicas=64, adapters=10_000, under_way=2_000) for name in ROUTERS}
    keys = ("mean_us", "p50_us", "p99_us")
    rows = [[name, *(f"{one[key]:.1f}" for key in (*keys, "report_us"))] for name, one in found.items()]
    cases = [
        (router, backends, num_tokens)
        for router in ("affinity", DEFAULT_ROUTER)
        for backends in (64, 256)
        for num_tokens in (None, 32_000)
    ]
    proxies = {
        case: measure_proxy(
            case[0],
            num if case[2] is None else num // 10,
            backends=case[1],
            adapters=10_000,
            under_way=2_000,
            num_tokens=case[2],
        )
        for case in cases
    }
    proxy_rows = [
        [
            router,
            backends,
            "20 to 300" if num_tokens is None else f"{num_tokens:,}",
            *(f"{one[key]:.1f}" for key in keys),
        ]
        for (router, backends, num_tokens), one in proxies.items()
    ]
    lines = [
        "# Cost of a routing decision",
        "",
        "64 replicas, 10,000 adapters (Zipf), 2,000 requests under way; microseconds of processor time.",
        "`python bench/router.py`",
        "",
        *table(["router", "mean", "median", "P99", "a report"], rows),
        "",
        f"Goal: at most {LIMIT_US:.0f} us on average.",
        "",
        f"`manylora route`; its default is `{DEFAULT_ROUTER}`:",
        "",
        *table(["router", "backends", "tokens of a prompt", "mean", "median", "P99"], proxy_rows),
    ]
    publish(
        "router",
        {"limit_us": LIMIT_US, "routers": found, "proxy": [[*case, one] for case, one in proxies.items()]},
        "\n".join(lines),
        is_kept=not options.quick,
    )


if __name__ == "__main__":
    main()
