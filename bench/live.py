"""A live engine without a server, and workloads for it or over HTTP: greedy, each answer of its length."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from manylora.core.clock import WallClock
from manylora.core.config import EngineConfig
from manylora.core.engine.core import EngineCore
from manylora.core.engine.loop import EngineLoop
from manylora.core.types import AdapterVersion, Request, SamplingParams
from manylora.execution.build import build_parts
from manylora.lab.bench.ask import LoadRequest
from manylora.lab.bench.target import Target, TokenPrompts
from manylora.lab.measure import Recorder
from manylora.lab.sim.run.contents import PromptMaker
from manylora.lab.workloads import Workload

VOCABULARY = 100
"""Tokens that prompts are drawn from: the demo's tokenizer has a few more."""


def live_arrivals(workload: Workload, vocab_size: int, began_at: float) -> Iterator[tuple[float, Request]]:
    """Yield the requests of a workload by their time on the engine's clock, which reads ``began_at`` at its start."""
    prompts = PromptMaker(vocab_size, max(one.num_prompt_tokens for one in workload.requests))
    for index, spec in enumerate(workload.requests):
        request = Request(
            request_id=str(index),
            prompt=prompts.prompt(index, spec),
            sampling=SamplingParams(temperature=0.0, max_tokens=spec.num_output_tokens, ignore_eos=True),
            model=spec.adapter or "base",
        )
        yield began_at + spec.arrival_s, request


def http_arrivals(workload: Workload, target: Target, vocab_size: int) -> list[LoadRequest]:
    """Return the requests of a workload for a server of the demo model, under the names of the workload's adapters."""
    prompts = TokenPrompts(vocab_size=vocab_size, seed=0)
    return [
        LoadRequest(
            request_id=str(index),
            at_s=one.arrival_s,
            adapter=one.adapter or "",
            num_prompt_tokens=one.num_prompt_tokens,
            body=target.body(one.adapter or "demo", one, prompts.make(index, one)),
        )
        for index, one in enumerate(workload.requests)
    ]


def write_adapters(folder: Path, workload: Workload) -> None:
    """Write the settings of every adapter: a simulated engine reads no weights."""
    for spec in workload.adapters:
        place = folder / spec.name
        place.mkdir()
        settings = {"peft_type": "LORA", "r": spec.rank, "lora_alpha": spec.rank, "target_modules": list(spec.targets)}
        (place / "adapter_config.json").write_text(json.dumps({**settings, "bias": "none", "name": spec.name}))


class LiveEngine:
    """The engine of a configuration, with the adapters of some folders registered under their names."""

    def __init__(self, config: EngineConfig, folders: Sequence[Path]) -> None:
        self.clock = WallClock()
        self.parts = build_parts(config, self.clock)
        self._recorder = Recorder()
        self.core = EngineCore(self.parts, config, sinks=[lambda event: self._recorder(event)])
        self.versions: list[AdapterVersion] = []
        for folder in folders:
            version = self.parts.reader.read(folder.name, str(folder))
            self.core.adapters.register(folder.name, version, self.clock.now())
            self.versions.append(version)

    def serve(self, requests: Sequence[tuple[float, Request]]) -> Recorder:
        """Serve requests that arrive at their times, in seconds from now; return what was recorded when all ended."""
        recorder = self._recorder = Recorder()
        start = self.clock.now()
        arrivals = [(start + after_s, request) for after_s, request in requests]
        EngineLoop(self.core, self.clock, on_outputs=lambda outputs, now: None, arrivals=arrivals).run()
        self.settle()
        return recorder

    def settle(self) -> None:
        """Wait until no load or step is under way."""
        while self.core.has_pending_work:
            self.clock.wait_until(self.clock.now() + 0.01)
            self.core.collect(self.clock.now())
