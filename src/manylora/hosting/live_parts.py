"""The live engine's parts as the server wants them: with a sampler that can hold answers to a JSON schema.

Apart from ``service`` because it imports torch; ``service`` names it and does not import it, for simulated engines.
"""

from __future__ import annotations

from functools import partial

from manylora.clock import Clock
from manylora.config import EngineConfig
from manylora.execution.build import build_parts
from manylora.execution.sampling.sampler import make_sampler
from manylora.ports import EngineParts

__all__ = ["build_live_parts"]


def build_live_parts(config: EngineConfig, clock: Clock) -> EngineParts:
    """Load the model and build everything around it.

    Raises:
        ConfigError: The model cannot be served.
    """
    return build_parts(config, clock, make_sampler=partial(make_sampler, config.model))
