r"""Where functions run, and the artefacts that a node holds ready for them.

Of the places that could serve a batch or a function, the one that is expected to answer first is taken. A place that
has more loaded is ready earlier; one whose device is busy runs slower, because processes take turns on it. Both are
seconds, so they add up. Ties go to the place with less to load, then with fewer bytes to evict, then with fewer
functions. A simulation asks for every batch, since its processes can start on any device. A live controller asks once
for each function, whose requests then go to one node, and again when that node is lost or another one joins.

On a CPU the artefacts of a function are its backbone in sealed memory, a zygote over it with libraries and kernels
ready, and its adapter's file in the page cache, or its process, awake::

    backbone:B ---> libraries:B ---> adapter:F
                                \--> process:F

A process has read its adapter, so it saves that time as well, and does not need the file. What a node holds is the
problem of pre-loading, from measured times and sizes.

Source: ServerlessLoRA, section 3.3, step 4: "a function instance that has the optimal pre-loaded components". Loads
alone would send every batch to the device with everything loaded, however many run there (equation 4).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from manylora.functions.decisions.artefacts import Artefact, ArtefactKind, MemoryKind, Place, Placed, PreloadProblem
from manylora.functions.decisions.billing import PriceList
from manylora.functions.decisions.preload import Preloader

__all__ = [
    "BackboneCost",
    "Candidate",
    "HoldingCost",
    "Wanted",
    "choose_place",
    "hold_name",
    "needed_by",
    "revise_holding",
]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A place that could serve a batch or a function."""

    place: str  # name of the device or the node
    load_s: float  # seconds until all that it lacks is loaded; 0 for a warm process
    wait_s: float = 0.0  # seconds until its process is free
    num_batches: int = 0  # batches that run there besides this one
    evicts_bytes: int = 0  # bytes that idle artefacts of others must give up for it
    num_functions: int = 0  # other functions that only this place serves
    rent_s: float = 0.0  # seconds of waiting that the rent is worth which this choice is expected to add

    def order(self, batch_s: float) -> tuple[float, ...]:
        """Return the key by which places are compared, the best first: the seconds until a batch is answered, and ties.

        The batch takes ``batch_s`` on a device of its own.
        """
        answered_s = max(self.load_s, self.wait_s) + (1 + self.num_batches) * batch_s + self.rent_s
        return answered_s, self.load_s, self.evicts_bytes, self.num_functions


def choose_place(candidates: Sequence[Candidate], batch_s: float) -> Candidate | None:
    """Return the place for a batch that takes ``batch_s`` on a device of its own; ``None`` without candidates."""
    return min(candidates, key=lambda one: (*one.order(batch_s), one.place), default=None)


_KINDS = {
    "backbone": ArtefactKind.BACKBONE,
    "libraries": ArtefactKind.LIBRARIES,
    "adapter": ArtefactKind.ADAPTER,
    "process": ArtefactKind.KERNELS,
}


@dataclass(frozen=True, slots=True)
class HoldingCost:
    """The size of an artefact in host memory, and the time of its load in seconds."""

    num_bytes: int
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A function that gets requests."""

    name: str
    backbone: str
    requests_per_s: float  # rate of its requests
    adapter: HoldingCost  # its adapter's file
    process: HoldingCost  # its process; the time to start does not include the time to load the adapter


BackboneCost: TypeAlias = tuple[HoldingCost, HoldingCost]  # the memory of a backbone, and its libraries: a zygote


def hold_name(kind: str, owner: str) -> str:
    """Return the name of an artefact: ``process:sql``."""
    return f"{kind}:{owner}"


def needed_by(function: Wanted, backbone: BackboneCost) -> dict[str, HoldingCost]:
    """Return the artefacts without which a function does not answer, by name."""
    memory, libraries = backbone
    return {
        hold_name("backbone", function.backbone): memory,
        hold_name("libraries", function.backbone): libraries,
        hold_name("process", function.name): _with_adapter(function),
    }


def revise_holding(
    held: Iterable[str],
    functions: Iterable[Wanted],
    backbones: Mapping[str, BackboneCost],
    free_bytes: int,
    prices: PriceList,
) -> frozenset[str]:
    """Return the names of the artefacts that a node is to hold from now on; ``Preloader.revise`` says when they change.

    Those that it is held for pay for an artefact, so only one that is worth its rent is held: the requests that need it
    are more than one in the time of rent that a start without it is worth. The rent here is that of the memory: whether
    the device is kept for processes is the node's to say. Those ``held`` are of the last decision.
    """

    def is_worth(one: Artefact) -> bool:
        num_bytes = one.num_bytes[MemoryKind.HOST]
        return one.requests_per_s * prices.even_s(one.saves_s[MemoryKind.HOST], host_bytes=num_bytes) > 1.0

    functions = [one for one in functions if one.requests_per_s > 0.0 and one.backbone in backbones]
    rates: dict[str, float] = {}
    for one in functions:
        rates[one.backbone] = rates.get(one.backbone, 0.0) + one.requests_per_s
    artefacts = []
    for name, rate in rates.items():
        memory, libraries = backbones[name]
        artefacts.append(_artefact("backbone", name, memory, rate, None))
        artefacts.append(_artefact("libraries", name, libraries, rate, hold_name("backbone", name)))
    for one in functions:
        needs = hold_name("libraries", one.backbone)
        artefacts.append(_artefact("adapter", one.name, one.adapter, one.requests_per_s, needs))
        artefacts.append(_artefact("process", one.name, _with_adapter(one), one.requests_per_s, needs))
    worth: dict[str, Artefact] = {}  # with their parents, which come before them
    for artefact in artefacts:
        if is_worth(artefact) and (artefact.parent is None or artefact.parent in worth):
            worth[artefact.name] = artefact
    node = Place(name="node", memory=MemoryKind.HOST, node="node", free_bytes=free_bytes)
    before = frozenset(Placed(name, node.name) for name in held)
    chosen = Preloader(PreloadProblem(tuple(worth.values()), (node,))).revise(before, {})
    return frozenset(one.artefact for one in chosen)


def _with_adapter(one: Wanted) -> HoldingCost:
    return HoldingCost(one.process.num_bytes, one.process.took_s + one.adapter.took_s)


def _artefact(kind: str, owner: str, load: HoldingCost, rate: float, parent: str | None) -> Artefact:
    return Artefact(
        name=hold_name(kind, owner),
        kind=_KINDS[kind],
        num_bytes={MemoryKind.HOST: load.num_bytes},
        saves_s={MemoryKind.HOST: load.took_s},
        requests_per_s=rate,
        parent=parent,
    )
