"""The models of the whole fleet: the backends that list each model, and the union of the lists as an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from manylora.route.backend import Backend
from manylora.route.report import Card, ServerKind

__all__ = ["Catalog", "Found"]


@dataclass(frozen=True, slots=True)
class Found:
    """A model that requests may name.

    Args:
        name: As backends list it.
        base: The base of an adapter; ``None`` for a base.
        holders: The backends that list it.
    """

    name: str
    base: str | None
    holders: Sequence[Backend]

    @property
    def adapter(self) -> str:
        """The adapter's name; empty for a base."""
        return "" if self.base is None else self.name

    def name_at(self, backend: Backend) -> str:
        """Return the name that a backend knows the model by: SGLang answers from the base to an adapter's bare name."""
        return self.name if self.base is None or backend.kind is not ServerKind.SGLANG else f"{self.base}:{self.name}"


class Catalog:
    """Models by name; ``bases`` are the models without a parent."""

    def __init__(self) -> None:
        self.bases: Sequence[str] = ()
        self._holders: dict[str, dict[Backend, Card]] = {}
        self._listing: bytes | None = None

    def __len__(self) -> int:
        """Return the number of models."""
        return len(self._holders)

    def update(self, backend: Backend, cards: Mapping[str, Card], raw: Mapping[str, msgspec.Raw]) -> None:
        """Replace a backend's list; an empty one removes the backend."""
        for name in backend.cards.keys() - cards.keys():
            self._drop(name, backend)
        for name, card in cards.items():
            if name not in backend.outdated:
                self._holders.setdefault(name, {})[backend] = card
        backend.cards, backend.raw_cards = cards, raw
        self.bases = [name for name, holders in self._holders.items() if _card_of(holders).parent is None]
        self._listing = None

    def hide(self, backend: Backend, adapter: str) -> None:
        """Take a backend from the holders of an adapter, whatever it lists: it has another version, or none."""
        backend.outdated.add(adapter)
        self._drop(adapter, backend)
        self._listing = None

    def show(self, backend: Backend, adapter: str) -> None:
        """Count a backend among the holders of an adapter, if it lists it."""
        backend.outdated.discard(adapter)
        card = backend.cards.get(adapter)
        if card is not None:
            self._holders.setdefault(adapter, {})[backend] = card
            self._listing = None

    def find(self, model: str | None) -> Found | None:
        """Return the model that a request names, also as ``base:adapter``; ``None`` without it is the only base."""
        if model is None:
            return self.find(self.bases[0]) if len(self.bases) == 1 else None
        holders = self._holders.get(model)
        if holders is None and ":" in model:
            for base in self.bases:
                if model.startswith(base + ":"):
                    found = self.find(model[len(base) + 1 :])
                    return found if found is not None and found.base == base else None
        if holders is None:
            return None
        return Found(model, _card_of(holders).parent, list(holders))

    def of_base(self, base: str) -> list[Backend]:
        """Return the backends that list a base."""
        return list(self._holders.get(base, ()))

    def card(self, name: str) -> msgspec.Raw | None:
        """Return an entry of the list of models as its first holder sent it."""
        holders = self._holders.get(name)
        return None if holders is None else next(iter(holders)).raw_cards[name]

    def source(self, adapter: str) -> str | None:
        """Return the path that an adapter was loaded from, by its first holder that says."""
        return next((card.root for card in self._holders.get(adapter, {}).values() if card.root), None)

    def listing(self) -> bytes:
        """Return the answer to ``/v1/models``: the bases, then adapters by name."""
        if self._listing is None:
            names = sorted(self._holders, key=lambda name: (_card_of(self._holders[name]).parent is not None, name))
            cards = [next(iter(self._holders[name])).raw_cards[name] for name in names]
            self._listing = msgspec.json.encode({"object": "list", "data": cards})
        return self._listing

    def _drop(self, name: str, backend: Backend) -> None:
        holders = self._holders.get(name, {})
        holders.pop(backend, None)
        if not holders:
            self._holders.pop(name, None)


def _card_of(holders: Mapping[Backend, Card]) -> Card:
    return next(iter(holders.values()))
