"""Find stop strings in text that arrives in pieces, and hold back no more than could become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["StopMatch", "StopStrings"]


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that was found.

    Args:
        stop: Which.
        before: The text in front of it that was not released yet.
    """

    stop: str
    before: str


class StopStrings:
    """Watch a text for the stop string that completes first (of those that complete together, the longest).

    That rule does not depend on how the text is cut into pieces. Text is released as soon as no continuation can
    make it part of a stop string::

        ... released | held = the longest end of the text that begins a stop string

    Args:
        stops: The stop strings, none empty; may be none.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def feed(self, text: str) -> str | StopMatch:
        """Take the next piece; return what can be released, or the match that ends the text."""
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
        """Release what is held: the text is over."""
        held, self._held = self._held, ""
        return held

    def _length_to_hold(self, text: str) -> int:
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
