"""Two tenants of a server over HTTP, one at many times its share: how late are the other's first tokens?

    python bench/tenants_live.py [--quick] [--rounds 5]

A server of its own process with `--policy fair` and a simulated engine in real time (an 8B model on an H100, 32
sequences at a time), as the first case of `tenants.py`. `light` asks for half of its share, at random times, and
streams; `flood` keeps three times as many requests under way as can run, or asks for its share at random times. In each
round every case has a turn. The ratio is taken within a round; it is of the P99 of the time to first token, seen by the
client, to the P99 of `light` alone. In the last case two tenants flood, with weights 1 and 3: how are tokens split?

Writes `results/tenants_live.json` and `.md`. On a quiet machine, seven and a half minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from live import VOCABULARY
from publishing import Others, arguments, publish, reason_to_refuse, table
from ratios import Ratio, ratio_by_round
from route import started

from manylora.demo import demo_model_path
from manylora.lab.bench.rounds import in_turns, machine

SEATS, CAPACITY = 32, 36.0
"""Sequences at a time, and requests a second of a queue that never empties, as `tenants.py` finds it."""

PROMPT, ANSWER = (100, 400), (50, 150)
NUM_FLOOD = 96  # requests of a flood under way: three times as many as can run
WEIGHTS = {"light": 1.0, "flood": 1.0, "three": 3.0}
WARM_UP_S, SETTLE_S = 3.0, 1.5
NO_CLAIM_S = 5.5  # silence after which no tenant has a claim from before; `--fair-burst` is 5 s
POLICIES = ("fair", "fifo")
ALONE, POLITE, FLOOD, FLOOD_FIFO = "`light` alone", "the other keeps to its share", "flood", "flood, `fifo`"
SPLIT = "two floods, weights 1 and 3"
CASES = {ALONE: "fair", POLITE: "fair", FLOOD: "fair", FLOOD_FIFO: "fifo", SPLIT: "fair"}
PART = {FLOOD_FIFO: 0.25, SPLIT: 0.5}  # of the seconds of the other cases


@dataclass(slots=True)
class Seen:
    """What a tenant saw of its answers."""

    ttft_ms: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_refused: int = 0


@contextlib.asynccontextmanager
async def serving(folder: Path, policy: str) -> AsyncIterator[httpx.AsyncClient]:
    """Run a server."""
    lines = [
        f'[tenants.{name}]\nweight = {weight}\nkeys = [{{ sha256 = "{hashlib.sha256(name.encode()).hexdigest()}" }}]\n'
        for name, weight in WEIGHTS.items()
    ]
    (folder / "tenants.toml").write_text("".join(lines))
    for name in WEIGHTS:
        (folder / "adapters" / name).mkdir(parents=True, exist_ok=True)
        settings = {"peft_type": "LORA", "r": 16, "target_modules": ["q_proj", "v_proj"], "note": name}
        (folder / "adapters" / name / "adapter_config.json").write_text(json.dumps(settings))
    command = ["serve", str(demo_model_path()), "--served-model-name", "demo"]
    command += ["--simulate", "h100:llama-3-8b", "--policy", policy, "--no-prefix-caching"]
    command += ["--tenants", str(folder / "tenants.toml"), "--lora-dir", str(folder / "adapters")]
    command += ["--max-num-seqs", str(SEATS), "--max-num-batched-tokens", "2048"]
    limits = httpx.Limits(max_connections=1000, max_keepalive_connections=1000)
    with started(command) as (url,):
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
            yield client


async def ask(client: httpx.AsyncClient, tenant: str, rng: random.Random, seen: Seen, *, counts: bool) -> None:
    """Ask once; streamed by `light` alone, whose first tokens are timed."""
    num_tokens = rng.randrange(*ANSWER)
    body = {
        "model": tenant,
        "prompt": [rng.randrange(10, VOCABULARY) for _ in range(rng.randrange(*PROMPT))],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": tenant == "light",
    }
    headers = {"Authorization": f"Bearer {tenant}"}
    began = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        if answer.status_code != 200:
            seen.num_refused += 1
            await answer.aread()
            await asyncio.sleep(0.05)
            return
        async for _ in answer.aiter_raw():
            if tenant == "light" and counts:
                seen.ttft_ms.append(1e3 * (time.perf_counter() - began))
                counts = False
    seen.num_tokens += num_tokens


async def at_random_times(
    client: httpx.AsyncClient, tenant: str, rate: float, seconds: float, rng: random.Random, seen: Seen
) -> None:
    """Ask at random times; those of the warm-up do not count."""
    began = time.perf_counter()
    at = 0.0
    async with asyncio.TaskGroup() as group:
        while (at := at + rng.expovariate(rate)) < WARM_UP_S + seconds:
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            group.create_task(ask(client, tenant, rng, seen, counts=at >= WARM_UP_S))


async def flooding(client: httpx.AsyncClient, tenant: str, rng: random.Random, seen: Seen) -> None:
    """Keep many requests under way until cancelled."""

    async def one() -> None:
        while True:
            await ask(client, tenant, rng, seen, counts=True)

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_FLOOD):
            group.create_task(one())


async def turn(client: httpx.AsyncClient, case: str, seconds: float, seed: int) -> dict[str, Any]:
    """Run one case; return the times of `light` and both tenants' tokens a second."""
    rng, light, other = random.Random(seed), Seen(), Seen()
    beside: asyncio.Task[None] | None = None
    if case == POLITE:
        beside = asyncio.create_task(
            at_random_times(client, "flood", CAPACITY / 2, seconds, random.Random(seed + 1), other)
        )
    elif case != ALONE:
        beside = asyncio.create_task(flooding(client, "flood", random.Random(seed + 1), other))
    began = time.perf_counter()
    await at_random_times(client, "light", CAPACITY / 4, seconds, rng, light)
    took_s = time.perf_counter() - began
    if beside is not None:
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)
    await asyncio.sleep(SETTLE_S)
    return {
        "ttft_ms": light.ttft_ms,
        "light_tokens_per_s": light.num_tokens / took_s,
        "flood_tokens_per_s": other.num_tokens / took_s,
        "num_refused": light.num_refused,
    }


