"""The calibration sweep: steps of every kind on a live engine with synthetic adapters, to which a cost model is fitted.

The requests of a burst have one size. Their number, lengths and adapters are drawn for each burst, and whether all
arrive at once or the second half while the first decodes, which gives steps with prompts and decoding rows. Sizes are
uniform over their logarithms. They are drawn and not enumerated, so that a sweep that ends at any time has steps of all
kinds.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from manylora.core.adapters.shape import BaseShape, TargetModule
from manylora.core.clock import Clock, WallClock
from manylora.core.config import AdapterConfig, EngineConfig
from manylora.core.costs.step_log import LoadRecord, LoggedExecutor, LogHeader, LogLine, StepRecord
from manylora.core.engine.core import EngineCore
from manylora.core.engine.loop import EngineLoop
from manylora.core.errors import ConfigError
from manylora.core.ports import EngineParts
from manylora.core.types import AdapterVersion, Request, SamplingParams

__all__ = ["Burst", "draw_burst", "run_sweep", "sweep_live", "write_synthetic_adapter"]

SCALE = 0.01  # size of synthetic weights: small, so that sums over many layers stay finite in every precision
WARM_UP = 2  # bursts that are not logged: kernels compile, memory is touched for the first time


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """Requests of one size."""

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int  # length of each answer
    adapters: tuple[int | None, ...]  # indices of the adapters that they name in turn; ``None`` among them is the base
    stagger_s: float  # delay of the second half, in seconds


def draw_burst(
    rng: random.Random, *, max_num_seqs: int, max_context: int, max_tokens: int, num_adapters: int, step_s: float
) -> Burst:
    """Draw a burst of at most ``max_num_seqs`` requests of ``max_context`` tokens, and of ``max_tokens`` of prompts.

    Delays are in units of ``step_s``, the typical duration of a step.
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
    """Run bursts for so many seconds; return the number of steps that were logged, by ``write``.

    Prefix caching must be off, because a cached prompt costs nothing. The adapters are in the host tier; loads happen
    when bursts ask for those that are not on the device. ``clock`` is the parts' own.
    """
    assert not config.memory.prefix_caching
    steps: list[float] = []
    is_warm = False

    def take(record: StepRecord | LoadRecord) -> None:
        if isinstance(record, StepRecord):
            steps.append(record.took_s)
        if is_warm:
            write(record)

    core = EngineCore(replace(parts, executor=LoggedExecutor(parts.executor, take)), config)
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


def sweep_live(
    build: Callable[[EngineConfig, Clock], EngineParts],
    config: EngineConfig,
    *,
    num_adapters: int,
    ranks: Sequence[int],
    targets: Sequence[str] | None = None,
    seconds: float,
    seed: int = 0,
    write: Callable[[LogLine], None],
    on_progress: Callable[[float], None] = lambda elapsed_s: None,
) -> int:
    """Run the calibration sweep on an engine that is built for it; return the number of steps that were logged.

    No adapter idles on the device and a fourth of them finds no place in host memory, so that loads of both kinds
    happen all the time; prompts are never remembered. Ranks take turns; ``targets`` are last names of modules, by
    default of every linear. The seconds are without building and warming up; ``write`` gets the log's header first.
    ``ConfigError`` if the model cannot be served, or the pool has no room for the largest rank.
    """
    config = replace(
        config,
        memory=replace(config.memory, prefix_caching=False),
        adapters=AdapterConfig(eviction="none", max_cpu_loras=max(1, num_adapters * 3 // 4)),
    )
    clock = WallClock()
    parts = build(config, clock)
    try:
        write(LogHeader.of(parts, config.model))
        page, max_pages = parts.base.page, config.adapters.most_pages(parts.num_pages)
        width = sum(one.in_features + one.out_features for one in _targets(parts.base, targets))
        most = max_pages * page.elements_of(page.adapter_dtype) // max(width, 1)
        if max(ranks) > most:
            raise ConfigError(f"Got a rank of {max(ranks)}, expected at most {most}, which the pool has room for")
        with tempfile.TemporaryDirectory(prefix="manylora-") as folder:
            draws, rng = np.random.default_rng(seed), random.Random(seed)
            places = [Path(folder) / f"adapter-{index}" for index in range(num_adapters)]
            for place, rank in zip(places, itertools.cycle(ranks), strict=False):
                write_synthetic_adapter(place, parts.base, rank, draws, targets=targets)
            versions = [parts.reader.read(place.name, str(place)) for place in places]
            return run_sweep(
                parts, config, versions, clock=clock, rng=rng, seconds=seconds, write=write, on_progress=on_progress
            )
    finally:
        parts.close()


def write_synthetic_adapter(
    folder: Path, base: BaseShape, rank: int, rng: np.random.Generator, *, targets: Sequence[str] | None = None
) -> Path:
    """Write an adapter with random weights as PEFT would, in float32: answers are noise, costs are real.

    ``targets`` are the last names of the modules to change; every linear but the head when ``None``. Return the folder.
    """
    modules = _targets(base, targets)
    tensors = {}
    for module in modules:
        path = f"base_model.model.{module.name}"
        for half, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
            weights = rng.standard_normal(shape, dtype=np.float32) * np.float32(SCALE)
            tensors[f"{path}.lora_{half}.weight"] = weights
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({module.name.rpartition(".")[2] for module in modules}),
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return folder


def _targets(base: BaseShape, targets: Sequence[str] | None) -> list[TargetModule]:
    names = set(base.all_linear)
    modules = [one for one in base.modules if one.name in names]
    return modules if targets is None else [one for one in modules if one.name.rpartition(".")[2] in targets]
