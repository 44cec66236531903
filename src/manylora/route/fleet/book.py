"""The changes of adapters that the router was told: the version of each name that every backend must have.

An adapter that was unloaded keeps an entry, so that a backend that was away does not bring it back. Of these entries
the oldest are dropped beyond a bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Book", "Change"]

MAX_UNLOADED = 10_000


@dataclass(frozen=True, slots=True)
class Change:
    """The latest change of one name.

    Args:
        path: The adapter's weights; ``None`` where it was unloaded.
        generation: Unlike that of every other change.
    """

    path: str | None
    generation: int


class Book:
    """Changes by name.

    Args:
        max_unloaded: Most names that were unloaded and are kept.
    """

    def __init__(self, max_unloaded: int = MAX_UNLOADED) -> None:
        self._max_unloaded = max_unloaded
        self._changes: dict[str, Change] = {}
        self._unloaded: dict[str, None] = {}  # the oldest first
        self._generation = 0

    def __iter__(self) -> Iterator[tuple[str, Change]]:
        """Iterate over names and their changes."""
        return iter(self._changes.items())

    def get(self, name: str) -> Change | None:
        """Return the change of a name, if there is one."""
        return self._changes.get(name)

    def next(self, path: str | None) -> Change:
        """Return a new change, which is not yet in the book."""
        self._generation += 1
        return Change(path, self._generation)

    def note(self, name: str, change: Change) -> str | None:
        """Enter a change; return the name that was dropped for it, if any."""
        self._changes[name] = change
        self._unloaded.pop(name, None)
        if change.path is None:
            self._unloaded[name] = None
        if len(self._unloaded) <= self._max_unloaded:
            return None
        oldest = next(iter(self._unloaded))
        del self._unloaded[oldest], self._changes[oldest]
        return oldest
