"""The parts of a simulated engine; no model is loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from manylora.core.adapters.layout import lay_out, make_version
from manylora.core.adapters.shape import BaseShape
from manylora.core.adapters.sources import is_url
from manylora.core.clock import Clock
from manylora.core.config import EngineConfig
from manylora.core.errors import AdapterError, AdapterForbidden, AdapterNotFound
from manylora.core.ports import EngineParts, check_each
from manylora.core.types import AdapterVersion
from manylora.lab.catalog.models import base_shape
from manylora.lab.costs.fitted import FittedCost
from manylora.lab.costs.model import CostModel, FixedCost
from manylora.lab.sim.run.executor import SimulatedExecutor
from manylora.lab.sim.target import SimulatedTarget, find_target, make_token_source

__all__ = ["SimulatedReader", "build_simulated_parts"]

DEFAULT_POOL_BYTES = 1 << 30


class SimulatedReader:
    """Makes adapter versions from ``adapter_config.json`` alone; weights are not needed.

    The identity is the hash of the configuration and of the weight file, if there is one, so a changed adapter is a new
    version here as well.
    """

    def __init__(self, base: BaseShape) -> None:
        self._base = base

    def read(self, name: str, path: str) -> AdapterVersion:
        """Return the version of an adapter with this rank and these targets.

        Raises:
            AdapterNotFound: There is no ``adapter_config.json``.
            AdapterForbidden: It is in a registry.
            AdapterError: It has no rank, or no module of this base.
        """
        if is_url(path):
            raise AdapterForbidden(name, "a simulated engine reads no registry; give a folder with its configuration")
        config_file = Path(path) / "adapter_config.json"
        if not config_file.is_file():
            raise AdapterNotFound(name, f"no adapter_config.json in {path}")
        content = config_file.read_bytes()
        try:
            settings = json.loads(content)
            rank, targets = int(settings["r"]), settings["target_modules"]
        except (ValueError, KeyError, TypeError) as error:
            raise AdapterError(name, f"adapter_config.json is not usable: {error!r}") from error
        if targets == "all-linear":
            ranks = dict.fromkeys(self._base.all_linear, rank)
        else:
            suffixes = set(targets)
            ranks = {one.name: rank for one in self._base.modules if one.name.rpartition(".")[2] in suffixes}
        if not ranks or rank < 1:
            raise AdapterError(name, f"rank {rank} on {targets} applies to no module of {self._base.name}")
        weight_file = config_file.with_name("adapter_model.safetensors")
        weights = weight_file.read_bytes() if weight_file.is_file() else b""
        key = hashlib.blake2b(self._base.fingerprint.encode() + content + weights, digest_size=16).hexdigest()
        layout, page = lay_out(ranks, self._base), self._base.page
        return make_version(layout, page, key=key, source=str(path), disk_bytes=len(weights) or None)

    def check(self, adapters: Sequence[tuple[str, str]]) -> list[AdapterVersion | AdapterError]:
        """Return the version of each adapter, or the reason against it."""
        return check_each(self.read, adapters)


def build_simulated_parts(
    config: EngineConfig, clock: Clock, *, cost: CostModel | None = None, shape: BaseShape | None = None
) -> EngineParts:
    """Build parts whose executor makes synthetic tokens, at the speed of a cost model.

    Args:
        config: Names the target (``simulate``), and sets the size of the pool.
        clock: Unused, because simulated work ends by time alone; makes this builder interchangeable with the torch one.
        cost: Step and load times; replaces those of the target.
        shape: The base model's shape; replaces that of the target, by default Llama-3-8B's.

    Raises:
        ConfigError: ``simulate`` names no target.
    """
    if config.simulate is not None and cost is None and shape is None:
        target = find_target(config.simulate, config)
    else:
        base = shape or base_shape("llama-3-8b", block_size=config.memory.block_size)
        pool_bytes = config.memory.memory_bytes or DEFAULT_POOL_BYTES
        num_pages = config.memory.num_pages or max(2, pool_bytes // base.page.num_bytes)
        interference, speed = (cost.interference, cost.speed()) if isinstance(cost, FittedCost) else ({}, None)
        target = SimulatedTarget(
            base=base,
            num_pages=num_pages,
            cost=cost or FixedCost(),
            machine="synthetic",
            interference=interference,
            speed=speed,
        )
    base = target.base
    return EngineParts(
        base=base,
        num_pages=target.num_pages,
        executor=SimulatedExecutor(
            target.cost,
            vocab_size=base.vocab_size,
            choose=make_token_source(base),
            interference=target.interference,
            speed=target.speed,
            num_layers=base.num_layers,
        ),
        reader=SimulatedReader(base),
        close=lambda: None,
        machine=f"simulated: {target.machine}",
        reads_host=target.reads_host,
        waits_by_layer=target.waits_by_layer,
    )
