"""A system that serves functions, as a table: the machines, how it loads, shares, batches and keeps alive.

And what it serves: functions with their models and artefacts, and the problem of pre-loading them.

::

    [setups.serverless-lora.functions]
    models = ["llama-2-7b", "llama-2-13b"]
    keep_alive_s = 300
    [setups.serverless-lora.functions.loads]
    libraries_s = 4.0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from manylora.core.errors import ConfigError
from manylora.core.options import CheckedOptions, check_options, option
from manylora.functions.decisions.artefacts import Artefact, ArtefactKind, MemoryKind, Place, PreloadProblem
from manylora.functions.decisions.billing import PriceList
from manylora.lab.catalog.hardware import find_hardware
from manylora.lab.costs.roofline import RooflineCost
from manylora.lab.workloads import AdapterSpec

__all__ = [
    "LIBRARIES",
    "FunctionsSetup",
    "LoadTimes",
    "Model",
    "SimulatedFunction",
    "artefacts",
    "device_name",
    "lay_out",
    "node_name",
    "preload_problem",
]

MB, GB = 10**6, 10**9
LIBRARIES = "libraries"
PRELOADED = tuple(kind.value for kind in ArtefactKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTimes(CheckedOptions):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionsSetup:
    """A system that serves functions.

    The adapters of a workload are divided among the models in order: with eight adapters and two models, the first four
    adapters are of the first model.

    ``preload_copies`` says where copies count: ``node`` pre-loads every node by itself, ``cluster`` has one copy of
    each artefact in all, and ``load`` as many devices as the expected load is worth. ``batching`` is ``adaptive``, with
    windows by the objective, or with ``fixed`` ones.
    """

    models: tuple[str, ...] = option(("llama-2-7b", "llama-2-13b"), help="Base models by name.")
    slo_s: tuple[float, ...] = option((2.5, 4.0), help="Objective for the first token of each, in seconds.")
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
    preloads: tuple[str, ...] = option(PRELOADED, help="Kinds of artefacts that are pre-loaded.")
    preload_devices: bool = option(True, help="Pre-load into devices; otherwise into host memory alone.")
    preload_copies: Literal["cluster", "node", "load"] = "load"
    rents: bool = option(True, help="Places are weighed with their rent, not by the expected answer alone.")
    preload_share: float = option(0.75, above=0, at_most=1, help="Share of a device for pre-loaded artefacts.")
    preload_every_s: float = option(300.0, above=0, unit="s", help="Time between two decisions to pre-load.")
    rate_window_s: float = option(900.0, above=0, unit="s", help="Rates are counted over so long.")
    offloads: bool = option(True, help="Take idle artefacts off a device when requests need its memory.")
    batching: Literal["adaptive", "fixed"] = "adaptive"
    patience: float = option(0.001, at_least=0, at_most=1, help="Adaptive: see ``BatchWindow.wait_share``.")
    batch_size: int = option(128, at_least=1, unit="requests", help="Largest batch; the size of a fixed one.")
    batch_delay_s: float = option(0.0, at_least=0, unit="s", help="Fixed: longest wait.")
    joins: bool = option(True, help="Requests join a batch that runs (continuous batching).")
    keep_alive_s: float | None = option(
        None,
        at_least=0,
        unit="s",
        help="A process ends so long after its last request; by default its device is kept for what its rent is worth.",
    )
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


@dataclass(frozen=True, slots=True)
class Model:
    """A base model, and its objective for the first token in seconds."""

    name: str
    cost: RooflineCost
    slo_s: float

    @property
    def num_bytes(self) -> int:
        """Bytes of the model's weights."""
        return self.cost.dims.weight_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV of a token."""
        return self.cost.dims.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class SimulatedFunction:
    """An adapter of a model."""

    name: str
    model: Model
    rank: int
    adapter_bytes: int  # bytes of its weights
    backbone: str  # name of the copy of the base that it maps: of all functions of the model, or its own

    @property
    def adapter(self) -> str:
        """Name of the artefact that is the function's adapter."""
        return f"adapter/{self.name}"

    @property
    def kernels(self) -> str:
        """Name of the artefact of its kernels: a process with a context on the device."""
        return f"kernels/{self.name}"


