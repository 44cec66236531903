"""Stop strings in text that arrives in pieces; only a possible beginning of one is held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["StopMatch", "StopStrings"]


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that was found, and the text before it that was not released yet."""

    stop: str
    before: str


class StopStrings:
    """Find the stop string that completes first (of those that complete together, the longest).

    That rule does not depend on the cuts between pieces. Text is released as soon as no continuation can make it part
    of a stop string::

        ... released | held = the longest end of the text that begins a stop string

    Args:
        stops: The stop strings, none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def feed(self, text: str) -> str | StopMatch:
        """Add the next piece; return the text to release, or the match that ends it."""
        if not self._stops:
            return text
        text = self._held + text
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            _, at, stop = min(ends)
            self._held = ""
            return StopMatch(stop=stop, before=text[:at])
        keep = self._length_to_hold(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Release the held text: no piece follows."""
        held, self._held = self._held, ""
        return held

    def _length_to_hold(self, text: str) -> int:
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
