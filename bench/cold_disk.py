"""Time to first token of an adapter that is on disk alone: whole, or layer by layer?

    python bench/cold_disk.py [--quick] [--link-bandwidth BYTES]

A model of random weights and an adapter of about 100 MB in float32, on the torch executor of this machine's CPU and
without an engine: a round asks the executor for the loads and the step as the engine would. Three ways take turns:

* *whole*: the file is read, then copied to the pages, then the prompt runs;
* *layers*: all three begin at once; pages are copied as layers have been read, and the step waits at each layer;
* *on the device*: the prompt alone.

Before every turn the adapter's file is dropped from the page cache (`posix_fadvise`). Without a stated bandwidth the
link is as fast as the machine. Both reads have the priority that a read by layers has. The ratios are those of
`bench/ratios.py`. Writes `results/cold_disk.json` and `.md`.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from publishing import Others, arguments, publish, reason_to_refuse, table
from ratios import Ratio, ratio_by_round
from transformers import LlamaConfig, LlamaForCausalLM

from manylora.core.clock import WallClock
from manylora.core.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig
from manylora.core.plan import ARRIVING, ON_DEVICE, AdapterLoad, Placement, PlannedSequence, StepPlan
from manylora.core.ports import EngineParts, Work
from manylora.core.types import AdapterVersion, SamplingParams, Tier
from manylora.execution.build import build_parts
from manylora.execution.device import describe_machine
from manylora.lab.bench.rounds import in_turns
from manylora.lab.bench.sweep import write_synthetic_adapter

NUM_LAYERS, HIDDEN, INTERMEDIATE, RANK = 12, 512, 1376, 224
NUM_PROMPT = 128
WHOLE, LAYERS, RESIDENT = "whole", "layers", "on the device"


def make_model(path: Path, *, is_quick: bool) -> Path:
    """Save a random model; return its folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=128 if is_quick else HIDDEN,
        intermediate_size=256 if is_quick else INTERMEDIATE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=512,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        LlamaForCausalLM(config).save_pretrained(path)
    return path


