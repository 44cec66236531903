"""Adapters and prefix blocks in one pool: does one price over both beat a rule for adapters beside LRU for blocks?

Conversations over many adapters, so that both kinds of idle memory are worth keeping: each turn's prompt is the
conversation so far plus a new question, after a pause. The whole engine runs, on the virtual clock and a fixed cost
model, with a pool that holds neither all adapters nor all conversations. How much a prompt token costs against a
byte of weights decides which kind should yield; so three costs of a token are run, from a fast accelerator to a slow
one. Only ``price`` can know the difference.

Run it: ``python bench/one_price.py`` writes ``results/one_price.json`` and ``.md``; ``--quick`` is a tenth.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from bisect import bisect_left
from dataclasses import asdict, dataclass
from pathlib import Path

from eviction import BASE, POLICIES, mandelbrot, version_of, versions

from manylora.clock import VirtualClock
from manylora.config import AdapterConfig, MemoryConfig, SchedulerConfig
from manylora.costs.model import FixedCost
from manylora.engine.core import EngineCore
from manylora.engine.loop import EngineLoop
from manylora.events import AdapterLoadStarted, Event, RequestFinished
from manylora.plan import PlannedSequence
from manylora.sim.run.executor import SimulatedExecutor
from manylora.types import Request, SampledToken, SamplingParams, Tier

RESULTS = Path(__file__).parent / "results"
NUM_ADAPTERS, NUM_CONVERSATIONS, NUM_PAGES = 200, 500, 2000
CONVERSATION_RATE = 1.0
"""Conversations that begin per second."""
TOKEN_COSTS_S = {"fast prefill": 0.00002, "medium": 0.0001, "slow prefill": 0.0002}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one policy made of the conversations.

    Args:
        adapter_hit_rate: Requests that found their adapter on the device.
        cached_share: Prompt tokens that were in idle pages.
        link_s: Seconds spent copying adapters.
        prefill_s: Seconds spent on prompt tokens.
        mean_ttft_s: Mean time to the first token.
        p99_ttft_s: Its 99th percentile.
    """

    adapter_hit_rate: float
    cached_share: float
    link_s: float
    prefill_s: float
    mean_ttft_s: float
    p99_ttft_s: float


def token(conversation: int, position: int) -> int:
    """Return what stands at a position of a conversation, whoever wrote it; position 0 names the conversation."""
    return conversation if position == 0 else (conversation * 7919 + position * 104_729) % BASE.vocab_size


def next_token(part: PlannedSequence) -> SampledToken:
    """Answer as the conversation goes on."""
    return SampledToken(token_id=token(part.tokens[0], part.start + part.num_tokens))


def conversations(num: int, rng: random.Random) -> list[tuple[float, Request]]:
    """Return turns by time: questions and answers of some hundred tokens, pauses of half a minute."""
    weights = mandelbrot(NUM_ADAPTERS, 1.14, 3.6)
    ids = rng.sample(range(NUM_ADAPTERS), NUM_ADAPTERS)
    requests: list[tuple[float, Request]] = []
    begin = 0.0
    for conversation in range(num):
        begin += rng.expovariate(CONVERSATION_RATE)
        adapter = ids[bisect_left(weights, rng.random() * weights[-1])]
        at, length = begin, 0
        for turn in range(max(1, math.ceil(rng.lognormvariate(0.97, 0.94)))):
            length += max(16, round(rng.gammavariate(1.3, 120)))
            answer = max(8, round(rng.gammavariate(1.65, 60)))
            if length + answer > BASE.max_model_len:
                break
            request = Request(
                request_id=f"{conversation}.{turn}",
                prompt=tuple(token(conversation, position) for position in range(length)),
                sampling=SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True),
                model=f"a{adapter}",
            )
            requests.append((at, request))
            length += answer
            at += 0.03 * answer + rng.lognormvariate(3.0, 1.0)
    return sorted(requests, key=lambda arrival: arrival[0])


