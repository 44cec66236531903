"""The duration of a request on an idle engine, on which SLOs are based.

Chameleon and many others set the SLO to five times the mean duration of a request by itself. By itself a prompt is one
step, and every token after the first is another, with one more token of context each.
"""

from __future__ import annotations

from dataclasses import dataclass

from manylora.core.costs.features import StepFeatures, step_features
from manylora.core.types import AdapterKey
from manylora.lab.costs.roofline import RooflineCost
from manylora.lab.costs.synthetic_plan import SyntheticSequence, synthetic_plan

__all__ = ["IdleEngineTime", "decode_step", "prompt_step", "time_on_idle_engine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleEngineTime:
    """The times from arrival to first and last token of a request by itself, its adapter's load included."""

    ttft_s: float
    e2e_s: float


def time_on_idle_engine(
    cost: RooflineCost, num_prompt_tokens: int, num_output_tokens: int, *, rank: int = 0, load_s: float = 0.0
) -> IdleEngineTime:
    """Return the times of a request on an idle replica, with its prompt in one step and at least one output token.

    ``rank`` is 0 for the base; ``load_s`` is the time to load its adapter before the prompt runs.
    """
    ttft_s = load_s + sum(cost.price(prompt_step(num_prompt_tokens, rank)))
    num_steps = num_output_tokens - 1
    # A decode step's time is linear in its context, so the mean of the first and the last is the mean of all.
    first, last = (sum(cost.price(decode_step(num_prompt_tokens + done, rank))) for done in (1, max(1, num_steps)))
    return IdleEngineTime(ttft_s=ttft_s, e2e_s=ttft_s + num_steps * (first + last) / 2)


def prompt_step(num_tokens: int, rank: int = 0) -> StepFeatures:
    """Return a step of one whole prompt of more than one token; rank 0 is the base."""
    return step_features(synthetic_plan([SyntheticSequence(0, num_tokens, _adapter(0, rank), rank)]))


def decode_step(context_tokens: int, rank: int = 0, *, num_sequences: int = 1, num_adapters: int = 1) -> StepFeatures:
    """Return a step of sequences that decode with adapters of one rank.

    Args:
        context_tokens: Tokens of KV that each sequence reads, its new one included.
        rank: Rank of the adapters; 0 for the base.
        num_sequences: Number of sequences.
        num_adapters: Number of adapters that they share, if they have any.
    """
    return step_features(
        synthetic_plan(
            SyntheticSequence(context_tokens - 1, 1, _adapter(index % num_adapters, rank), rank)
            for index in range(num_sequences)
        )
    )


def _adapter(index: int, rank: int) -> AdapterKey | None:
    return AdapterKey(str(index)) if rank else None
