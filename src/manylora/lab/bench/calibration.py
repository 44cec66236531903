"""Calibrate a live engine: build it, sweep over it with synthetic adapters, and write the log."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from manylora.core.clock import WallClock
from manylora.core.config import AdapterConfig, EngineConfig
from manylora.core.costs.step_log import LogHeader, LogLine
from manylora.lab.bench.sweep import run_sweep
from manylora.lab.bench.synthetic import write_synthetic_adapter

__all__ = ["RANKS", "sweep_live"]

RANKS = (8, 16, 32, 64)
"""Ranks of synthetic adapters, in turn."""


def sweep_live(
    config: EngineConfig,
    *,
    num_adapters: int,
    ranks: Sequence[int] = RANKS,
    targets: Sequence[str] | None = None,
    seconds: float,
    seed: int = 0,
    write: Callable[[LogLine], None],
    on_progress: Callable[[float], None] = lambda elapsed_s: None,
) -> int:
    """Run the calibration sweep on an engine that is built for it; return the number of steps that were logged.

    No adapter idles on the device and a fourth of them finds no place in host memory, so that loads of both kinds
    happen all the time; prompts are never remembered.

    Args:
        config: The engine; prefixes are off, and adapters have the settings of a sweep.
        num_adapters: Synthetic adapters to serve.
        ranks: Their ranks, in turn.
        targets: Last names of the modules they change; every linear when ``None``.
        seconds: Length of the sweep, without building and warming up.
        seed: Seed of the bursts and the weights.
        write: Receives the lines of the log, the header first.
        on_progress: Called with the seconds of the sweep that have passed.

    Raises:
        ConfigError: The model cannot be served.
    """
    from manylora.execution.build import build_parts  # imports torch

    config = replace(
        config,
        memory=replace(config.memory, prefix_caching=False),
        adapters=AdapterConfig(eviction="none", max_cpu_loras=max(1, num_adapters * 3 // 4)),
    )
    clock = WallClock()
    parts = build_parts(config, clock)
    try:
        write(
            LogHeader(
                base=parts.base,
                num_pages=parts.num_pages,
                machine=parts.machine,
                lora_kernel=config.model.lora_kernel,
                reads_host=parts.reads_host,
            )
        )
        with tempfile.TemporaryDirectory(prefix="manylora-") as folder:
            rng = np.random.default_rng(seed)
            versions = []
            for index in range(num_adapters):
                place = Path(folder) / f"adapter-{index}"
                write_synthetic_adapter(place, parts.base, ranks[index % len(ranks)], rng, targets=targets)
                versions.append(parts.reader.read(place.name, str(place)))
            return run_sweep(
                parts,
                config,
                versions,
                clock=clock,
                rng=random.Random(seed),
                seconds=seconds,
                write=write,
                on_progress=on_progress,
            )
    finally:
        parts.close()
