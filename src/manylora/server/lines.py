"""Lines of callers: each keeps its own order, and the callers take turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ["Lines"]

T = TypeVar("T")


class Lines(Generic[T]):
    """Items that wait, by caller; false if none does. To put and to take one costs the same however many wait."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[T]] = {}  # none empty; that of the next turn first

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __iter__(self) -> Iterator[T]:
        """Iterate over all that wait, line by line."""
        return (one for line in self._lines.values() for one in line)

    def num_of(self, caller: str) -> int:
        """Return how many wait in a caller's line."""
        return len(self._lines.get(caller, ()))

    def put(self, caller: str, one: T) -> None:
        """Let one wait at the end of its caller's line."""
        self._lines.setdefault(caller, deque()).append(one)

    def take(self) -> tuple[str, T]:
        """Return the next one and its caller, whose next turn comes after that of every other.

        Raises:
            StopIteration: None waits.
        """
        caller = next(iter(self._lines))
        line = self._lines.pop(caller)
        one = line.popleft()
        if line:
            self._lines[caller] = line
        return caller, one

    def remove(self, caller: str, one: T) -> None:
        """Let one leave that waits in its caller's line."""
        line = self._lines[caller]
        line.remove(one)
        if not line:
            del self._lines[caller]

    def clear(self) -> None:
        """Let all leave."""
        self._lines.clear()
