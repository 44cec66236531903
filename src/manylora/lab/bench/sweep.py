"""The calibration sweep: steps of every kind on a live engine, to which a cost model is fitted.

The requests of a burst have one size. Their number, lengths and adapters are drawn for each burst, and whether all
arrive at once or the second half while the first decodes, which gives steps with prompts and decoding rows. Sizes are
uniform over their logarithms. They are drawn and not enumerated, so that a sweep that ends at any time has steps of all
kinds.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from manylora.core.clock import Clock
from manylora.core.config import EngineConfig
from manylora.core.costs.step_log import LoadRecord, LoggedExecutor, StepRecord
from manylora.core.engine.build import build_core
from manylora.core.engine.loop import EngineLoop
from manylora.core.ports import EngineParts
from manylora.core.types import AdapterVersion, Request, SamplingParams

__all__ = ["Burst", "draw_burst", "run_sweep"]

WARM_UP = 2
"""Bursts that are not logged: kernels compile, memory is touched for the first time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """Requests of one size.

    Args:
        num_requests: Number of requests.
        num_prompt_tokens: Length of each prompt.
        num_output_tokens: Length of each answer.
        adapters: Indices of the adapters that they name in turn; ``None`` among them is the base.
        stagger_s: Delay of the second half, in seconds.
    """

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    adapters: tuple[int | None, ...]
    stagger_s: float


def draw_burst(
    rng: random.Random, *, max_num_seqs: int, max_context: int, max_tokens: int, num_adapters: int, step_s: float
) -> Burst:
    """Draw a burst.

    Args:
        rng: Random numbers.
        max_num_seqs: Most requests in it.
        max_context: Longest prompt and answer together.
        max_tokens: Most prompt tokens in it, which keeps a burst short.
        num_adapters: Number of adapters.
        step_s: Typical duration of a step in seconds, the unit of the delay.
    """

    def spread(low: int, high: int) -> int:
        return round(low * math.exp(rng.random() * math.log(max(low, high) / low)))

    num_requests = spread(1, max_num_seqs)
    num_output_tokens = rng.randint(2, 12)
    longest = min(max_context - num_output_tokens, max_tokens // num_requests)
    num_distinct = min(spread(1, num_requests), num_adapters)
    adapters: tuple[int | None, ...] = (None,)
    if num_adapters and rng.random() < 0.8:
        adapters = tuple(rng.sample(range(num_adapters), num_distinct))
    return Burst(
        num_requests=num_requests,
        num_prompt_tokens=spread(2, longest),
        num_output_tokens=num_output_tokens,
        adapters=adapters,
        stagger_s=step_s * rng.uniform(2, 6) if rng.random() < 0.5 else 0.0,
    )


def run_sweep(
    parts: EngineParts,
    config: EngineConfig,
    adapters: Sequence[AdapterVersion],
    *,
    clock: Clock,
    rng: random.Random,
    seconds: float,
    write: Callable[[StepRecord | LoadRecord], None],
    on_progress: Callable[[float], None] = lambda elapsed_s: None,
) -> int:
    """Run bursts for so many seconds; return the number of steps that were logged.

    Args:
        parts: The live engine's parts.
        config: Its configuration; prefix caching must be off, because a cached prompt costs nothing.
        adapters: In the host tier; loads happen when bursts ask for those that are not on the device.
        clock: The parts' own.
        rng: Draws the bursts.
        seconds: Length of the sweep.
        write: Receives the records.
        on_progress: Called with the seconds that have passed.
    """
    assert not config.memory.prefix_caching
    steps: list[float] = []
    is_warm = False

    def take(record: StepRecord | LoadRecord) -> None:
        if isinstance(record, StepRecord):
            steps.append(record.took_s)
        if is_warm:
            write(record)

    core = build_core(parts, config, executor=LoggedExecutor(parts.executor, take))
    names = [f"adapter-{index}" for index in range(len(adapters))]
    for name, version in zip(names, adapters, strict=True):
        core.adapters.register(name, version, clock.now())
    block = parts.base.page.block_size
    # Room for KV beside the largest adapter: no burst may need to be pre-empted for want of pages.
    room = (parts.num_pages - max((one.num_pages for one in adapters), default=0)) * block
    began_at = clock.now()
    num_warm = 0
    for number in itertools.count():
        if number == WARM_UP:
            is_warm, began_at, num_warm = True, clock.now(), len(steps)
        elapsed_s = clock.now() - began_at
        on_progress(elapsed_s if is_warm else 0.0)
        if is_warm and elapsed_s >= seconds:
            return len(steps) - num_warm
        burst = draw_burst(
            rng,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_context=min(parts.base.max_model_len, room // 2),
            max_tokens=max(2 * config.scheduler.max_num_batched_tokens, 64),
            num_adapters=len(adapters),
            step_s=sorted(steps)[len(steps) // 2] if steps else 0.0,
        )
        arrivals = _requests(burst, number, names, parts.base.vocab_size, rng, clock.now())
        EngineLoop(core, clock, on_outputs=lambda outputs, now: None, arrivals=arrivals).run()
    raise AssertionError("unreachable")


def _requests(
    burst: Burst, number: int, names: Sequence[str], vocab_size: int, rng: random.Random, now: float
) -> Iterator[tuple[float, Request]]:
    for index in range(burst.num_requests):
        adapter = burst.adapters[index % len(burst.adapters)]
        request = Request(
            request_id=f"{number}-{index}",
            prompt=tuple(rng.choices(range(vocab_size), k=burst.num_prompt_tokens)),
            sampling=SamplingParams(temperature=0.0, max_tokens=burst.num_output_tokens, ignore_eos=True),
            model="" if adapter is None else names[adapter],
        )
        yield now + (burst.stagger_s if index >= burst.num_requests / 2 else 0.0), request
