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


class _StopProgress:
    """The longest beginning of one stop string that the text so far ends with.

    Knuth, Morris and Pratt's automaton. After a character that does not fit, it falls back to the longest end of the
    beginning that begins the string too *and goes on with another character*, so that a character costs
    logarithmically many steps in the worst case, also for a string of one repeated character. The table of fallbacks
    grows as far as the text has matched: a long string costs nothing at first.
    """

    __slots__ = ("_border", "_fallbacks", "length", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._fallbacks = [-1]  # of each beginning; -1 for none, not even the empty one
        self._border = 0  # longest end of the last beginning in the table that begins the string; of the first, none

    def add(self, char: str) -> bool:
        """Add a character of the text; return whether the string is complete."""
        stop, fallbacks, length = self.stop, self._fallbacks, self.length
        while length >= 0 and stop[length] != char:
            length = fallbacks[length]
        self.length = length = length + 1
        if length == len(stop):
            return True
        if length == len(fallbacks):
            self._extend(length)
        return False

    def _extend(self, length: int) -> None:
        """Add the fallback of ``stop[:length]``, the first beginning that has none."""
        stop, fallbacks, border = self.stop, self._fallbacks, self._border
        char = stop[length]
        fallbacks.append(fallbacks[border] if stop[border] == char else border)
        while border >= 0 and stop[border] != char:
            border = fallbacks[border]
        self._border = border + 1


class StopStrings:
    """Find the stop string that completes first (of those that complete together, the longest).

    That rule does not depend on the cuts between pieces. Text is released as soon as no continuation can make it part
    of a stop string::

        ... released | held = the longest end of the text that begins a stop string

    Args:
        stops: The stop strings, none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._all = [_StopProgress(stop) for stop in stops]
        self._firsts = frozenset(stop[0] for stop in stops)
        self._held = ""

    def feed(self, text: str) -> str | StopMatch:
        """Add the next piece; return the text to release, or the match that ends it."""
        if not self._held and self._firsts.isdisjoint(text):  # the usual case
            return text
        begin = len(self._held)
        text = self._held + text
        for at in range(begin, len(text)):
            char, found = text[at], ""
            for progress in self._all:
                if progress.add(char) and len(progress.stop) > len(found):
                    found = progress.stop
            if found:
                self._held = ""
                return StopMatch(stop=found, before=text[: at + 1 - len(found)])
        keep = max((progress.length for progress in self._all), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Release the held text: no piece follows."""
        held, self._held = self._held, ""
        return held
