"""The room of one caller among others: no tenant has so many answers under way that the queue is full for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from manylora.config import SchedulerConfig
from manylora.errors import CapacityError

__all__ = ["CallerRoom", "Places", "room_of_engine"]


def room_of_engine(scheduler: SchedulerConfig) -> int:
    """Return the most answers of one caller on an engine: all that run, and half of those that wait."""
    return scheduler.max_num_seqs + scheduler.max_waiting // 2


class Places:
    """The places of a request's answers; each is given back once, when its answer ends."""

    def __init__(self, counts: Counter[str], full: set[str], caller: str, num: int) -> None:
        self._counts = counts
        self._full = full
        self._caller = caller
        self._num = num
        counts[caller] += num

    def give(self) -> None:
        """Give back the place of an answer that has ended."""
        self._give(min(1, self._num))

    def close(self) -> None:
        """Give back the others."""
        self._give(self._num)

    def _give(self, num: int) -> None:
        self._num -= num
        self._counts[self._caller] -= num
        if num:
            self._full.discard(self._caller)
        if not self._counts[self._caller]:
            del self._counts[self._caller]


class CallerRoom:
    """Counts the answers under way of each caller. For the event loop's thread alone.

    Args:
        num_each: Most answers of a caller on each engine.
        num_engines: Returns the number of engines that serve.
    """

    def __init__(self, num_each: int, num_engines: Callable[[], int]) -> None:
        self._num_each = num_each
        self._num_engines = num_engines
        self._counts: Counter[str] = Counter()
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
        """Take places for the answers of a request, all or none.

        Raises:
            CapacityError: The caller would have too many (429).
        """
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
