"""The target of a simulated engine: a machine that was measured, or one given by its data sheet.

Its vocabulary is that of the checkpoint folder, like the tokenizer. Costs do not depend on it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from zlib import crc32

from manylora.core.adapters.shape import BaseShape
from manylora.core.config import EngineConfig
from manylora.core.errors import ConfigError
from manylora.core.plan import PlannedSequence
from manylora.core.types import SampledToken, Tier
from manylora.lab.costs.model import CostModel
from manylora.lab.costs.profile import read_profile
from manylora.lab.costs.speed import MachineSpeed
from manylora.lab.sim.run.executor import synthetic_token
from manylora.lab.sim.setup import Setup, make_config

__all__ = ["MEAN_ANSWER_TOKENS", "SimulatedTarget", "find_target", "make_token_source"]

MEAN_ANSWER_TOKENS = 200
"""Mean length of synthetic answers without a cap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTarget:
    """The machine and the model that a simulated engine imitates.

    Args:
        num_pages: Pages in its pool.
        cost: Times of its steps and loads.
        machine: The hardware, for status pages.
        reads_host: Whether its steps can read adapters from host memory.
        waits_by_layer: Whether its steps can run on an adapter that is on its way.
        interference: Slow-down of a step by a load beside it, by tier; see ``SimulatedExecutor``.
        speed: Speed of the machine over time; constant when ``None``.
    """

    base: BaseShape
    num_pages: int
    cost: CostModel
    machine: str
    reads_host: bool = False
    waits_by_layer: bool = False
    interference: Mapping[Tier, float] = field(default_factory=dict)
    speed: MachineSpeed | None = None


def find_target(name: str, config: EngineConfig) -> SimulatedTarget:
    """Return the target of ``--simulate NAME``.

    Args:
        name: The file of a cost profile, or ``hardware:model``, each a known name or a file (``a40:llama-7b``).
        config: Gives the sizes of memory and the model's folder.

    Raises:
        ConfigError: The name is neither.
    """
    memory = config.memory
    hardware, colon, model = name.rpartition(":")
    if Path(name).is_file():
        setup, machine = Setup(profile=name), read_profile(name).machine
    elif colon:
        setup, machine = Setup(hardware=hardware, model=model), hardware
    else:
        raise ConfigError(
            f"Got simulate = {name!r}, expected the file of a profile that `manylora calibrate` wrote, "
            "or hardware:model, such as a40:llama-7b"
        )
    setup = replace(setup, utilization=memory.gpu_memory_utilization, scheduler=config.scheduler)
    made = make_config(setup, seed=config.seed)
    base = replace(made.base, page=replace(made.base.page, block_size=memory.block_size))
    num_bytes = memory.memory_bytes or made.num_pages * made.base.page.num_bytes
    return SimulatedTarget(
        base=_with_vocabulary(base, config),
        num_pages=memory.num_pages or max(2, num_bytes // base.page.num_bytes),
        cost=made.cost,
        machine=machine,
        reads_host=made.reads_host,
        waits_by_layer=made.waits_by_layer,
        interference=made.interference,
        speed=made.speed(0) if made.speed is not None else None,
    )


def _with_vocabulary(base: BaseShape, config: EngineConfig) -> BaseShape:
    """Return the base with the vocabulary of the configured model folder, and the configured context."""
    path = Path(config.model.model) / "config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        settings = settings.get("text_config", settings)
        vocab_size, eos = settings["vocab_size"], settings.get("eos_token_id")
    except (OSError, ValueError, KeyError):
        return base  # no folder, or one with only a tokenizer
    limit = config.model.max_model_len
    return replace(
        base,
        vocab_size=int(vocab_size),
        eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        max_model_len=base.max_model_len if limit is None else min(limit, base.max_model_len),
    )


def make_token_source(base: BaseShape) -> Callable[[PlannedSequence], SampledToken]:
    """Return the token source of answers for clients.

    An answer runs to its ``max_tokens``. Without one it ends after a length drawn by its seed from an exponential
    distribution, so that a chat without a cap does not run to the end of the context.
    """
    avoid = base.eos_token_ids

    def next_token(part: PlannedSequence) -> SampledToken:
        sampling = part.sampling
        if sampling.max_tokens is None and not sampling.ignore_eos and avoid:
            share = (crc32(f"{part.seed}/{part.num_prompt_tokens}".encode()) + 1) / 2**32
            length = max(1 + sampling.min_tokens, round(-MEAN_ANSWER_TOKENS * math.log(share)))
            if part.start + part.num_tokens - part.num_prompt_tokens >= length - 1:
                return SampledToken(token_id=avoid[0])
        return synthetic_token(part, base.vocab_size, avoid)

    return next_token
