"""The account of the adapters that this router put on one backend."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from manylora.route.backends.backend import Backend
from manylora.route.fleet.book import Change

__all__ = ["PlacedAdapters"]

MAX_CALLS = 4
"""Changes of adapters at one backend at once."""
MAX_TRIES = 3
"""Tries to load an adapter on a backend that joins, before it joins without."""
AGAIN_S = 30.0
"""Time between two tries to load an adapter on a backend that could not load it, in seconds."""
MAX_FAILED = 10_000


@dataclass(frozen=True, slots=True)
class _Made:
    """A change of the book that the backend has made, and the path that it listed afterwards."""

    generation: int
    root: str | None


@dataclass(frozen=True, slots=True)
class _Failure:
    num_tries: int
    at: float


class PlacedAdapters:
    """The adapters of one backend.

    ``placed`` are those that were placed on demand and the time of their last request, the oldest first; an adapter
    counts from before its load until its unload has succeeded. ``room`` is held while room is made for another, by the
    unload of ``leaving``.
    """

    def __init__(self) -> None:
        self.placed: dict[str, float] = {}
        self.room = asyncio.Lock()
        self.leaving: str | None = None
        self.calls = asyncio.Semaphore(MAX_CALLS)
        self._made: dict[str, _Made] = {}
        self._failures: dict[str, _Failure] = {}
        self._num_joins = 0

    def has(self, backend: Backend, name: str, change: Change) -> bool:
        """Whether a backend has made a change, and has not lost it since: a restart brings back paths of its own."""
        card, made = backend.cards.get(name), self._made.get(name)
        if change.path is None:
            return card is None
        if card is None or made is None or made.generation != change.generation:
            return False
        return card.root in (None, name, change.path, made.root)

    def note_made(self, backend: Backend, name: str, change: Change) -> None:
        """Learn that a backend has made a change."""
        card = backend.cards.get(name)
        self._made[name] = _Made(change.generation, None if card is None else card.root)
        self._failures.pop(name, None)

    def note_failed(self, name: str, status: int, now: float) -> None:
        """Learn that a backend could not make a change.

        An answer that says so is final, 500 too: that is vLLM's to an invalid adapter. Any other failure may pass.
        """
        is_final = 400 <= status <= 500 and status != 429
        before = self._failures.pop(name, None)
        num_tries = MAX_TRIES if is_final else 1 if before is None else before.num_tries + 1
        if len(self._failures) >= MAX_FAILED:
            del self._failures[next(iter(self._failures))]
        self._failures[name] = _Failure(num_tries, now)
        if not is_final:  # it may have been made all the same
            self._made.pop(name, None)

    def note_over(self, name: str) -> None:
        """Forget a failure."""
        self._failures.pop(name, None)

    def forget(self, name: str) -> None:
        """Drop the account of a name."""
        self.placed.pop(name, None)
        self._made.pop(name, None)
        self._failures.pop(name, None)

    def rejoins(self, backend: Backend) -> None:
        """Begin anew, if the backend was in rotation since: its failures may be over, and its adapters gone."""
        if self._num_joins != backend.health.num_joins:
            self._num_joins = backend.health.num_joins
            self._failures.clear()
        self.placed = {name: at for name, at in self.placed.items() if name in backend.cards}

    def is_left_out(self, name: str) -> bool:
        """Whether a backend joins without an adapter."""
        failure = self._failures.get(name)
        return failure is not None and failure.num_tries >= MAX_TRIES

    def is_due(self, name: str, now: float) -> bool:
        """Whether a load may be tried: it did not just fail."""
        failure = self._failures.get(name)
        return failure is None or now - failure.at >= AGAIN_S

    def due(self, now: float) -> list[str]:
        """Return the names whose failed changes can be tried again."""
        return [name for name, failure in self._failures.items() if now - failure.at >= AGAIN_S]
