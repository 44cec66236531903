"""The choice of artefacts to take off a device when requests need its memory.

An artefact in use stays. One that leaves takes its children with it, and may be kept in host memory, where a part of
its value remains. The choice is greedy by value lost per byte freed. At every step, the one artefact that would free
all that is still needed is a way to finish; the cheapest of these choices is taken.

Source: ServerlessLoRA, section 4.3, equations 6 and 7, which leave out artefacts in use, children, and host memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Held", "Offload", "choose_offload", "values_lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """An artefact on a device."""

    name: str
    num_bytes: int  # bytes that it takes there
    value: float  # value of holding it there, in seconds saved per second
    host_value: float = 0.0  # value of a copy in host memory
    host_bytes: int = 0  # bytes that such a copy takes; 0 if the host has one already, or if it cannot be there
    parent: str | None = None  # name of its parent on the device, if any
    in_use: bool = False  # whether a running request needs it


@dataclass(frozen=True, slots=True)
class Offload:
    """A decision."""

    names: tuple[str, ...]  # artefacts to take off the device, children before their parents
    kept: frozenset[str]  # of ``names``, the artefacts to keep in host memory
    lost: float  # value that is lost, in seconds saved per second


def values_lost(one: Held) -> tuple[float, float]:
    """Return the value lost when an artefact is dropped, and when it is kept in host memory."""
    return one.value, one.value - min(one.value, one.host_value)


def choose_offload(held: Sequence[Held], num_bytes: int, *, host_free_bytes: int = 0) -> Offload | None:
    """Return the artefacts to take off a device to free ``num_bytes``; ``None`` if those not in use do not suffice.

    There are ``host_free_bytes`` of host memory for copies of them.
    """
    choice = _Removable(held, host_free_bytes)
    best: tuple[float, list[str]] | None = None
    lost, freed = 0.0, 0
    gone: list[str] = []
    while freed < num_bytes:
        last = choice.cheapest_of(num_bytes - freed)
        if last is not None and (best is None or lost + choice.lost[last] < best[0]):
            best = lost + choice.lost[last], [*gone, *choice.below(last)]
        densest = choice.densest_within(num_bytes - freed)
        if densest is None:
            break
        lost, freed = lost + choice.lost[densest], freed + choice.sizes[densest]
        gone += choice.take(densest)
    if freed >= num_bytes and (best is None or lost < best[0]):
        best = lost, gone
    if best is None:
        return None
    by_name = choice.by_name
    kept = _keep([by_name[name] for name in best[1]], host_free_bytes)
    return Offload(
        names=tuple(best[1]), kept=kept, lost=sum(values_lost(by_name[name])[name in kept] for name in best[1])
    )


class _Removable:
    """The artefacts that may leave, each with those below it that are still there."""

    def __init__(self, held: Sequence[Held], host_free_bytes: int) -> None:
        self.by_name = {one.name: one for one in held}
        self._children: dict[str, list[str]] = {one.name: [] for one in held}
        for one in held:
            if one.parent in self._children:
                self._children[one.parent].append(one.name)
        stays: set[str] = set()
        for one in held:
            if one.in_use:
                stays.update(self._upwards(one.name))
        self._gone: set[str] = set()
        self.sizes = {one.name: 0 for one in held if one.name not in stays}
        self.lost = dict.fromkeys(self.sizes, 0.0)
        self._own: dict[str, float] = {}
        for one in held:
            dropped, kept = values_lost(one)
            self._own[one.name] = own = kept if one.host_bytes <= host_free_bytes else dropped
            for name in self._upwards(one.name):
                if name in self.sizes:
                    self.sizes[name] += one.num_bytes
                    self.lost[name] += own

    def cheapest_of(self, num_bytes: int) -> str | None:
        """Return the artefact that frees at least so many bytes at the least value lost."""
        lost = self.lost
        return min((name for name, size in self.sizes.items() if size >= num_bytes), key=lost.__getitem__, default=None)

    def densest_within(self, num_bytes: int) -> str | None:
        """Return the artefact that loses least per byte, among artefacts of fewer bytes than the limit."""
        lost, sizes = self.lost, self.sizes
        fitting = (name for name, size in sizes.items() if 0 < size < num_bytes)
        return min(fitting, key=lambda name: lost[name] / sizes[name], default=None)

    def below(self, name: str) -> list[str]:
        """Return an artefact and those below it that are still there, children first."""
        found = [other for child in self._children[name] if child not in self._gone for other in self.below(child)]
        return [*found, name]

    def take(self, name: str) -> list[str]:
        """Let an artefact leave, and those below it; return them."""
        leaving = self.below(name)
        for other in leaving:
            for above in self._upwards(other):
                if above in self.sizes:
                    self.sizes[above] -= self.by_name[other].num_bytes
                    self.lost[above] -= self._own[other]
        for other in leaving:
            self._gone.add(other)
            del self.sizes[other], self.lost[other]
        return leaving

    def _upwards(self, name: str | None) -> Iterator[str]:
        while name is not None and name in self.by_name:
            yield name
            name = self.by_name[name].parent


def _keep(leaving: Iterable[Held], free_bytes: int) -> frozenset[str]:
    """Return the artefacts to keep in host memory: the most value per byte first."""
    kept = []
    worth = [one for one in leaving if one.host_value > 0.0]
    for one in sorted(worth, key=lambda one: -one.host_value / max(1, one.host_bytes)):
        if one.host_bytes <= free_bytes:
            free_bytes -= one.host_bytes
            kept.append(one.name)
    return frozenset(kept)
