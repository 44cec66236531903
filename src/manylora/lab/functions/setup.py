"""A system that serves functions, as a table: the machines, how it loads, shares, batches and keeps alive.

::

    [setups.serverless-lora.functions]
    models = ["llama-2-7b", "llama-2-13b"]
    keep_alive_s = 300
    [setups.serverless-lora.functions.loads]
    libraries_s = 4.0
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from manylora.core.errors import ConfigError
from manylora.core.options import check_options, option
from manylora.functions.decisions.artefacts import ArtefactKind
from manylora.functions.decisions.billing import PriceList

__all__ = ["PRELOADED", "FunctionsSetup", "LoadTimes"]

MB, GB = 10**6, 10**9
PRELOADED = tuple(kind.value for kind in ArtefactKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTimes:
    """Times and sizes of the stages of a cold start. Sizes of backbones and adapters follow from the model."""

    libraries_s: float = option(4.0, unit="s", at_least=0, help="Container and imports of a process.")
    libraries_bytes: int = option(2 * GB, unit="bytes", at_least=0, help="Host memory of a container kept ready.")
    context_s: float = option(0.4, unit="s", at_least=0, help="A process's context on a device.")
    context_bytes: int = option(473 * MB, unit="bytes", at_least=0, help="Device memory of that context.")
    kernels_s: float = option(0.28, unit="s", at_least=0, help="Compiling and loading kernels.")
    adapter_s: float = option(0.2, unit="s", at_least=0, help="Attaching an adapter, beside reading its bytes.")
    disk_bytes_per_s: float = option(3e9, above=0, help="Reads of a node's disk.")
    link_bytes_per_s: float = option(25e9, above=0, help="Copies of weights from host memory to a device.")
    first_step_s: float = option(0.22, unit="s", at_least=0, help="Host time of a prompt step.")

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionsSetup:
    """A system that serves functions.

    The adapters of a workload are divided among the models in order: with eight adapters and two models, the first four
    adapters are of the first model.

    Args:
        models: Base models by name.
        slo_s: Objective for the first token of each, in seconds.
        preloads: Kinds of artefacts that are pre-loaded.
        preload_copies: Where copies count: ``node`` pre-loads every node by itself, ``cluster`` has one copy of each
            artefact in all.
        batching: ``adaptive`` windows by the objective, or ``fixed`` ones.
        loads: Times of a cold start.
        prices: Prices of the ledger's amounts.
    """

    models: tuple[str, ...] = ("llama-2-7b", "llama-2-13b")
    slo_s: tuple[float, ...] = (2.5, 4.0)
    hardware: str = option("l40s", help="Each device.")
    num_nodes: int = option(4, at_least=1, unit="nodes", help="Nodes.")
    devices_per_node: int = option(4, at_least=1, unit="devices", help="Devices of a node.")
    host_bytes: int = option(768 * GB, unit="bytes", at_least=0, help="Host memory of a node for weights.")
    utilization: float = option(0.9, above=0, at_most=1, help="Share of a device's memory that is used.")
    sharing: bool = option(True, help="Functions of one model map one copy of it on a device.")
    one_process: bool = option(False, help="Functions of one model are tenants of one process: no isolation.")
    always_on: int = option(
        0, at_least=0, unit="processes", help="Processes of each engine that are loaded at first and never end."
    )
    preloads: tuple[str, ...] = PRELOADED
    preload_devices: bool = option(True, help="Pre-load into devices; otherwise into host memory alone.")
    preload_copies: Literal["cluster", "node"] = "node"
    preload_share: float = option(0.75, above=0, at_most=1, help="Share of a device for pre-loaded artefacts.")
    preload_every_s: float = option(300.0, above=0, unit="s", help="Time between two decisions to pre-load.")
    rate_window_s: float = option(900.0, above=0, unit="s", help="Rates are counted over so long.")
    offloads: bool = option(True, help="Take idle artefacts off a device when requests need its memory.")
    batching: Literal["adaptive", "fixed"] = "adaptive"
    patience: float = option(0.0, at_least=0, at_most=1, help="Adaptive: see ``BatchWindow.wait_share``.")
    batch_size: int = option(128, at_least=1, unit="requests", help="Largest batch; the size of a fixed one.")
    batch_delay_s: float = option(0.0, at_least=0, unit="s", help="Fixed: longest wait.")
    joins: bool = option(False, help="Requests join a batch that runs (continuous batching).")
    keep_alive_s: float = option(300.0, at_least=0, unit="s", help="A process ends so long after its last request.")
    prompt_factor: float = option(1.0, above=0, help="Factor on the device time of prompts.")
    alpha_s: float | None = option(
        None, unit="s", at_least=0, help="Device time of every further prompt of a step; by default the cost model's."
    )
    billed_share: float = option(1.0, above=0, at_most=1, help="Share of a device that `invocation_cost` charges.")
    loads: LoadTimes = field(default_factory=LoadTimes)
    prices: PriceList = field(default_factory=PriceList)

    def __post_init__(self) -> None:
        check_options(self)
        if len(self.slo_s) != len(self.models) or not self.models or min(self.slo_s) <= 0:
            raise ConfigError(f"Got {self.models = }, {self.slo_s = }, expected one objective above 0 for each model")
        if unknown := set(self.preloads) - set(PRELOADED):
            raise ConfigError(f"Got preloads = {sorted(unknown)}, expected some of {', '.join(PRELOADED)}")
        if self.one_process and not (self.sharing and self.always_on):
            raise ConfigError("Got one_process, expected it with sharing and always_on: tenants of a server")
