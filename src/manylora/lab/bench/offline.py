"""Tokens per second of the engine in this process, beside transformers and PEFT with the same requests.

The systems take turns, a round of each after the other, and the figure is the median of the rounds' ratios: what
disturbs the machine for longer than a round disturbs both. The first round is left out: it loads and compiles.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from manylora.core.errors import EngineDead
from manylora.core.types import SamplingParams
from manylora.lab.bench.peers import PeerRequest, Peft, Transformers
from manylora.lab.bench.rounds import Ratio, in_turns, ratio_by_round
from manylora.serving.offline import Engine

__all__ = ["OfflineResult", "draw_requests", "measure_offline"]

PEER, PEER_MIXED = "transformers", "PEFT"
OURS, OURS_MIXED = "manylora, base", "manylora, adapters"

LEAST_TOKEN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineResult:
    """What a run showed.

    Args:
        num_requests: Requests a round.
        num_tokens: Tokens they asked for together.
        tokens_per_s: Median over the rounds, by system.
        seconds: Of every round, by system.
        ratios: Ours over the peer's tokens per second; empty without peers.
    """

    num_requests: int
    num_tokens: int
    tokens_per_s: dict[str, float]
    seconds: dict[str, list[float]]
    ratios: dict[str, Ratio]


def draw_requests(num_requests: int, num_in: int, num_out: int, *, vocab_size: int, seed: int) -> list[PeerRequest]:
    """Return requests with random prompts."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(min(LEAST_TOKEN, vocab_size - 1), vocab_size, (num_requests, num_in))
    return [PeerRequest(prompt=tuple(prompt), num_out=num_out) for prompt in prompts.tolist()]


def measure_offline(
    engine: Engine,
    model: Path,
    asked: Sequence[PeerRequest],
    *,
    adapters: Mapping[str, Path],
    rounds: int,
    with_peers: bool,
    device: str = "cpu",
    on_round: Callable[[str, int, float], None] = lambda name, number, seconds: None,
) -> OfflineResult:
    """Let every system answer the same requests, in turns.

    Args:
        engine: Ours, with the adapters loaded and without a prefix cache: a second round would find its prompts.
        model: Folder of the base, for the others.
        asked: The requests.
        adapters: Folders by name; request *i* takes adapter *i*, modulo their number.
        rounds: Rounds that count.
        with_peers: Compare with transformers, and with PEFT where there are adapters.
        device: Device of the others.
        on_round: Called after each round with the system, its number (-1 does not count) and its seconds.

    Raises:
        EngineDead: The engine gave up a request.
        ConfigError: PEFT is wanted and not installed.
    """
    names = list(adapters)
    who = [names[index % len(names)] for index in range(len(asked))] if names else None
    systems: dict[str, Callable[[], None]] = {OURS: lambda: _run_ours(engine, asked, None)}
    if who is not None:
        systems[OURS_MIXED] = lambda: _run_ours(engine, asked, who)
    if with_peers:
        base = Transformers(model, device=device)
        systems[PEER] = lambda: base.run_all(asked)
        if names:
            mixed = Peft(model, [adapters[name] for name in names], device=device)
            systems[PEER_MIXED] = lambda: mixed.run_mixed(asked)
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for number, name in in_turns(list(systems), rounds):
        began = time.perf_counter()
        systems[name]()
        took = time.perf_counter() - began
        on_round(name, number, took)
        if number >= 0:
            seconds[name].append(took)
    num_tokens = sum(one.num_out for one in asked)
    pairs = [(ours, peer) for ours, peer in ((OURS, PEER), (OURS_MIXED, PEER_MIXED)) if peer in seconds]
    return OfflineResult(
        num_requests=len(asked),
        num_tokens=num_tokens,
        tokens_per_s={name: num_tokens / statistics.median(times) for name, times in seconds.items()},
        seconds=seconds,
        ratios={f"{ours} over {peer}": ratio_by_round(seconds[peer], seconds[ours]) for ours, peer in pairs},
    )


def _run_ours(engine: Engine, asked: Sequence[PeerRequest], who: Sequence[str] | None) -> None:
    sampling = [SamplingParams(temperature=0.0, max_tokens=one.num_out, ignore_eos=True) for one in asked]
    answers = engine.generate([one.prompt for one in asked], adapter=who, sampling=sampling)
    failed = next((answer.error for answer in answers if answer.error is not None), None)
    if failed is not None:
        raise EngineDead(f"The engine gave a request up: {failed}")
