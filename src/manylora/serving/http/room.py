"""Room of callers: bounds on the answers under way, the bodies that arrive, and the answers that wait to be read.

* No tenant has so many answers under way that the queue is full for all.
* Thousands of clients that each send a megabyte, slowly, do not take all memory.
* Long answers that wait for their clients have a bound together. A whole answer can have a hundred megabytes
  (log-probabilities, echoes of long prompts), and a client that takes a little of it now and then keeps it for hours.
  So beyond the bound the connection of an answer is broken: of the client that has most, the one that has waited for
  longest.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from manylora.core.config import SchedulerConfig
from manylora.core.errors import CapacityError
from manylora.serving.http.errors import HttpError

__all__ = [
    "SHORT_BODY_BYTES",
    "ArrivingBody",
    "BodyRoom",
    "CallerRoom",
    "Places",
    "WaitingAnswers",
    "default_body_bytes",
    "room_of_engine",
]

MAX_BODIES_BYTES = 256 << 20
"""Bytes of all bodies longer than ``SHORT_BODY_BYTES`` that arrive at a time; beyond them a body alone is taken."""

MAX_WAITING_BYTES = 256 << 20
"""Bytes of all long answers that wait for their clients; beyond them the slowest readers are left."""

SHORT_BODY_BYTES = 64 * 1024  # a body up to this is taken whatever else arrives: connections bound these

LEAST_BODY_BYTES = 1 << 20
BODY_BYTES_PER_TOKEN = 16  # a token is about four bytes of text, eight as an id, and six or twelve as an escape in JSON
READ_WITHIN_S = 10.0  # time that every client has to read its answer, whatever waits

logger = logging.getLogger(__name__)


def default_body_bytes(max_model_len: int) -> int:
    """Return the largest body by default: room for a full context in any notation, and for batches of short prompts."""
    return max(LEAST_BODY_BYTES, BODY_BYTES_PER_TOKEN * max_model_len)


def room_of_engine(scheduler: SchedulerConfig) -> int:
    """Return the most answers of one caller on an engine: all that run, and half of those that wait."""
    return scheduler.max_num_seqs + scheduler.max_waiting // 2


class _Counts(Counter[str]):
    """Numbers by caller; a caller with none is forgotten."""

    def add(self, caller: str, num: int) -> None:
        """Add a number, which may be negative."""
        self[caller] += num
        if not self[caller]:
            del self[caller]


class Places:
    """The places of a request's answers; each is given back once, when its answer ends."""

    def __init__(self, counts: _Counts, full: set[str], caller: str, num: int) -> None:
        self._counts = counts
        self._full = full
        self._caller = caller
        self._num = num
        counts.add(caller, num)

    def give(self) -> None:
        """Give back the place of an answer that has ended."""
        self._give(min(1, self._num))

    def close(self) -> None:
        """Give back the others."""
        self._give(self._num)

    def _give(self, num: int) -> None:
        if num:
            self._num -= num
            self._counts.add(self._caller, -num)
            self._full.discard(self._caller)


class CallerRoom:
    """Counts the answers under way of each caller. For the event loop's thread alone."""

    def __init__(self, num_each: int, num_engines: Callable[[], int]) -> None:
        self._num_each = num_each
        self._num_engines = num_engines
        self._counts = _Counts()
        self._full: set[str] = set()  # those that have taken their last place, and have given none back since

    @property
    def is_any_full(self) -> bool:
        """Whether a caller may have no place left, so that each is to be checked."""
        return bool(self._full)

    def check(self, caller: str) -> None:
        """Raise ``CapacityError`` (429) if a caller has no place left, at next to no cost."""
        if caller in self._full:
            self._check(caller, 1)

    def take(self, caller: str, num: int) -> Places:
        """Take places for the answers of a request, all or none; ``CapacityError`` (429) if they are too many."""
        if self._check(caller, num) == 0:
            self._full.add(caller)
        return Places(self._counts, self._full, caller, num)

    def _check(self, caller: str, num: int) -> int:
        """Return the places that are left to a caller after ``num`` more; errors as of ``take``."""
        most = self._num_each * max(1, self._num_engines())
        held = self._counts.get(caller, 0)
        if held + num > most:
            raise CapacityError(
                f"This caller has {held} answers under way and asks for {num} more, of {most} at most: "
                "try again when some have ended"
            )
        return most - held - num


