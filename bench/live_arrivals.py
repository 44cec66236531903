"""A workload as requests for a live engine: greedy, each to the length of its answer."""

from __future__ import annotations

from collections.abc import Iterator

from manylora.sim.run.prompts import PromptMaker
from manylora.types import Request, SamplingParams
from manylora.workloads import Workload


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
