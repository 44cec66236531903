"""Batches of requests for isolated functions: full or expired, the most urgent first. Told the time.

A function cannot share a step with another one, so requests wait a little to share a step with their own kind. A batch
leaves when it is full, or when its oldest request must start to be answered in time.

Source: ServerlessLoRA, section 4.2, equations 2 to 5. Equation 3 as printed uses N both for the requests that have
arrived and for the cap, and ignores the time that the oldest one has waited; here N is what has arrived, the cap is the
largest batch within the objective, and waiting counts from the oldest arrival. With M batches on a device, all times
are M times as long (equation 4).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from manylora.core.errors import ConfigError

__all__ = [
    "BatchTimes",
    "BatchWindow",
    "FirstTokenFit",
    "FirstTokenTime",
    "FixedWindow",
    "RequestRate",
    "Window",
    "deadline_margin_s",
    "most_urgent",
]

T = TypeVar("T")

RATE_WINDOW_S = 60.0  # seconds after which a request counts by 1/e in the rate of its function
FADE = 0.9  # weight that earlier batches keep at each new one, in the times that are learnt


@dataclass(frozen=True, slots=True)
class FirstTokenTime:
    """Time to the first token of a batch that has the device to itself: ``single_s + each_s * (size - 1)``."""

    single_s: float  # time for one request, in seconds
    each_s: float  # time that every further one adds

    def __post_init__(self) -> None:
        if self.single_s <= 0.0 or self.each_s < 0.0:
            raise ConfigError(f"Got {self}, expected a positive time for one request and no negative one for others")

    def of(self, size: int, num_batches: int = 1) -> float:
        """Return the time of a batch of ``size``, one of ``num_batches`` on its device, in seconds."""
        return num_batches * (self.single_s + self.each_s * (size - 1))

    def largest_batch(self, objective_s: float, num_batches: int = 1) -> int:
        """Return the most requests that are answered within ``objective_s``; at least 1, for one must be served."""
        spare = objective_s / num_batches - self.single_s
        if spare < 0.0:
            return 1
        return 1 + math.floor(spare / self.each_s) if self.each_s else 2**31


@dataclass(frozen=True, slots=True)
class BatchWindow:
    """The rule of one function: when its waiting requests leave as a batch."""

    time: FirstTokenTime
    objective_s: float  # its objective for the first token, in seconds
    cap: int  # most requests in a batch, whatever the objective allows; the memory for their KV sets it
    # Share of the spare time that a batch waits while it would have the device to itself: 1 is equation 3, with 0 it
    # leaves for an idle device at once.
    wait_share: float = 1.0
    # The same on a busy device; 0 where later requests join the batch, so that none is worth waiting for.
    busy_share: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= min(self.wait_share, self.busy_share) <= max(self.wait_share, self.busy_share) <= 1.0:
            raise ConfigError(f"Got {self.wait_share = }, {self.busy_share = }, expected shares from 0 to 1")

    def size_limit(self, num_batches: int = 1) -> int:
        """Return the size at which a batch is full."""
        return min(self.cap, self.time.largest_batch(self.objective_s, num_batches))

    def leaves_at(self, oldest_at: float, size: int, now: float, num_batches: int = 1) -> float:
        """Return the time at which ``size`` waiting requests leave, the oldest of which arrived at ``oldest_at``.

        Never earlier than ``now``. With every arrival the time comes nearer, since a larger batch takes longer.
        """
        if size >= self.size_limit(num_batches):
            return now
        spare_s = self.objective_s - self.time.of(size, num_batches)
        return max(now, oldest_at + (self.wait_share if num_batches == 1 else self.busy_share) * spare_s)


@dataclass(frozen=True, slots=True)
class FixedWindow:
    """A batch of a fixed size that waits a fixed time, whatever the objective: the rule to compare with."""

    time: FirstTokenTime
    objective_s: float  # its objective for the first token, in seconds
    size: int  # requests of a full batch
    delay_s: float  # longest wait of the oldest request

    def size_limit(self, num_batches: int = 1) -> int:
        """Return the size at which a batch is full."""
        return self.size

    def leaves_at(self, oldest_at: float, size: int, now: float, num_batches: int = 1) -> float:
        """Return the time at which ``size`` waiting requests leave, the oldest of which arrived at ``oldest_at``."""
        return now if size >= self.size else max(now, oldest_at + self.delay_s)


Window: TypeAlias = BatchWindow | FixedWindow  # says when the waiting requests of a function leave as a batch


def deadline_margin_s(window: Window, oldest_at: float, size: int, now: float, num_batches: int = 1) -> float:
    """Return the time that is left before a batch must start to be answered within its objective (equation 5)."""
    return window.objective_s - (now - oldest_at) - window.time.of(size, num_batches)


def most_urgent(margins: Iterable[tuple[float, T]]) -> list[T]:
    """Return the owners of margins, the least margin first; ties stay in the order given."""
    return [one for _, one in sorted(margins, key=lambda pair: pair[0])]


class FirstTokenFit:
    """Learns ``FirstTokenTime`` from batches: least squares of time over size, in which old batches fade.

    The ``first`` times hold until batches have been seen.
    """

    def __init__(self, first: FirstTokenTime) -> None:
        self.time = first
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # of the weight, x, y, xx, xy

    def observe(self, size: int, took_s: float) -> None:
        """Take a batch of ``size`` into account, whose last first token came after ``took_s`` seconds."""
        x = size - 1
        new = (1.0, x, took_s, x * x, x * took_s)
        self._sums = (weight, sum_x, sum_y, sum_xx, sum_xy) = tuple(  # type: ignore[assignment]
            FADE * old + one for old, one in zip(self._sums, new, strict=True)
        )
        spread = weight * sum_xx - sum_x * sum_x
        each_s = self.time.each_s
        if spread > 1e-6 * weight * weight:
            each_s = max(0.0, (weight * sum_xy - sum_x * sum_y) / spread)
        self.time = FirstTokenTime(max(1e-4, (sum_y - each_s * sum_x) / weight), each_s)


FIRST_GUESS = FirstTokenTime(single_s=0.1, each_s=0.02)


class BatchTimes:
    """Times the batches of a function, from their leaving to the last of their first tokens, and learns from them."""

    def __init__(self, objective_s: float, cap: int) -> None:
        self._objective_s = objective_s
        self._cap = cap
        self._fit = FirstTokenFit(FIRST_GUESS)
        self._batch: tuple[float, int, int, int] | None = None  # begun at, size, first tokens to come, batches
        self._is_first = True

    @property
    def window(self) -> BatchWindow:
        """The rule by which waiting requests leave."""
        return BatchWindow(self._fit.time, self._objective_s, self._cap)

    def begin(self, now: float, size: int, num_batches: int) -> None:
        """Note that a batch leaves for an engine that works on no other request."""
        self._batch = now, size, size, num_batches

    def note(self, now: float, num_first_tokens: int, num_without: int = 0) -> float | None:
        """Note first tokens; return the time of the batch if it has them all now and is the first of a process.

        Once requests end ``num_without`` it is not timed: its last first token would be that of a later request.
        """
        if num_without:
            self._batch = None
        if self._batch is None:
            return None
        begun_at, size, left, num_batches = self._batch
        if left > num_first_tokens:
            self._batch = begun_at, size, left - num_first_tokens, num_batches
            return None
        self._batch = None
        took_s = now - begun_at
        if self._is_first:  # it reads the adapter's weights as well, and says little of the next
            self._is_first = False
            return took_s
        self._fit.observe(size, took_s / num_batches)
        return None

    def restart(self) -> None:
        """Note that the process has ended."""
        self._batch, self._is_first = None, True


class RequestRate:
    """Requests per second: an average in which old requests fade."""

    def __init__(self) -> None:
        self._at = 0.0
        self._count = 0.0

    def note(self, now: float, num_requests: int = 1) -> None:
        """Count requests."""
        self._count = self._faded(now) + num_requests
        self._at = now

    def per_s(self, now: float) -> float:
        """Return the rate; less than a request in ten thousand windows is none."""
        count = self._faded(now)
        return count / RATE_WINDOW_S if count > 1e-4 else 0.0

    def _faded(self, now: float) -> float:
        return self._count * math.exp(-max(0.0, now - self._at) / RATE_WINDOW_S)
