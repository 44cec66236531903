"""What serves, as people write it down: a model on devices and how its engine decides; and the run it stands for.

::

    [setup]
    model = "llama-3-8b"          # a known name, or a config.json (or the folder it is in)
    hardware = "l40s"             # a known name, or a data sheet in TOML; or, instead of both,
                                  # profile = "cpu.json", as measured by `manylora calibrate`

    [setup.scheduler]
    policy = "chameleon"

    [setup.adapters]
    eviction = "price"
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from manylora.adapters.shape import BaseShape
from manylora.catalog.dims import ATTENTION_TARGETS, ModelDims
from manylora.catalog.models import base_shape, dims_from_config, find_dims
from manylora.config import AdapterConfig, MemoryConfig, SchedulerConfig
from manylora.costs.copies import CopyPath, copies_of_kernel, find_copy_path
from manylora.costs.fitted import FittedCost
from manylora.costs.model import CostModel
from manylora.costs.profile import read_profile
from manylora.costs.roofline import make_cost, memory_for_pool
from manylora.errors import ConfigError
from manylora.sim.run.simulation import SimulationConfig

__all__ = ["Setup", "make_config", "read_dims"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What serves.

    Args:
        model: Base model: a known name, a ``config.json``, or the folder that holds one.
        hardware: Each device: a known name, or a TOML file of its figures.
        profile: A fitted cost profile; takes the place of ``model`` and ``hardware``.
        num_pages: Size of the pool in pages; as many as fit beside the weights when ``None``.
        lora_kernel: Family of kernels that compute adapters.
        copies: How adapters are copied; by default as goes with the kernels.
        link_share: Part of the link that copies reach, instead of what ``copies`` says: to ask what if.
        tensor_parallel: Devices of a replica.
        num_replicas: Engines that share the workload.
        router: Which of them serves a request.
        router_tbt_s: Time between tokens that the ``rank-aware`` router keeps to, in seconds.
        utilization: Share of a device's memory that the engine may take.
        host_s: Time that the device waits for the host between two steps, in seconds.
        scheduler_time_s: What deciding a step takes, in seconds.
        block_size: Tokens of KV in a page.
        prefix_caching: Keep the KV of finished prompts in idle pages.
        weight_bits: Bits per weight of a quantised base; as the model has them when ``None``.
        max_model_len: Longest context in tokens; the model's own when ``None``.
        max_tokens: Cap that requests come with; as many as fit when ``None``.
        exact_caps: Let requests come with the length of their answer as cap, as clients of benchmarks ask.
        scheduler: What a step may hold, and who goes first.
        adapters: The adapter cache.
    """

    model: str = "llama-3-8b"
    hardware: str = "a40"
    profile: str | None = None
    num_pages: int | None = None
    lora_kernel: str = "ragged"
    copies: str | None = None
    link_share: float | None = None
    tensor_parallel: int = 1
    num_replicas: int = 1
    router: str = "affinity"
    router_tbt_s: float | None = None
    utilization: float = 0.9
    host_s: float = 1e-3
    scheduler_time_s: float = 0.0
    block_size: int = 16
    prefix_caching: bool = False
    weight_bits: int | None = None
    max_model_len: int | None = None
    max_tokens: int | None = None
    exact_caps: bool = False
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)

    def __post_init__(self) -> None:
        if not 0 < self.utilization <= 1:
            raise ConfigError(f"Got utilization = {self.utilization!r}, expected a share in (0, 1]")
        if not 0 <= self.host_s < math.inf:
            raise ConfigError(f"Got host_s = {self.host_s!r}, expected 0 or more seconds")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"Got max_model_len = {self.max_model_len!r}, expected at least 2 tokens")
        if self.block_size < 1:
            raise ConfigError(f"Got block_size = {self.block_size!r}, expected at least 1 token")
        if self.weight_bits is not None and self.weight_bits < 1:
            raise ConfigError(f"Got weight_bits = {self.weight_bits!r}, expected at least 1")
        if self.link_share is not None and not 0 < self.link_share <= 1:
            raise ConfigError(f"Got link_share = {self.link_share!r}, expected a share in (0, 1]")
        if self.router_tbt_s is not None and not self.router_tbt_s > 0:
            raise ConfigError(f"Got router_tbt_s = {self.router_tbt_s!r}, expected above 0 seconds")


def read_dims(model: str) -> ModelDims:
    """Return the dimensions of a known model, or of a ``config.json`` or the folder that holds one.

    Raises:
        ConfigError: It is neither, or the file is not usable.
    """
    file = Path(model)
    if file.is_dir():
        file /= "config.json"
    if file.suffix != ".json":
        return find_dims(model)
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"Got model = {model!r}, but {file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"Got model = {model!r}, but {file} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"Got model = {model!r}, but {file} holds no JSON object")
    return dims_from_config(fields, name=file.resolve().parent.name)


def make_config(setup: Setup, *, targets: tuple[str, ...] = ATTENTION_TARGETS, seed: int = 0) -> SimulationConfig:
    """Return what the simulator needs for a setup.

    Args:
        setup: What serves.
        targets: Modules that adapters change.
        seed: Of the router's draws, of the noisy predictor, and of a profile's jitter.

    Raises:
        ConfigError: A name is unknown, a file is not usable, or the model does not fit.
    """
    base, cost, num_pages = _measured(setup, seed) if setup.profile is not None else _from_data_sheets(setup, targets)
    if setup.max_model_len is not None:
        base = replace(base, max_model_len=setup.max_model_len)
    return SimulationConfig(
        base=base,
        cost=cost,
        num_pages=setup.num_pages if setup.num_pages is not None else num_pages,
        scheduler=setup.scheduler,
        memory=MemoryConfig(block_size=base.page.block_size, prefix_caching=setup.prefix_caching),
        adapters=setup.adapters,
        num_replicas=setup.num_replicas,
        router=setup.router,
        router_tbt_s=setup.router_tbt_s,
        scheduler_time_s=setup.scheduler_time_s,
        interference=cost.interference if isinstance(cost, FittedCost) else {},
        speed=cost.speed if isinstance(cost, FittedCost) else None,
        max_tokens=setup.max_tokens,
        exact_caps=setup.exact_caps,
        seed=seed,
    )


def _measured(setup: Setup, seed: int) -> tuple[BaseShape, CostModel, int]:
    assert setup.profile is not None
    profile = read_profile(setup.profile)
    return profile.base, FittedCost(profile, Random(f"jitter/{seed}")), profile.num_pages


def _copies(setup: Setup) -> str | CopyPath | None:
    if setup.link_share is None:
        return setup.copies
    return replace(find_copy_path(setup.copies or copies_of_kernel(setup.lora_kernel)), link_share=setup.link_share)


def _from_data_sheets(setup: Setup, targets: tuple[str, ...]) -> tuple[BaseShape, CostModel, int]:
    dims = read_dims(setup.model)
    if setup.weight_bits is not None:
        dims = replace(dims, weight_bits=setup.weight_bits)
    cost = make_cost(
        dims,
        setup.hardware,
        lora_kernel=setup.lora_kernel,
        tensor_parallel=setup.tensor_parallel,
        targets=targets,
        copies=_copies(setup),
        host_s=setup.host_s,
    )
    pool_bytes = memory_for_pool(
        dims,
        setup.hardware,
        setup.tensor_parallel,
        setup.utilization,
        max_num_batched_tokens=setup.scheduler.max_num_batched_tokens,
        max_num_seqs=setup.scheduler.max_num_seqs,
    )
    base = base_shape(dims, block_size=setup.block_size)
    return base, cost, pool_bytes // base.page.num_bytes
