r"""The artefacts of a cold start, the places that can hold them, and the value of holding them.

::

    libraries ----> backbone ----> adapter      of each function
    (a node's)      (shared)  \--> kernels      of each function, on a device only

A function's first token waits for every artefact that is not loaded. Holding one in a place saves the part of its load
that lies behind that place: from host memory less than from the device.

Source: ServerlessLoRA, section 4.1. It differs in three ways (``docs/functions-decisions.md``). An artefact has a value
of its own for each kind of memory, and the best copy alone counts. A shared backbone is one artefact: its value adds up
over its functions and its bytes count once. The rules of precedence hold by place: a child on a device needs its parent
on that device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from manylora.core.errors import ConfigError

__all__ = ["Artefact", "ArtefactKind", "MemoryKind", "Place", "Placed", "PreloadProblem"]


class ArtefactKind(Enum):
    """Kinds of artefacts, in the order of loading."""

    LIBRARIES = "libraries"
    BACKBONE = "backbone"
    ADAPTER = "adapter"
    KERNELS = "kernels"


class MemoryKind(Enum):
    """Kinds of memory."""

    HOST = "host"
    DEVICE = "device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Artefact:
    """A thing that is loaded before a function's first token."""

    name: str  # unique
    kind: ArtefactKind
    # Memory that it takes, by kind of memory; it cannot be held in a kind that is missing.
    num_bytes: Mapping[MemoryKind, int]
    # Seconds of a cold start that it saves from there; the same keys. A device saves at least as much as the host.
    saves_s: Mapping[MemoryKind, float]
    requests_per_s: float  # rate of the requests that need it; of a shared one, the sum over its functions
    parent: str | None = None  # name of the artefact that must be loaded before it, if any

    def __post_init__(self) -> None:
        if not self.num_bytes or self.num_bytes.keys() != self.saves_s.keys():
            raise ConfigError(f"Got {self.name}: {self.num_bytes = }, {self.saves_s = }, expected the same memories")
        if min(self.num_bytes.values()) < 0 or min(self.saves_s.values()) < 0 or self.requests_per_s < 0:
            raise ConfigError(f"Got {self}, expected no negative sizes, times or rates")
        if self.saves_s.get(MemoryKind.DEVICE, float("inf")) < self.saves_s.get(MemoryKind.HOST, 0.0):
            raise ConfigError(f"Got {self.name}: {self.saves_s = }, expected the device to save at least as much")

    def value(self, memory: MemoryKind) -> float:
        """Return the value of holding it: seconds saved per second."""
        return self.requests_per_s * self.saves_s[memory]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Memory that can hold artefacts: of a node's host, or of one device."""

    name: str  # unique
    memory: MemoryKind  # its kind
    node: str  # the node that it belongs to; a node has one host place
    free_bytes: int  # bytes that artefacts may take


class Placed(NamedTuple):
    """An artefact in a place, both by name."""

    artefact: str
    place: str


class PreloadProblem:
    """Artefacts, and the places that could hold them; ``ConfigError`` if two have one name, or a parent is unknown."""

    def __init__(self, artefacts: Iterable[Artefact], places: Iterable[Place]) -> None:
        self.artefacts, self.places = tuple(artefacts), tuple(places)
        self.by_name = {one.name: one for one in self.artefacts}
        self.place_by_name = {one.name: one for one in self.places}
        if len(self.by_name) < len(self.artefacts) or len(self.place_by_name) < len(self.places):
            raise ConfigError("Got two artefacts or two places of one name, expected every name once")
        for one in self.artefacts:
            if one.parent is not None and (one.parent not in self.by_name or one.parent == one.name):
                raise ConfigError(f"Got parent = {one.parent!r} of {one.name!r}, expected another artefact")

    def parents_of(self, artefact: Artefact, place: Place) -> tuple[Placed, ...]:
        """Return the places where the parent may be, one of which is required; empty if the artefact has no parent.

        On a device it is the same device, if the parent can be on one. Otherwise any place of the node serves.
        """
        if artefact.parent is None:
            return ()
        parent = self.by_name[artefact.parent]
        if place.memory is MemoryKind.DEVICE and MemoryKind.DEVICE in parent.num_bytes:
            return (Placed(parent.name, place.name),)
        return tuple(
            Placed(parent.name, other.name)
            for other in self.places
            if other.node == place.node and other.memory in parent.num_bytes
        )
