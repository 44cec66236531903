"""The functions of a run: their models, their artefacts, and the problem of pre-loading them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from manylora.functions.decisions.artefacts import Artefact, ArtefactKind, MemoryKind, Place, PreloadProblem
from manylora.lab.catalog.hardware import find_hardware
from manylora.lab.costs.roofline import RooflineCost
from manylora.lab.functions.setup import FunctionsSetup
from manylora.lab.workloads import AdapterSpec

__all__ = [
    "LIBRARIES",
    "Model",
    "SimulatedFunction",
    "artefacts",
    "device_name",
    "lay_out",
    "node_name",
    "preload_problem",
]

LIBRARIES = "libraries"


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
    """An adapter of a model.

    Args:
        adapter_bytes: Bytes of its weights.
        backbone: Name of the copy of the base that it maps: of all functions of the model, or its own.
    """

    name: str
    model: Model
    rank: int
    adapter_bytes: int
    backbone: str

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
