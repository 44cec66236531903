"""The engines of a simulation as a table: a model on devices, and the policies of its engine.

::

    [setup]
    model = "llama-3-8b"          # a known name, or a config.json (or the folder it is in)
    hardware = "l40s"             # a known name, or a data sheet in TOML; or, instead of both,
                                  # profile = "cpu.json", as measured by `manylora calibrate`

    [setup.scheduler]
    policy = "chameleon"

    [setup.adapters]
    eviction = "price"

    [setup.workers]               # CPU cores that compute cold adapters beside an accelerator
    cores = 16
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from manylora.core.adapters.shape import BaseShape
from manylora.core.config import AdapterConfig, MemoryConfig, SchedulerConfig
from manylora.core.errors import ConfigError
from manylora.core.options import check_options, option
from manylora.core.routing import DEFAULT_ROUTER
from manylora.lab.catalog.dims import ModelDims
from manylora.lab.catalog.hardware import HARDWARE
from manylora.lab.catalog.models import MODELS, base_shape, dims_from_config, find_dims
from manylora.lab.costs.adapters import find_copy_path
from manylora.lab.costs.fitted import FittedCost
from manylora.lab.costs.model import CostModel
from manylora.lab.costs.profile import read_profile
from manylora.lab.costs.roofline import RooflineCost, memory_for_pool
from manylora.lab.costs.workers import AssistCost, CpuWorkers
from manylora.lab.sim.run.simulation import SimulationConfig

__all__ = ["Setup", "make_config", "read_dims"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The engines of a simulation."""

    model: str = option(
        "llama-3-8b",
        panel="Setup",
        metavar="NAME",
        help=f"Base model: {', '.join(sorted(MODELS))}; or a config.json, or the folder that holds one.",
    )
    hardware: str = option(
        "a40",
        panel="Setup",
        metavar="NAME",
        help=f"Each device: {', '.join(sorted(HARDWARE))}; or a data sheet in TOML.",
    )
    profile: str | None = option(
        None, panel="Setup", metavar="FILE", help="A measured cost profile, in place of model and hardware."
    )
    num_pages: int | None = option(
        None, unit="pages", help="Size of the pool; by default as many as fit beside the weights."
    )
    num_slots: int | None = option(
        None,
        unit="adapters",
        at_least=1,
        help="Adapters on each device, in slots beside KV that is never short, as in vLLM; by default one pool.",
    )
    lora_kernel: str = option("ragged", help="Kernels that compute adapters.")
    copies: str | None = option(None, help="Path of adapter copies; by default that of the kernels.")
    link_share: float | None = option(
        None, above=0, at_most=1, help="Share of the link's bandwidth that copies reach; replaces that of `copies`."
    )
    tensor_parallel_size: int = option(
        1, panel="Setup", unit="devices", at_least=1, help="Devices that share each layer of a replica."
    )
    num_replicas: int = option(
        1, panel="Setup", flag="--replicas", unit="replicas", help="Replicas that share the requests."
    )
    router: str = option(
        DEFAULT_ROUTER, panel="Setup", plugin="router", help="Routing policy: chooses the replica of a request."
    )
    router_options: Mapping[str, Any] = option(
        factory=dict,
        panel="Setup",
        flag="--router-option",
        metavar="KEY=VALUE",
        help="An option of the router. Repeatable.",
    )
    reads_host: bool | None = option(
        None,
        help="Let a request run from the host copy of its adapter while that is copied to the device: at the cost of "
        "`workers`, or without them at no cost of its own, as on a CPU. By default as the profile says, and on with "
        "`workers`.",
    )
    waits_by_layer: bool = option(
        False, help="Let a request run on an adapter that is on its way, and wait for each layer."
    )
    all_resident: bool = option(
        False, help="Keep every adapter on the device from the start, in memory of its own: the bound on cold starts."
    )
    utilization: float = option(0.9, above=0, at_most=1, help="Share of a device's memory that the engine may take.")
    host_s: float = option(
        1e-3, unit="s", at_least=0, help="Time that the device waits for the host between two steps."
    )
    scheduler_time_s: float = option(0.0, unit="s", help="Time to decide a step.")
    block_size: int = option(16, unit="tokens", at_least=1, help="Tokens of KV in a page.")
    prefix_caching: bool = option(False, help="Keep the KV of finished prompts in idle pages.")
    weight_bits: int | None = option(
        None, unit="bits", at_least=1, help="Bits per weight of a quantised base; by default as the model has them."
    )
    kv_cache_dtype: str | None = option(
        None, choices=("float32", "bfloat16", "float16", "int8"), help="Type of KV in pages; by default the model's."
    )
    max_model_len: int | None = option(
        None, unit="tokens", at_least=2, help="Longest context; by default the model's own."
    )
    max_tokens: int | None = option(None, unit="tokens", help="Cap of every request; by default as many as fit.")
    exact_caps: bool = option(
        False, help="Set each request's cap to the length of its answer, as benchmark clients do."
    )
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    workers: CpuWorkers | None = None

    def __post_init__(self) -> None:
        check_options(self)
        if self.workers is not None and self.profile is not None:
            raise ConfigError("Got workers and profile, expected workers beside a model and hardware by name")
        if self.tensor_parallel_size > 1 and self.profile is not None:
            raise ConfigError(
                f"Got tensor_parallel_size = {self.tensor_parallel_size}, profile = {self.profile!r}: "
                "a measured profile is that of one device"
            )