class BodyRoom:
    """The bytes of long bodies, and of each caller's.

    A caller may have as many as would still be free: one alone has half of the room, two have a third each. So there is
    room for one more caller, whatever the others send. One body alone may be longer than all the room, as far as its
    own bound goes.
    """

    def __init__(self, most_bytes: int = MAX_BODIES_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes_of = _Counts()
        self.num_bytes = 0

    def enter(self, caller_of: Callable[[], str]) -> ArrivingBody:
        """Return a body that begins to arrive; its caller is asked for if it is long."""
        return ArrivingBody(self, caller_of)

    def take(self, caller: str, num_bytes: int, held: int) -> None:
        """Count more bytes of a body, which holds ``held`` already; ``HttpError`` (429) if others leave no room."""
        is_alone = self.num_bytes == held
        if not is_alone and self._bytes_of[caller] + num_bytes > self._most_bytes - self.num_bytes - num_bytes:
            raise HttpError(
                429,
                "The server has as many long bodies as it takes; please try again.",
                headers={"Retry-After": "1"},  # no "close": the rest is read and dropped, so the client sees this
            )
        self.count(caller, num_bytes)

    def count(self, caller: str, num_bytes: int) -> None:
        """Add the bytes of a body that arrived; a negative number when a body has ended."""
        self._bytes_of.add(caller, num_bytes)
        self.num_bytes += num_bytes


class ArrivingBody:
    """One body; counted from the part on that makes it long, until it is closed."""

    def __init__(self, room: BodyRoom, caller_of: Callable[[], str]) -> None:
        self._room = room
        self._caller_of = caller_of
        self._caller = ""
        self._held = 0

    def grow(self, num_bytes: int) -> None:
        """Count up to ``num_bytes`` of it; ``HttpError`` (429) if the other bodies leave no room."""
        if num_bytes > SHORT_BODY_BYTES:
            if not self._held:
                self._caller = self._caller_of()
            self._room.take(self._caller, num_bytes - self._held, self._held)
            self._held = num_bytes

    def close(self) -> None:
        """Count the bytes of the body no more."""
        if self._held:
            self._room.count(self._caller, -self._held)
            self._held = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    caller: str
    num_bytes: int
    since_s: float
    break_off: Callable[[], None]


class WaitingAnswers:
    """The long answers that are made and not taken yet. For the event loop's thread alone.

    Answers that clients have had less than ``READ_WITHIN_S`` to take come beside ``most_bytes``.
    """

    def __init__(self, most_bytes: int = MAX_WAITING_BYTES, now_s: Callable[[], float] = time.monotonic) -> None:
        self._most_bytes = most_bytes
        self._now_s = now_s
        self._held: dict[_Held, None] = {}  # the longest first
        self._bytes_of = _Counts()
        self.num_bytes = 0

    @contextlib.contextmanager
    def hold(self, caller_of: Callable[[], str], num_bytes: int, break_off: Callable[[], None]) -> Iterator[None]:
        """Count an answer while inside; ``caller_of`` is called if it is long, ``break_off`` breaks its connection."""
        if num_bytes <= SHORT_BODY_BYTES:
            yield
            return
        one = _Held(caller_of(), num_bytes, self._now_s(), break_off)
        self._held[one] = None
        self._count(one, num_bytes)
        self._make_room()
        try:
            yield
        finally:
            self._drop(one)

    def _make_room(self) -> None:
        while self.num_bytes > self._most_bytes:
            caller = max(self._bytes_of, key=self._bytes_of.__getitem__)
            oldest = next(one for one in self._held if one.caller == caller)
            if (waited_s := self._now_s() - oldest.since_s) < READ_WITHIN_S:
                return
            logger.info("answer_given_up num_bytes=%d waited_s=%.0f", oldest.num_bytes, waited_s)
            self._drop(oldest)
            oldest.break_off()

    def _drop(self, one: _Held) -> None:
        if one in self._held:
            del self._held[one]
            self._count(one, -one.num_bytes)

    def _count(self, one: _Held, num_bytes: int) -> None:
        self._bytes_of.add(one.caller, num_bytes)
        self.num_bytes += num_bytes
