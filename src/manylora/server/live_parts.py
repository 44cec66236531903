"""The live engine's parts as the server wants them: with a sampler that can hold answers to a JSON schema.

Apart from ``service`` because it imports torch, and named there rather than imported: a simulated engine does without.
"""

from __future__ import annotations

import torch

from manylora.adapters.shape import BaseShape
from manylora.clock import Clock
from manylora.config import EngineConfig
from manylora.engine.ports import EngineParts
from manylora.execution.build import build_parts
from manylora.execution.grammar import JsonGrammar
from manylora.execution.sampler import Sampler

__all__ = ["build_live_parts"]


def build_live_parts(config: EngineConfig, clock: Clock) -> EngineParts:
    """Load the model and build everything around it.

    Raises:
        ConfigError: The model cannot be served.
    """
    model = config.model

    def make_sampler(base: BaseShape) -> Sampler:
        device = ("cuda" if torch.cuda.is_available() else "cpu") if model.device == "auto" else model.device
        grammar = JsonGrammar(
            model.tokenizer or model.model, base.vocab_size, base.eos_token_ids, revision=model.revision
        )
        return Sampler(base.vocab_size, base.eos_token_ids, device, grammar=grammar)

    return build_parts(config, clock, make_sampler=make_sampler)