def lay_out(adapters: Sequence[AdapterSpec], setup: FunctionsSetup) -> list[SimulatedFunction]:
    """Return a simulated function for each adapter of a workload, with the adapters divided among the models."""
    models = []
    for name, slo_s in zip(setup.models, setup.slo_s, strict=True):
        cost = RooflineCost(name, setup.hardware, targets=adapters[0].targets)
        models.append(Model(name, cost, slo_s))
    functions = []
    for index, spec in enumerate(adapters):
        model = models[index * len(models) // len(adapters)]
        functions.append(
            SimulatedFunction(
                name=spec.name,
                model=model,
                rank=spec.rank,
                adapter_bytes=spec.rank
                * model.cost.dims.adapter_elements(spec.targets)
                * model.cost.dims.element_bytes,
                backbone=f"backbone/{model.name if setup.sharing else spec.name}",
            )
        )
    return functions


def node_name(node: int) -> str:
    """Return the name of a node's host memory."""
    return f"node-{node}"


def device_name(node: int, device: int) -> str:
    """Return the name of a device; such names sort in order."""
    return f"node-{node}/gpu-{device:02d}"


def preload_problem(
    functions: Sequence[SimulatedFunction], setup: FunctionsSetup, nodes: Sequence[int]
) -> PreloadProblem:
    """Return the problem of pre-loading these nodes, with all rates at 0."""
    device_bytes = int(setup.preload_share * setup.utilization * find_hardware(setup.hardware).memory_bytes)
    places = []
    for node in nodes:
        name = node_name(node)
        places.append(Place(name=name, memory=MemoryKind.HOST, node=name, free_bytes=setup.host_bytes))
        places += [
            Place(name=device_name(node, device), memory=MemoryKind.DEVICE, node=name, free_bytes=device_bytes)
            for device in range(setup.devices_per_node if setup.preload_devices else 0)
        ]
    offered = [one for one in artefacts(functions, setup) if one.kind.value in setup.preloads]
    known = {one.name for one in offered}
    # An artefact does not ask for a parent that this system does not pre-load.
    return PreloadProblem([one if one.parent in known else replace(one, parent=None) for one in offered], places)


def artefacts(functions: Sequence[SimulatedFunction], setup: FunctionsSetup) -> Iterator[Artefact]:
    """Yield the artefacts of all functions, with all rates at 0."""
    loads = setup.loads
    yield Artefact(
        name=LIBRARIES,
        kind=ArtefactKind.LIBRARIES,
        num_bytes={MemoryKind.HOST: loads.libraries_bytes},
        saves_s={MemoryKind.HOST: loads.libraries_s},
        requests_per_s=0.0,
    )
    for backbone, model in {one.backbone: one.model for one in functions}.items():
        read_s, copy_s = model.num_bytes / loads.disk_bytes_per_s, model.num_bytes / loads.link_bytes_per_s
        own_s = 0.0 if setup.sharing else loads.context_s
        yield Artefact(
            name=backbone,
            kind=ArtefactKind.BACKBONE,
            num_bytes=dict.fromkeys((MemoryKind.HOST, MemoryKind.DEVICE), model.num_bytes),
            saves_s={MemoryKind.HOST: read_s, MemoryKind.DEVICE: read_s + copy_s + own_s},
            requests_per_s=0.0,
            parent=LIBRARIES,
        )
    for one in functions:
        read_s = one.adapter_bytes / loads.disk_bytes_per_s
        copy_s = one.adapter_bytes / loads.link_bytes_per_s
        yield Artefact(
            name=one.adapter,
            kind=ArtefactKind.ADAPTER,
            num_bytes=dict.fromkeys((MemoryKind.HOST, MemoryKind.DEVICE), one.adapter_bytes),
            saves_s={MemoryKind.HOST: read_s, MemoryKind.DEVICE: read_s + copy_s + loads.adapter_s},
            requests_per_s=0.0,
            parent=one.backbone,
        )
        yield Artefact(
            name=one.kernels,
            kind=ArtefactKind.KERNELS,
            num_bytes={MemoryKind.DEVICE: loads.context_bytes},
            saves_s={MemoryKind.DEVICE: loads.kernels_s + (loads.context_s if setup.sharing else 0.0)},
            requests_per_s=0.0,
            parent=one.adapter,
        )
