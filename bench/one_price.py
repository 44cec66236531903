"""Adapters and prefix blocks in one pool: does one price over both beat a rule for adapters beside LRU for blocks?

Conversations over many adapters, so that both kinds of idle memory are worth keeping: each turn's prompt is the
conversation so far and a new question, after a pause. The whole engine runs on the virtual clock and a fixed cost
model, with a pool that holds neither all adapters nor all conversations. The cost of a prompt token against that of a
byte of weights decides which kind should yield; so three costs of a token are run, from a fast accelerator to a slow
one. Only ``price`` can know the difference.

Run it: ``python bench/one_price.py`` writes ``results/one_price.json`` and ``.md``; ``--quick`` is a tenth. Turns of a
conversation depend on each other, which workloads of experiments do not describe; hence a script.
"""

from __future__ import annotations

import math

import numpy as np
from publishing import arguments, publish, table

from manylora.core.clock import VirtualClock
from manylora.core.config import AdapterConfig, MemoryConfig, SchedulerConfig
from manylora.core.engine.core import EngineCore
from manylora.core.engine.loop import EngineLoop
from manylora.core.memory import EVICTION_POLICIES
from manylora.core.plan import PlannedSequence
from manylora.core.types import Request, SampledToken, SamplingParams, Tier
from manylora.lab.catalog.models import base_shape
from manylora.lab.costs.model import FixedCost
from manylora.lab.measure import Recorder, summarise
from manylora.lab.sim.run.contents import adapter_versions
from manylora.lab.sim.run.executor import SimulatedExecutor
from manylora.lab.workloads import AdapterSet
from manylora.lab.workloads.popularity import ZipfShares

BASE = base_shape("llama-2-7b")
ADAPTERS = AdapterSet(count=200).specs()
NUM_CONVERSATIONS, NUM_PAGES = 500, 2000
Outcome = dict[str, float]
TOKEN_COSTS_S = {"fast prefill": 0.00002, "medium": 0.0001, "slow prefill": 0.0002}


def token(conversation: int, position: int) -> int:
    """Return the token at a position of a conversation, of question or answer; position 0 names the conversation."""
    return conversation if position == 0 else (conversation * 7919 + position * 104_729) % BASE.vocab_size


def conversations(num: int, rng: np.random.Generator) -> list[tuple[float, Request]]:
    """Return turns by time: questions and answers of some hundred tokens, pauses of half a minute."""
    times = np.cumsum(rng.exponential(2.0, num))
    adapters = ZipfShares().assign(times, [one.rank for one in ADAPTERS], rng)
    requests: list[tuple[float, Request]] = []
    for conversation, (at, adapter) in enumerate(zip(times.tolist(), adapters.tolist(), strict=True)):
        length = 0
        for turn in range(math.ceil(rng.lognormal(0.97, 0.94))):
            length += max(16, round(rng.gamma(1.3, 120)))
            answer = max(8, round(rng.gamma(1.65, 60)))
            if length + answer > BASE.max_model_len:
                break
            prompt = tuple(token(conversation, position) for position in range(length))
            sampling = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
            name = ADAPTERS[adapter].name
            request = Request(request_id=f"{conversation}.{turn}", prompt=prompt, sampling=sampling, model=name)
            requests.append((at, request))
            length += answer
            at += 0.03 * answer + rng.lognormal(3.0, 1.0)
    return sorted(requests, key=lambda arrival: arrival[0])


def run(arrivals: list[tuple[float, Request]], policy: str, token_s: float) -> Outcome:
    """Simulate the engine under one policy, which answers as the conversation goes on.

    ``link_s`` and ``prefill_s`` are the seconds spent on copies of adapters and on prompt tokens.
    """

    def choose(part: PlannedSequence) -> SampledToken:
        return SampledToken(token_id=token(part.tokens[0], part.start + part.num_tokens))

    recorder = Recorder()
    core = EngineCore(
        base=BASE,
        num_pages=NUM_PAGES,
        executor=SimulatedExecutor(FixedCost(token_s=token_s), vocab_size=BASE.vocab_size, choose=choose),
        scheduler=SchedulerConfig(max_waiting=100_000),
        memory=MemoryConfig(),
        adapters=AdapterConfig(eviction=policy, host_bytes=2**60),
        served_name="base",
        sinks=[recorder],
    )
    for name, version in adapter_versions(ADAPTERS, BASE).items():
        core.adapters.register(name, version, 0.0)
    EngineLoop(core, VirtualClock(), on_outputs=lambda outputs, now: None, arrivals=iter(arrivals)).run()
    core.check_integrity()
    stats, summary = core.stats(), summarise(recorder.records)
    assert summary.num_requests == len(arrivals)
    assert summary.ttft is not None
    return {
        "adapter_hit_rate": stats.num_adapter_hits / stats.num_adapter_requests,
        "cached_share": stats.num_cached_tokens / stats.num_prompt_tokens,
        "link_s": sum(recorder.timeline.loads[Tier.DEVICE].busy_s),
        "prefill_s": (stats.num_prompt_tokens - stats.num_cached_tokens) * token_s,
        "mean_ttft_s": summary.ttft.mean,
        "p99_ttft_s": summary.ttft.p99,
    }


def report(results: dict[str, dict[str, Outcome]], num_requests: int) -> str:
    """Return one table per cost of a token."""
    lines = [
        "# One price for adapters and prefix blocks",
        "",
        f"`python bench/one_price.py`: {num_requests:,} turns of {NUM_CONVERSATIONS} conversations over "
        f"{len(ADAPTERS)} adapters on a {BASE.name} shape, a pool of {NUM_PAGES} pages "
        f"({NUM_PAGES * BASE.page.num_bytes >> 30} GiB), the whole engine on the virtual clock: 20 ms a step and a "
        "time per token, 16 GB/s for adapters. *Copies* and *prefill* are the seconds spent on missing adapters "
        "and on prompt tokens that no page held. Every figure follows from the seed.",
    ]
    heads = ("policy", "adapter hits", "prompt tokens cached", "copies", "prefill", "both", "mean TTFT", "P99 TTFT")
    for name, outcomes in results.items():
        rows = []
        for policy, one in outcomes.items():
            seconds = [
                f"{value:.1f} s" for value in (one["link_s"], one["prefill_s"], one["link_s"] + one["prefill_s"])
            ]
            ttft = f"{one['mean_ttft_s'] * 1e3:.1f} ms", f"{one['p99_ttft_s'] * 1e3:.0f} ms"
            rows.append(
                (f"`{policy}`", f"{one['adapter_hit_rate']:.1%}", f"{one['cached_share']:.1%}", *seconds, *ttft)
            )
        lines += ["", f"## {name} ({TOKEN_COSTS_S[name] * 1e6:g} us a token)", "", *table(heads, rows)]
    return "\n".join(lines)


def main() -> None:
    options = arguments(__doc__, quick="a tenth of the conversations").parse_args()
    arrivals = conversations(NUM_CONVERSATIONS // 10 if options.quick else NUM_CONVERSATIONS, np.random.default_rng(1))
    results = {
        name: {policy: run(arrivals, policy, token_s) for policy in EVICTION_POLICIES}
        for name, token_s in TOKEN_COSTS_S.items()
    }
    publish("one_price", results, report(results, len(arrivals)), is_kept=not options.quick)


if __name__ == "__main__":
    main()
