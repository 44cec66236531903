"""The greedy choice of artefacts to pre-load: the densest closure first.

An artefact is offered with the ancestors that it lacks, and an artefact with children also with the children that make
the offer denser: a backbone is worth loading because of all its functions. After each choice the offers that it changes
are priced again. The density is value over the share of each place's memory, so that host and device bytes compare.

One large backbone can be worth more than a denser small one that takes its room. So every backbone that was left out is
tried first, in each place, and the choice of most value wins.

Source: ServerlessLoRA, section 4.1, which sorts single artefacts by density once. Sorted like that, a child comes
before the parent that it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush

from manylora.functions.decisions.artefacts import ArtefactKind, Placed, PreloadProblem

__all__ = ["Preloader"]

LEAST_GAIN = 0.05  # share of the value held by which a new choice must exceed it


class Preloader:
    """Decides again and again over the same artefacts and places, as rates change."""

    def __init__(self, problem: PreloadProblem) -> None:
        self._items = _NumberedItems(problem)

    def choose(self, requests_per_s: Mapping[str, float] | None = None) -> frozenset[Placed]:
        """Return the artefacts to hold, by place: within every place's bytes, each with its ancestors.

        Rates by artefact take the place of the problem's own; those that are missing stay.
        """
        items = self._items
        if requests_per_s is not None:
            items.reprice(requests_per_s)
        best = _GrowingChoice(items).run()
        held = {items.artefact[item] for item in best.held}
        for item in items.backbones:
            if items.artefact[item] not in held:
                other = _GrowingChoice(items, first=item).run()
                if other.value > best.value:
                    best = other
        return frozenset(items.names[item] for item in best.held)

    def revise(self, held: frozenset[Placed], requests_per_s: Mapping[str, float]) -> frozenset[Placed]:
        """Return the artefacts to hold from now on: those held, unless a new choice is worth ``LEAST_GAIN`` more.

        Many choices are worth the same, and moving from one to another would load artefacts again for nothing. A choice
        that only adds to those held moves nothing. Those held may come from another problem: artefacts that are not in
        this one go, and all do if they no longer fit.
        """
        chosen = self.choose(requests_per_s)
        known = frozenset(one for one in held if one in self._items.number)
        is_worth_it = known <= chosen or self.value(chosen) > (1.0 + LEAST_GAIN) * self.value(known)
        return chosen if is_worth_it or not self._fits(known) else known

    def value(self, chosen: Iterable[Placed]) -> float:
        """Return the value of a choice at the rates of the last decision, in seconds saved per second."""
        items, best = self._items, dict[int, float]()
        for one in chosen:
            item = items.number[one]
            best[items.artefact[item]] = max(items.value[item], best.get(items.artefact[item], 0.0))
        return sum(best.values())

    def _fits(self, held: Iterable[Placed]) -> bool:
        items, free = self._items, list(self._items.free)
        for one in held:
            item = items.number[one]
            free[items.place[item]] -= items.num_bytes[item]
        return min(free, default=0) >= 0


class _NumberedItems:
    """Artefacts in places, by number, with all that the choice asks often."""

    def __init__(self, problem: PreloadProblem) -> None:
        self.free = [place.free_bytes for place in problem.places]
        self.names: list[Placed] = []
        self.artefact: list[int] = []
        self.place: list[int] = []
        self.num_bytes: list[int] = []
        self.weight: list[float] = []
        self._saves_s: list[float] = []
        self._rates = {artefact.name: artefact.requests_per_s for artefact in problem.artefacts}
        self.num_artefacts = len(problem.artefacts)
        self.number = number = dict[Placed, int]()
        shares = [1.0 / max(1, num_bytes) for num_bytes in self.free]
        for i, artefact in enumerate(problem.artefacts):
            for j, place in enumerate(problem.places):
                if place.memory in artefact.num_bytes:
                    num_bytes = artefact.num_bytes[place.memory]
                    placed = Placed(artefact.name, place.name)
                    number[placed] = len(self.names)
                    self.names.append(placed)
                    self.artefact.append(i)
                    self.place.append(j)
                    self.num_bytes.append(num_bytes)
                    self.weight.append(num_bytes * shares[j])
                    self._saves_s.append(artefact.saves_s[place.memory])
        self.parents: list[Sequence[int]] = [()] * len(self.names)
        self.children: list[list[int]] = [[] for _ in self.names]  # the items that it lets in
        ways: dict[tuple[str, str], Sequence[int]] = {}  # the children of one parent share the answer
        for item, (name, where) in enumerate(self.names):
            artefact = problem.by_name[name]
            if artefact.parent is None:
                continue
            key = artefact.parent, where
            if key not in ways:
                parents = problem.parents_of(artefact, problem.place_by_name[where])
                ways[key] = [number[parent] for parent in parents]
            self.parents[item] = ways[key]
            for parent in ways[key]:
                self.children[parent].append(item)
        kinds = [problem.by_name[name].kind for name, _ in self.names]
        self.backbones = [item for item, kind in enumerate(kinds) if kind is ArtefactKind.BACKBONE]
        needed = {artefact.parent for artefact in problem.artefacts}
        self.at_first = [item for item, (name, _) in enumerate(self.names) if not self.parents[item] or name in needed]
        self.reprice({})

    def reprice(self, requests_per_s: Mapping[str, float]) -> None:
        """Set the value of every item: the seconds that it saves per second."""
        self._rates |= requests_per_s
        rates = self._rates
        self.value = [rates[name] * saves_s for (name, _), saves_s in zip(self.names, self._saves_s, strict=True)]


class _GrowingChoice:
    """A choice as it grows; it begins with the ``first`` item, if any, and its ancestors.

    An offer is taken from the heap, priced again, and taken up only if it is still the densest. Prices of offers that a
    choice did not change stay as they were, and none rises unnoticed, because what a choice lets in is offered then.
    """

    def __init__(self, items: _NumberedItems, first: int | None = None) -> None:
        self._items = items
        self._free = list(items.free)
        self._gained = [0.0] * items.num_artefacts
        self._offers: list[tuple[float, int]] = []
        self.held: dict[int, None] = {}
        if first is not None:
            _, added = self._price(first, with_children=False)
            for item in added:
                self._hold(item)
        offers = ((self._price(item)[0], item) for item in items.at_first)
        self._offers += [(-density, item) for density, item in offers if density > 0.0]
        heapify(self._offers)

    @property
    def value(self) -> float:
        """Its value, in seconds saved per second."""
        return sum(self._gained)

    def run(self) -> _GrowingChoice:
        """Take up the densest offer until none is left that fits; return itself."""
        offers = self._offers
        while offers:
            _, item = heappop(offers)
            density, added = self._price(item)
            if density <= 0.0:
                continue
            if offers and density < -offers[0][0]:
                heappush(offers, (-density, item))
                continue
            for one in added:
                self._hold(one)
        return self

    def _hold(self, item: int) -> None:
        items = self._items
        self.held[item] = None
        self._free[items.place[item]] -= items.num_bytes[item]
        artefact = items.artefact[item]
        self._gained[artefact] = max(self._gained[artefact], items.value[item])
        for child in items.children[item]:
            density, _ = self._price(child)
            if density > 0.0:
                heappush(self._offers, (-density, child))

    def _price(self, item: int, *, with_children: bool = True) -> tuple[float, Sequence[int]]:
        """Return the density of an item and the items to add for it; 0 if it cannot or need not be added."""
        items, held, gained = self._items, self.held, self._gained
        if item in held:
            return 0.0, ()
        parents, children = items.parents[item], items.children[item]
        if not children and (not parents or any(parent in held for parent in parents)):  # most are like this
            gain = items.value[item] - gained[items.artefact[item]]
            if gain <= 0.0 or items.num_bytes[item] > self._free[items.place[item]]:
                return 0.0, ()
            return gain / (items.weight[item] or 1e-30), (item,)
        added = [*self._missing(item), item]
        value, weight = 0.0, 0.0
        room = list(self._free)
        for one in added:
            room[items.place[one]] -= items.num_bytes[one]
            value += max(0.0, items.value[one] - gained[items.artefact[one]])
            weight += items.weight[one]
        if min(room) < 0:
            return 0.0, ()
        if with_children:
            value, weight = self._add_children(item, added, value, weight, room)
        return (value / (weight or 1e-30) if value > 0.0 else 0.0), added

    def _add_children(
        self, item: int, added: list[int], value: float, weight: float, room: list[int]
    ) -> tuple[float, float]:
        """Add the children in the item's own place that are denser than the offer; return its value and weight."""
        items, gained, place = self._items, self._gained, self._items.place[item]
        offers = []
        for child in items.children[item]:
            gain = items.value[child] - gained[items.artefact[child]]
            if gain > 0.0 and items.place[child] == place and child not in self.held:
                offers.append((-gain / (items.weight[child] or 1e-30), child, gain))
        offers.sort()
        for density, child, gain in offers:
            if -density * weight <= value:
                break
            if items.num_bytes[child] <= room[place]:
                room[place] -= items.num_bytes[child]
                value, weight = value + gain, weight + items.weight[child]
                added.append(child)
        return value, weight

    def _missing(self, item: int) -> list[int]:
        """Return the ancestors to add, topmost first: of several ways the lightest one that fits."""
        parents = self._items.parents[item]
        if not parents or any(parent in self.held for parent in parents):
            return []
        weight, num_bytes, place = self._items.weight, self._items.num_bytes, self._items.place
        ways = [[*self._missing(parent), parent] for parent in parents]
        fitting = [way for way in ways if all(num_bytes[one] <= self._free[place[one]] for one in way)]
        return min(fitting or ways, key=lambda way: sum(weight[one] for one in way))