async def split(client: httpx.AsyncClient, seconds: float, seed: int) -> dict[str, Any]:
    """Let two tenants flood that owe each other nothing; return their tokens a second, of answers after the warm-up."""
    await asyncio.sleep(NO_CLAIM_S)
    rng, seen = random.Random(seed), {name: Seen() for name in ("flood", "three")}
    floods = [asyncio.create_task(flooding(client, name, rng, one)) for name, one in seen.items()]
    await asyncio.sleep(WARM_UP_S)
    began, before = time.perf_counter(), {name: one.num_tokens for name, one in seen.items()}
    await asyncio.sleep(seconds)
    took_s = time.perf_counter() - began
    rates = {f"{name}_tokens_per_s": (one.num_tokens - before[name]) / took_s for name, one in seen.items()}
    for one in floods:
        one.cancel()
    await asyncio.gather(*floods, return_exceptions=True)
    await asyncio.sleep(SETTLE_S)
    return rates


async def measure(num_rounds: int, seconds: float) -> dict[str, list[dict[str, Any]]]:
    """Return the turns of every case."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as made:
        async with contextlib.AsyncExitStack() as stack:
            clients = {policy: await stack.enter_async_context(serving(Path(made), policy)) for policy in POLICIES}
            for number, name in in_turns(list(CASES), num_rounds, num_warm_up=0):
                client, length_s = clients[CASES[name]], seconds * PART.get(name, 1.0)
                if name == SPLIT:
                    found[name].append(await split(client, length_s, 100 * number))
                    print(number, name, found[name][-1], flush=True)
                    continue
                found[name].append(await turn(client, name, length_s, 100 * number))
                print(number, name, f"{np.percentile(found[name][-1]['ttft_ms'], 99):.0f} ms", flush=True)
    return found


def text_of(found: dict[str, list[dict[str, Any]]]) -> str:
    """Return the figures as Markdown."""

    def p99(name: str) -> list[float]:
        return [float(np.percentile(one["ttft_ms"], 99)) for one in found[name]]

    lines = [
        "# Two tenants over HTTP, one at many times its share",
        "",
        f"`python bench/tenants_live.py` on {machine()['cpu']}: a server with `--policy fair` and a simulated engine "
        f"in real time (llama-3-8b on an H100, {SEATS} sequences at a time). Times to first token of `light`, which "
        f"asks for half of its share, as the client sees them, {len(found[ALONE])} rounds; the ratio of a round's P99 "
        "to that of `light` alone, its median and 95 % interval.",
        "",
    ]
    rows = []
    for name, turns in found.items():
        if name == SPLIT:
            continue
        every = [one for each in turns for one in each["ttft_ms"]]
        ratio: Ratio = ratio_by_round(p99(name), p99(ALONE))
        tokens = [np.mean([each[f"{one}_tokens_per_s"] for each in turns]) for one in ("light", "flood")]
        rows.append(
            [
                name,
                len(every),
                *(f"{np.percentile(every, q):,.0f}" for q in (50, 99)),
                ratio,
                *(f"{one:,.0f}" for one in tokens),
            ]
        )
    lines += table(("case", "requests", "P50 ms", "P99 ms", "P99 to alone", "light tok/s", "flood tok/s"), rows)
    one, three = ([each[f"{name}_tokens_per_s"] for each in found[SPLIT]] for name in ("flood", "three"))
    lines += [
        "",
        f"Two tenants that flood after {NO_CLAIM_S:g} s of silence, with weights 1 and 3: "
        f"{np.mean(one):,.0f} and {np.mean(three):,.0f} tokens a second, "
        f"a ratio of {ratio_by_round(three, one)}.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and publish."""
    parser = arguments(__doc__, quick="short turns")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    num_rounds, seconds = (1, 4.0) if options.quick else (options.rounds, 17.0)
    others = Others()
    found = asyncio.run(measure(num_rounds, seconds))
    refused = None if options.quick else reason_to_refuse(num_rounds, others.share())
    publish("tenants_live", found, text_of(found), is_kept=not options.quick, refused=refused)


if __name__ == "__main__":
    main()