class Rig:
    """An executor, one adapter, and the pages of both."""

    def __init__(self, parts: EngineParts, version: AdapterVersion, clock: WallClock) -> None:
        self._parts = parts
        self._version = version
        self._clock = clock
        self._pages = tuple(range(version.num_pages))
        self._num_steps = 0
        self._file = Path(version.source) / "adapter_model.safetensors"

    def forget(self) -> None:
        """Leave the adapter on disk alone, and not in the page cache."""
        for tier in (Tier.DEVICE, Tier.HOST):
            self._parts.executor.drop_adapter(self._version.key, tier)
        fd = os.open(self._file, os.O_RDONLY)
        os.fsync(fd)  # a page that is not on disk yet cannot be dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)

    def whole(self) -> None:
        for tier in (Tier.HOST, Tier.DEVICE):
            self._finish(self._load(tier))
        self._finish(self._step(ON_DEVICE))

    def layers(self) -> None:
        loads = [self._load(tier) for tier in (Tier.HOST, Tier.DEVICE)]
        self._finish(self._step(ARRIVING))
        for load in loads:
            self._finish(load)

    def resident(self) -> None:
        self._finish(self._step(ON_DEVICE))

    def _load(self, tier: Tier) -> Work:
        pages = self._pages if tier is Tier.DEVICE else ()
        load = AdapterLoad(version=self._version, tier=tier, pages=pages, is_urgent=True)
        return self._parts.executor.load_adapter(load, 0.0)

    def _step(self, placement: Placement) -> Work:
        self._num_steps += 1
        first, size = self._version.num_pages, self._parts.base.page.block_size
        sequence = PlannedSequence(
            seq_id=self._num_steps,
            tokens=[4 + number % 900 for number in range(NUM_PROMPT)],
            num_prompt_tokens=NUM_PROMPT,
            start=0,
            num_tokens=NUM_PROMPT,
            pages=tuple(range(first, first + -(-NUM_PROMPT // size))),
            adapter=self._version.key,
            rank=self._version.rank,
            sampling=SamplingParams(temperature=0.0),
            is_sampled=True,
            seed=0,
            placement=placement,
        )
        released = (self._num_steps - 1,)
        plan = StepPlan(step_id=self._num_steps, sequences=(sequence,), released=released)
        return self._parts.executor.launch(plan, 0.0)

    def _finish(self, work: Work) -> None:
        while (result := work.poll(0.0)) is None:
            self._clock.wait_until(self._clock.now() + 1.0)  # woken when work completes
        error = getattr(result, "error", None) or getattr(result, "failed", None)
        assert not error, error


def measure(num_rounds: int, *, is_quick: bool, bytes_per_s: int | None) -> dict[str, Any]:
    """Run everything; return the figures."""
    clock = WallClock()
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as path:  # /tmp may be memory
        config = EngineConfig(
            model=ModelConfig(model=str(make_model(Path(path) / "base", is_quick=is_quick)), device="cpu"),
            memory=MemoryConfig(num_pages=700, prefix_caching=False),
            adapters=AdapterConfig(link_bytes_per_s=bytes_per_s),
        )
        parts = build_parts(config, clock)
        rank = 16 if is_quick else RANK
        folder = write_synthetic_adapter(Path(path) / "adapter", parts.base, rank, np.random.default_rng(0))
        version = parts.reader.read("adapter", str(folder))
        rig = Rig(parts, version, clock)
        ways: dict[str, Callable[[], None]] = {WHOLE: rig.whole, LAYERS: rig.layers, RESIDENT: rig.resident}
        rounds: dict[str, list[float]] = {name: [] for name in ways}
        others = Others()
        for number, name in in_turns(list(ways), num_rounds):
            rig.forget()
            if name == RESIDENT:
                rig.whole()
            began_at = time.perf_counter()
            ways[name]()
            if number >= 0:
                rounds[name].append(time.perf_counter() - began_at)
        busy_share = others.share()
        parts.close()
    return {
        "machine": describe_machine(torch.device("cpu")),
        "busy_share": busy_share,
        "command": "python bench/cold_disk.py",
        "disk_bytes": version.disk_bytes,
        "num_pages": version.num_pages,
        "link_bytes_per_s": bytes_per_s,
        "seconds": rounds,
        "over_whole": {name: asdict(ratio_by_round(seconds, rounds[WHOLE])) for name, seconds in rounds.items()},
    }


def page(figures: dict[str, Any]) -> str:
    """Return the figures as a page."""
    rows = [
        (
            name,
            *(f"{1e3 * pick(seconds):.0f}" for pick in (statistics.median, min, max)),
            Ratio(**figures["over_whole"][name]),
        )
        for name, seconds in figures["seconds"].items()
    ]
    link = figures["link_bytes_per_s"]
    lines = [
        "# First token of an adapter on disk: whole, or layer by layer",
        "",
        f"`{figures['command']}` on {figures['machine']}, other processes took {figures['busy_share']:.0%} of it. An "
        f"adapter of {figures['disk_bytes'] / 1e6:.0f} MB on {NUM_LAYERS} layers, a prompt of {NUM_PROMPT} tokens; the "
        f"file is not in the page cache; the link is {'the machine' if link is None else f'{link / 1e6:.0f} MB/s'}"
        f"{chr(39) + 's own' if link is None else ''}. {len(figures['seconds'][WHOLE])} rounds, in turns.",
        "",
        *table(("time to first token, ms", "median", "least", "most", "over whole (95 % interval)"), rows),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__, quick="a small model, one round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--link-bandwidth", type=int, help="bytes a second of the copies to the device")
    options = parser.parse_args()
    num_rounds = 1 if options.quick else options.rounds
    figures = measure(num_rounds, is_quick=options.quick, bytes_per_s=options.link_bandwidth)
    refused = reason_to_refuse(num_rounds, figures["busy_share"])
    publish("cold_disk", figures, page(figures), is_kept=not options.quick, refused=refused)


if __name__ == "__main__":
    main()
