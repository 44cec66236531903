"""An engine that writes the time into its tokens, so that a client can tell how long each was on its way.

The real core and loop, on an executor whose steps take exactly as long as the first token of a prompt says, in units
of 100 microseconds: one server can be measured at every speed. Every token of the vocabulary is a moment, ``~`` and
five digits, the tenths of milliseconds of the monotonic clock modulo ten seconds. A token is stamped when the loop
finds its step complete, before the core takes it in: everything after the device is in the latency that a client
reads off, the engine's own bookkeeping too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from manylora.core.clock import Clock
from manylora.core.config import EngineConfig
from manylora.core.plan import AdapterLoad, LoadResult, StepPlan, StepResult
from manylora.core.ports import EngineParts
from manylora.core.types import AdapterKey, SampledToken, Tier
from manylora.lab.catalog.models import base_shape
from manylora.lab.sim.build import SimulatedReader

TICK_S = 1e-4
NUM_TICKS = 100_000
"""Moments in the vocabulary: ten seconds, more than any token is on its way."""


@dataclass(frozen=True, slots=True)
class _Step:
    ready_at: float
    seq_ids: tuple[int, ...]

    def poll(self, now: float) -> StepResult | None:
        """Return the stamped tokens from ``ready_at`` on."""
        if now < self.ready_at:
            return None
        return StepResult(tokens=dict.fromkeys(self.seq_ids, SampledToken(token_id=int(now / TICK_S) % NUM_TICKS)))


@dataclass(frozen=True, slots=True)
class _InstantLoad:
    ready_at: float

    def poll(self, now: float) -> LoadResult | None:
        """Return at once: nothing is copied."""
        return LoadResult()


class PacedExecutor:
    """Takes as long for a step as the prompts in it ask for, and stamps its tokens with the time."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def launch(self, plan: StepPlan, now: float) -> _Step:
        """Start a step."""
        step_s = max(part.tokens[0] for part in plan.sequences) * TICK_S
        self._free_at = max(now, self._free_at) + step_s
        return _Step(self._free_at, tuple(part.seq_id for part in plan.sequences if part.is_sampled))

    def load_adapter(self, load: AdapterLoad, now: float) -> _InstantLoad:
        """Start a load, which is done already."""
        return _InstantLoad(now)

    def drop_adapter(self, key: AdapterKey, tier: Tier) -> None:
        """Nothing is kept, so nothing is dropped."""


def build_paced_parts(config: EngineConfig, clock: Clock) -> EngineParts:
    """Build an engine's parts around a ``PacedExecutor``: Llama-3-8B's sizes, no weights, planned for as a GPU is."""
    base = base_shape("llama-3-8b", block_size=config.memory.block_size)
    return EngineParts(
        base=base,
        num_pages=config.memory.num_pages or 1 << 16,
        executor=PacedExecutor(),
        reader=SimulatedReader(base),
        close=lambda: None,
        is_accelerated=True,
    )


def write_paced_tokenizer(directory: Path) -> Path:
    """Write the tokenizer whose tokens are moments; it decodes byte by byte, as most models' tokenizers do."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fast = Tokenizer(models.BPE({f"~{tick:05d}": tick for tick in range(NUM_TICKS)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=fast).save_pretrained(str(directory))
    return directory