def read_dims(model: str) -> ModelDims:
    """Return the dimensions of a known model, or of a ``config.json`` or the folder that holds one.

    ``ConfigError`` if the model is unknown, or the file is not usable.
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


def make_config(setup: Setup, *, targets: tuple[str, ...] | None = None, seed: int = 0) -> SimulationConfig:
    """Return the simulator's configuration for a setup.

    Adapters change the modules ``targets``, by default the linears of attention. The seed is of the router, the noisy
    predictor, and the jitter of a profile. ``ConfigError`` if a name is unknown, a file is not usable, or the model
    does not fit.
    """
    profile = read_profile(setup.profile) if setup.profile is not None else None
    if profile is not None:
        base, num_pages = profile.base, profile.num_pages
        cost: CostModel = FittedCost(profile, Random(f"jitter/{seed}"))
    else:
        base, cost, num_pages = _from_data_sheets(setup, targets)
    if setup.max_model_len is not None:
        base = replace(base, max_model_len=setup.max_model_len)
    reads_host = setup.reads_host
    if reads_host is None:
        reads_host = profile.reads_host if profile is not None else setup.workers is not None
    return SimulationConfig(
        base=base,
        cost=cost,
        num_pages=setup.num_pages if setup.num_pages is not None else num_pages,
        num_slots=setup.num_slots,
        scheduler=setup.scheduler,
        memory=MemoryConfig(block_size=base.page.block_size, prefix_caching=setup.prefix_caching),
        adapters=setup.adapters,
        num_replicas=setup.num_replicas,
        router=setup.router,
        router_options=setup.router_options,
        scheduler_time_s=setup.scheduler_time_s,
        interference=cost.interference if isinstance(cost, FittedCost) else {},
        speed=cost.speed if isinstance(cost, FittedCost) else None,
        reads_host=reads_host,
        waits_by_layer=setup.waits_by_layer,
        assist=AssistCost(cost, setup.workers) if setup.workers and isinstance(cost, RooflineCost) else None,
        all_resident=setup.all_resident,
        max_tokens=setup.max_tokens,
        exact_caps=setup.exact_caps,
        seed=seed,
    )


def _from_data_sheets(setup: Setup, targets: tuple[str, ...] | None) -> tuple[BaseShape, RooflineCost, int]:
    dims = read_dims(setup.model)
    dims = replace(
        dims,
        weight_bits=dims.weight_bits if setup.weight_bits is None else setup.weight_bits,
        kv_dtype=dims.kv_dtype if setup.kv_cache_dtype is None else setup.kv_cache_dtype,
    )
    copies = find_copy_path(setup.copies, setup.lora_kernel)
    if setup.link_share is not None:
        copies = replace(copies, link_share=setup.link_share)
    cost = RooflineCost(
        dims,
        setup.hardware,
        lora_kernel=setup.lora_kernel,
        tensor_parallel_size=setup.tensor_parallel_size,
        targets=targets,
        copies=copies,
        host_s=setup.host_s,
    )
    pool_bytes = memory_for_pool(
        dims,
        setup.hardware,
        setup.tensor_parallel_size,
        setup.utilization,
        max_num_batched_tokens=setup.scheduler.max_num_batched_tokens,
        max_num_seqs=setup.scheduler.max_num_seqs,
    )
    base = base_shape(dims, block_size=setup.block_size)
    # A page of all devices together: where they are more than heads of keys, several hold the same head.
    heads = dims.num_kv_heads * dims.kv_copies(setup.tensor_parallel_size)
    base = replace(base, page=replace(base.page, num_kv_heads=heads))
    return base, cost, pool_bytes // base.page.num_bytes
