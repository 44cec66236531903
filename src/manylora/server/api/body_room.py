"""Memory for bodies that arrive: thousands of clients that each send a megabyte, slowly, must not take it all."""

from __future__ import annotations

from manylora.server.bounds import MAX_BODIES_BYTES
from manylora.server.errors import HttpError

__all__ = ["BodyRoom"]


class BodyRoom:
    """The bytes of long bodies that have arrived and were not parsed yet.

    Args:
        most_bytes: Most of them. One body alone may be longer, as far as its own bound goes.
    """

    def __init__(self, most_bytes: int = MAX_BODIES_BYTES) -> None:
        self._most_bytes = most_bytes
        self.num_bytes = 0

    def take(self, num_bytes: int, held: int) -> None:
        """Count more bytes of a body, which holds ``held`` already.

        Raises:
            HttpError: 503, with ``Retry-After``: the other bodies leave no room.
        """
        if self.num_bytes > held and self.num_bytes + num_bytes > self._most_bytes:
            raise HttpError(
                503,
                "The server has as many long bodies as it takes; please try again.",
                headers={"Retry-After": "1", "Connection": "close"},
            )
        self.num_bytes += num_bytes

    def give(self, num_bytes: int) -> None:
        """Count the end of a body."""
        self.num_bytes -= num_bytes
