"""Lines of the log that clients cause: the first is written at once, and the same ones after it once a second.

A line for each bad request would fill a disk faster than a client fills its connection.
"""

from __future__ import annotations

import asyncio
import logging

__all__ = ["RepeatedLines"]

EVERY_S = 1.0

logger = logging.getLogger(__name__)


class RepeatedLines:
    """Counts of lines by text. For one event loop's thread alone."""

    def __init__(self) -> None:
        self._num_of: dict[str, int] = {}  # since the last line; texts are few, so it is bounded
        self._last_address: dict[str, str] = {}

    def note(self, text: str, address: str) -> None:
        """Write a line now, or count it for the next.

        Args:
            text: One of a few texts, with nothing of the client in it.
            address: The client's; of several the line has the last.
        """
        if text in self._num_of:
            self._num_of[text] += 1
            self._last_address[text] = address
        else:
            self._write(text, address, 1)

    def _write(self, text: str, address: str, num: int) -> None:
        logger.info("%s num=%d address=%s", text, num, address)
        self._num_of[text] = 0
        asyncio.get_running_loop().call_later(EVERY_S, self._end_interval, text)

    def _end_interval(self, text: str) -> None:
        if num := self._num_of.pop(text):
            self._write(text, self._last_address[text], num)
