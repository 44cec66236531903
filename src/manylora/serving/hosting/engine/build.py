"""The parts of a live engine, with a sampler that can constrain answers to a JSON schema.

It imports torch; ``service`` refers to it by name, so that simulated engines need no torch.
"""

from __future__ import annotations

from functools import partial

from manylora.core.clock import Clock
from manylora.core.config import EngineConfig
from manylora.core.ports import EngineParts, SharedBase
from manylora.execution.build import build_parts
from manylora.execution.model.base_weights import map_weights
from manylora.execution.sampling.sampler import make_sampler

__all__ = ["build_live_parts"]


def build_live_parts(config: EngineConfig, clock: Clock, *, shared: SharedBase | None = None) -> EngineParts:
    """Load the model, or map the weights that another process loaded, and build the engine's parts.

    Raises:
        ConfigError: The model cannot be served.
    """
    weights = None if shared is None else map_weights(shared)
    return build_parts(config, clock, make_sampler=partial(make_sampler, config.model), weights=weights)