def run(arrivals: list[tuple[float, Request]], policy: str, token_s: float) -> Outcome:
    """Simulate the engine under one policy."""
    events: list[RequestFinished] = []
    copied: list[int] = []

    def sink(event: Event) -> None:
        if isinstance(event, RequestFinished):
            events.append(event)
        elif isinstance(event, AdapterLoadStarted) and event.tier is Tier.DEVICE:
            copied.append(event.num_bytes)

    cost = FixedCost(token_s=token_s)
    core = EngineCore(
        base=BASE,
        num_pages=NUM_PAGES,
        executor=SimulatedExecutor(cost, vocab_size=BASE.vocab_size, choose=next_token),
        scheduler=SchedulerConfig(max_waiting=100_000),
        memory=MemoryConfig(),
        adapters=AdapterConfig(eviction=policy, host_bytes=2**60),
        served_name="base",
        sinks=[sink],
    )
    kinds = versions()
    for adapter in range(NUM_ADAPTERS):
        core.adapters.register(f"a{adapter}", version_of(adapter, kinds), 0.0)
    loop = EngineLoop(core, VirtualClock(), on_outputs=lambda outputs, now: None, arrivals=iter(arrivals))
    loop.run()
    core.check_integrity()
    assert len(events) == len(arrivals)
    stats = core.stats()
    ttfts = sorted(event.first_token_at - event.arrived_at for event in events if event.first_token_at is not None)
    return Outcome(
        adapter_hit_rate=stats.num_adapter_hits / stats.num_adapter_requests,
        cached_share=stats.num_cached_tokens / stats.num_prompt_tokens,
        link_s=sum(copied) / cost.copy_bytes_per_s,
        prefill_s=(stats.num_prompt_tokens - stats.num_cached_tokens) * token_s,
        mean_ttft_s=sum(ttfts) / len(ttfts),
        p99_ttft_s=ttfts[int(0.99 * len(ttfts))],
    )


def report(results: dict[str, dict[str, Outcome]], num_requests: int) -> str:
    """Write one table per cost of a token."""
    lines = [
        "# One price for adapters and prefix blocks",
        "",
        f"`python bench/one_price.py`: {num_requests:,} turns of {NUM_CONVERSATIONS} conversations over {NUM_ADAPTERS} "
        f"adapters on a {BASE.name} shape, a pool of {NUM_PAGES} pages ({NUM_PAGES * BASE.page.num_bytes >> 30} GiB), "
        "the whole engine on the virtual clock: 20 ms a step and so much per token, 16 GB/s for adapters. *Copies* and "
        "*prefill* are the seconds spent on adapters that were not there and on prompt tokens that no page held. Every "
        "figure follows from the seed.",
        "",
    ]
    for name, outcomes in results.items():
        lines += [
            f"## {name} ({TOKEN_COSTS_S[name] * 1e6:g} us a token)",
            "",
            "| policy | adapter hits | prompt tokens cached | copies | prefill | both | mean TTFT | P99 TTFT |",
            "|---|---:|---:|---:|---:|---:|---:|---:|",
        ]
        least = min(one.link_s + one.prefill_s for one in outcomes.values())
        for policy, one in outcomes.items():
            both = one.link_s + one.prefill_s
            lines.append(
                f"| `{policy}` | {one.adapter_hit_rate:.1%} | {one.cached_share:.1%} | {one.link_s:.1f} s "
                f"| {one.prefill_s:.1f} s | {f'**{both:.1f} s**' if both == least else f'{both:.1f} s'} "
                f"| {one.mean_ttft_s * 1e3:.1f} ms | {one.p99_ttft_s * 1e3:.0f} ms |"
            )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the conversations; writes nothing")
    args = parser.parse_args()
    arrivals = conversations(NUM_CONVERSATIONS // 10 if args.quick else NUM_CONVERSATIONS, random.Random(1))
    results: dict[str, dict[str, Outcome]] = {}
    for name, token_s in TOKEN_COSTS_S.items():
        results[name] = {}
        for policy in POLICIES:
            results[name][policy] = run(arrivals, policy, token_s)
            print(f"{name}, {policy}: {results[name][policy]}", file=sys.stderr)
    text = report(results, len(arrivals))
    print(text)
    if not args.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "one_price.md").write_text(text)
        figures = {name: {policy: asdict(one) for policy, one in by.items()} for name, by in results.items()}
        (RESULTS / "one_price.json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
