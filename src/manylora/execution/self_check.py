"""Check before serving that sequences in one batch do not affect one another.

The probe checks how a model calls attention; this module checks its output. A recurrent layer, a convolution over
tokens, or positions that the model counts itself would carry tokens of one sequence into the next in a flat batch, and
every answer would be subtly wrong.
"""

from __future__ import annotations

import torch

from manylora.core.adapters.shape import BaseShape
from manylora.core.errors import ConfigError
from manylora.core.plan import PlannedSequence, StepPlan
from manylora.core.types import SamplingParams
from manylora.execution.kernels.linear import exact_products
from manylora.execution.runner import ModelRunner

__all__ = ["check_sequences_are_separate"]

NUM_TOKENS = 6

# Relative to the largest logit. Sums in another order differ by rounding (and rounding may send a token to another
# expert); tokens of another sequence change logits by their own size.
_TOLERANCE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.3, "int8": 0.3}


def check_sequences_are_separate(runner: ModelRunner, base: BaseShape, num_pages: int) -> None:
    """Compare two sequences alone, together, and in chunks, in empty pages; do nothing with too few pages for two.

    ``ConfigError`` if the logits depend on the other sequences of the batch.
    """
    num_tokens = min(NUM_TOKENS, base.max_model_len)
    pages_each = base.num_state_pages - (-num_tokens // base.page.block_size)
    if num_pages < 2 * pages_each or num_tokens < 3:
        return
    plans = _plans(base.vocab_size, num_tokens, pages_each)
    rows: list[torch.Tensor] = []
    runner.logits_hook = lambda plan, logits: rows.append(logits)
    try:
        with exact_products(runner.model):  # a rounded activation may round otherwise for a last bit of attention
            for plan in plans:
                runner.run(plan)
    finally:
        runner.logits_hook = None
    if not rows:
        return  # another of the workers that share the model has the logits
    alone = torch.cat(rows[:2])
    scale = alone.abs().max().clamp(min=1e-6)
    for name, found in (("in one batch", rows[2]), ("in chunks", rows[-1])):
        error = float((found - alone).abs().max() / scale)
        if not error <= _TOLERANCE[base.page.dtype]:
            raise ConfigError(
                f"Got a model of type {base.architecture!r}, which is not supported: two sequences {name} give other "
                f"logits than alone (relative difference {error:.2g}), so tokens reach one another outside attention"
            )


def _plans(vocab_size: int, num_tokens: int, pages_each: int) -> list[StepPlan]:
    tokens = [[(7 * i + 3 + 11 * s) % vocab_size for i in range(num_tokens)] for s in range(2)]

    def part(seq: int, start: int, stop: int) -> PlannedSequence:
        return PlannedSequence(
            seq_id=-1 - seq,
            tokens=tokens[seq],
            num_prompt_tokens=num_tokens,
            start=start,
            num_tokens=stop - start,
            pages=tuple(range(seq * pages_each, (seq + 1) * pages_each)),
            adapter=None,
            rank=0,
            sampling=SamplingParams(temperature=0.0),
            is_sampled=stop == num_tokens,
            seed=0,
        )

    steps = [
        [part(0, 0, num_tokens)],
        [part(1, 0, num_tokens)],
        [part(0, 0, num_tokens), part(1, 0, num_tokens)],
        [part(0, 0, 2), part(1, 0, num_tokens - 1)],
        [part(0, 2, num_tokens), part(1, num_tokens - 1, num_tokens)],
    ]
    return [StepPlan(step_id=-1 - i, sequences=tuple(step), released=()) for i, step in enumerate(steps)]
