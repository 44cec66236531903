r"""The artefacts of a cold start, the places that can hold them, and the value of holding them.

::

    libraries ----> backbone ----> adapter      of each function
    (a node's)      (shared)  \--> kernels      of each function, on a device only

A function's first token waits for every artefact that is not loaded. Holding one in a place saves the part of its load
that lies behind that place: from host memory less than from the device.

Source: ServerlessLoRA, section 4.1. It differs in three ways (ADR 36). An artefact has a value of its own for each kind
of memory, and the best copy alone counts. A shared backbone is one artefact: its value adds up over its functions and
its bytes count once. The rules of precedence hold by place: a child on a device needs its parent on that device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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
    """A thing that is loaded before a function's first token.

    Args:
        name: Unique.
        kind: Its kind.
        num_bytes: Memory that it takes, by kind of memory; it cannot be held in a kind that is missing.
        saves_s: Seconds of a cold start that it saves from there; the same keys. A device saves at least as much as
            the host.
        requests_per_s: Rate of the requests that need it; of a shared one, the sum over its functions.
        parent: Name of the artefact that must be loaded before it, if any.
    """

    name: str
    kind: ArtefactKind
    num_bytes: Mapping[MemoryKind, int]
    saves_s: Mapping[MemoryKind, float]
    requests_per_s: float
    parent: str | None = None

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
    """Memory that can hold artefacts: of a node's host, or of one device.

    Args:
        name: Unique.
        memory: Its kind.
        node: The node that it belongs to; a node has one host place.
        free_bytes: Bytes that artefacts may take.
    """

    name: str
    memory: MemoryKind
    node: str
    free_bytes: int


class Placed(NamedTuple):
    """An artefact in a place, both by name."""

    artefact: str
    place: str


@dataclass(frozen=True, slots=True)
class PreloadProblem:
    """Artefacts, and the places that could hold them.

    Raises:
        ConfigError: Two have one name, or a parent is unknown.
    """

    artefacts: tuple[Artefact, ...]
    places: tuple[Place, ...]
    by_name: Mapping[str, Artefact] = field(init=False, compare=False)
    place_by_name: Mapping[str, Place] = field(init=False, compare=False)
    children: Mapping[str, tuple[Artefact, ...]] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        by_name = {one.name: one for one in self.artefacts}
        places = {one.name: one for one in self.places}
        if len(by_name) < len(self.artefacts) or len(places) < len(self.places):
            raise ConfigError("Got two artefacts or two places of one name, expected every name once")
        children: dict[str, list[Artefact]] = {name: [] for name in by_name}
        for one in self.artefacts:
            if one.parent is not None:
                if one.parent not in by_name or one.parent == one.name:
                    raise ConfigError(f"Got parent = {one.parent!r} of {one.name!r}, expected another artefact")
                children[one.parent].append(one)
        object.__setattr__(self, "by_name", by_name)
        object.__setattr__(self, "place_by_name", places)
        object.__setattr__(self, "children", {name: tuple(ones) for name, ones in children.items()})

    def can_hold(self, artefact: Artefact, place: Place) -> bool:
        """Whether an artefact may be in a place at all."""
        return place.memory in artefact.num_bytes

    def parents_of(self, artefact: Artefact, place: Place) -> tuple[Placed, ...]:
        """Return the places of its parent of which one is required; empty if none is.

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
            if other.node == place.node and self.can_hold(parent, other)
        )

    def value(self, chosen: Iterable[Placed]) -> float:
        """Return the value of a choice, in seconds saved per second: of each artefact its best copy counts."""
        best: dict[str, float] = {}
        for name, place in chosen:
            value = self.by_name[name].value(self.place_by_name[place].memory)
            best[name] = max(value, best.get(name, 0.0))
        return sum(best.values())

    def violations(self, chosen: Iterable[Placed]) -> list[str]:
        """Return the rules that a choice breaks, in words; empty if it is feasible."""
        held = set(chosen)
        found = []
        used = dict.fromkeys(self.place_by_name, 0)
        for name, where in sorted(held):
            artefact, place = self.by_name[name], self.place_by_name[where]
            if not self.can_hold(artefact, place):
                found.append(f"{name} cannot be in {where}")
                continue
            used[where] += artefact.num_bytes[place.memory]
            parents = self.parents_of(artefact, place)
            if artefact.parent is not None and held.isdisjoint(parents):
                found.append(f"{name} in {where} lacks {artefact.parent}")
        for where, num_bytes in used.items():
            if num_bytes > self.place_by_name[where].free_bytes:
                found.append(f"{where} holds {num_bytes} bytes of {self.place_by_name[where].free_bytes}")
        return found
