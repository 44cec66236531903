"""The health of a backend: in or out of rotation, with hysteresis. Pure: told the time and every sign of life.

A backend that streams tokens is alive, whatever its health route answers: polls that fail count only while it sends no
bytes. A refused request (no connection, 503) counts always, because it says that new requests are not taken, and an
answered one clears the count.

::

    JOINING --good poll--> UP --`fall` failures in a row--> DOWN --`rise` good polls in a row--> UP

A backend that was refusing requests while its polls were good stays out for a hold time, twice as long each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Health", "HealthPolicy", "State"]

HOLD_S = 2.0
"""First time that a backend is held out after it refused requests, in seconds."""
MOST_HOLD_S = 60.0


class State(Enum):
    """Whether a backend gets requests."""

    JOINING = "joining"
    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthPolicy:
    """When a backend is out and in; see ``ProxyConfig``."""

    fall: int = 3
    rise: int = 2
    slow_start_s: float = 10.0


class Health:
    """The state of one backend; ``num_joins`` counts the times that it came in.

    Args:
        policy: Its limits.
        is_warm: Whether its first requests need no slow start, as when the router itself starts.
    """

    def __init__(self, policy: HealthPolicy, *, is_warm: bool) -> None:
        self.state = State.JOINING
        self.reason = ""
        self.num_joins = 0
        self._policy = policy
        self._is_warm = is_warm
        self._num_failed_polls = self._num_refused = self._num_good_polls = 0
        self._num_reads_seen = 0
        self._up_since: float | None = None  # None without a slow start
        self._hold_s = 0.0
        self._held_until = 0.0

    @property
    def is_up(self) -> bool:
        """Whether it gets requests."""
        return self.state is State.UP

    def poll_succeeded(self, now: float) -> bool:
        """Count a good poll; return whether the backend is in from now on."""
        self._num_failed_polls = 0
        self._num_good_polls += 1
        if self.state is State.UP:
            if self._up_since is not None and now - self._up_since > MOST_HOLD_S:
                self._hold_s = 0.0
            return False
        needed = 1 if self.state is State.JOINING else self._policy.rise
        if self._num_good_polls < needed or now < self._held_until:
            return False
        self._up_since = None if self._is_warm else now
        self._is_warm = False
        self._num_refused = 0
        self.state, self.reason = State.UP, ""
        self.num_joins += 1
        return True

    def poll_failed(self, num_reads: int, reason: str) -> bool:
        """Count a failed poll, unless bytes came since the last one; return whether the backend is out from now on.

        Args:
            num_reads: Reads from this backend so far, of all its answers.
            reason: For logs and ``/status``.
        """
        self._num_good_polls = 0
        self._is_warm = False
        if num_reads != self._num_reads_seen:
            self._num_reads_seen = num_reads
            self._num_failed_polls = 0
            return False
        self._num_failed_polls += 1
        return self._num_failed_polls >= self._policy.fall and self._fall(reason)

    def refused(self, now: float, reason: str) -> bool:
        """Count a request that the backend did not take; return whether it is out from now on."""
        self._num_refused += 1
        if self._num_refused < self._policy.fall or not self._fall(reason):
            return False
        self._hold_s = min(MOST_HOLD_S, max(HOLD_S, 2 * self._hold_s))
        self._held_until = now + self._hold_s
        return True

    def answered(self) -> None:
        """Learn that a request was answered."""
        self._num_refused = 0

    def share(self, now: float) -> float:
        """Return the share of its full load that the backend may have, above 0 and up to 1: less in a slow start."""
        if self._up_since is None or self._policy.slow_start_s == 0:
            return 1.0
        share = (now - self._up_since) / self._policy.slow_start_s
        return min(1.0, max(0.02, share))

    def _fall(self, reason: str) -> bool:
        if self.state is not State.UP:
            self.reason = reason
            return False
        self.state, self.reason = State.DOWN, reason
        self._num_good_polls = 0
        return True
