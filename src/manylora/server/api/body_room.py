"""Memory for bodies that arrive: thousands of clients that each send a megabyte, slowly, must not take it all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from manylora.server.bounds import MAX_BODIES_BYTES, SHORT_BODY_BYTES
from manylora.server.errors import HttpError

__all__ = ["ArrivingBody", "BodyRoom"]


class BodyRoom:
    """The bytes of long bodies, and of each caller's.

    A caller may have as many as would still be free: one alone has half of the room, two have a third each. So there is
    room for one more caller, whatever the others send.

    Args:
        most_bytes: Most of them. One body alone may be longer, as far as its own bound goes.
    """

    def __init__(self, most_bytes: int = MAX_BODIES_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes_of: Counter[str] = Counter()
        self.num_bytes = 0

    def enter(self, caller_of: Callable[[], str]) -> ArrivingBody:
        """Return a body that begins to arrive.

        Args:
            caller_of: Returns its caller; called if the body is long.
        """
        return ArrivingBody(self, caller_of)

    def take(self, caller: str, num_bytes: int, held: int) -> None:
        """Count more bytes of a body, which holds ``held`` already.

        Raises:
            HttpError: 429, with ``Retry-After``: the other bodies leave no room.
        """
        is_alone = self.num_bytes == held
        if not is_alone and self._bytes_of[caller] + num_bytes > self._most_bytes - self.num_bytes - num_bytes:
            raise HttpError(
                429,
                "The server has as many long bodies as it takes; please try again.",
                headers={"Retry-After": "1"},  # no "close": the rest is read and dropped, so the client sees this
            )
        self._bytes_of[caller] += num_bytes
        self.num_bytes += num_bytes

    def give(self, caller: str, num_bytes: int) -> None:
        """Count the end of a body."""
        self.num_bytes -= num_bytes
        self._bytes_of[caller] -= num_bytes
        if not self._bytes_of[caller]:
            del self._bytes_of[caller]


class ArrivingBody:
    """One body; counted from the part on that makes it long, until it is closed."""

    def __init__(self, room: BodyRoom, caller_of: Callable[[], str]) -> None:
        self._room = room
        self._caller_of = caller_of
        self._caller = ""
        self._held = 0

    def grow(self, num_bytes: int) -> None:
        """Count up to ``num_bytes`` of it; errors as of ``BodyRoom.take``."""
        if num_bytes > SHORT_BODY_BYTES:
            if not self._held:
                self._caller = self._caller_of()
            self._room.take(self._caller, num_bytes - self._held, self._held)
            self._held = num_bytes

    def close(self) -> None:
        """Count it no more."""
        if self._held:
            self._room.give(self._caller, self._held)
            self._held = 0
