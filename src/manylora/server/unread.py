"""Long answers that wait for their clients: together they have a bound, and the slowest readers give way.

A whole answer can have a hundred megabytes (log-probabilities, echoes of long prompts), and a client that takes a
little of it now and then keeps it for hours. So beyond the bound the connection of an answer is broken: of the client
that has most, the one that has waited for longest.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from manylora.server.bounds import MAX_UNREAD_BYTES, SHORT_BODY_BYTES

__all__ = ["UnreadAnswers"]

PATIENCE_S = 10.0
"""Time that every client has, whatever waits."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    caller: str
    num_bytes: int
    since_s: float
    give_up: Callable[[], None]


class UnreadAnswers:
    """The long answers that are made and not taken yet. For the event loop's thread alone.

    Args:
        most_bytes: Most bytes of them; answers that clients have had less than ``PATIENCE_S`` to take come beside.
        now_s: Returns a time in seconds that never steps back.
    """

    def __init__(self, most_bytes: int = MAX_UNREAD_BYTES, now_s: Callable[[], float] = time.monotonic) -> None:
        self._most_bytes = most_bytes
        self._now_s = now_s
        self._held: dict[_Held, None] = {}  # the longest first
        self._bytes_of: Counter[str] = Counter()
        self.num_bytes = 0

    @contextlib.contextmanager
    def hold(self, caller_of: Callable[[], str], num_bytes: int, give_up: Callable[[], None]) -> Iterator[None]:
        """Count an answer while inside.

        Args:
            caller_of: Returns its caller; called if it is long.
            num_bytes: Its length.
            give_up: Breaks its connection.
        """
        if num_bytes <= SHORT_BODY_BYTES:
            yield
            return
        one = _Held(caller_of(), num_bytes, self._now_s(), give_up)
        self._held[one] = None
        self._bytes_of[one.caller] += num_bytes
        self.num_bytes += num_bytes
        self._make_room()
        try:
            yield
        finally:
            self._drop(one)

    def _make_room(self) -> None:
        while self.num_bytes > self._most_bytes:
            caller = max(self._bytes_of, key=self._bytes_of.__getitem__)
            oldest = next(one for one in self._held if one.caller == caller)
            if self._now_s() - oldest.since_s < PATIENCE_S:
                return
            logger.info("answer_given_up num_bytes=%d waited_s=%.0f", oldest.num_bytes, self._now_s() - oldest.since_s)
            self._drop(oldest)
            oldest.give_up()

    def _drop(self, one: _Held) -> None:
        if one in self._held:
            del self._held[one]
            self.num_bytes -= one.num_bytes
            self._bytes_of[one.caller] -= one.num_bytes
            if not self._bytes_of[one.caller]:
                del self._bytes_of[one.caller]
