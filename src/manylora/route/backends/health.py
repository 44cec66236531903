"""The health of a backend: in or out of rotation, with hysteresis. Pure: told the time and every sign of life.

A backend that streams tokens is alive, whatever its health route answers: polls that fail count only while it sends no
bytes. A request that got no answer (no connection, lost) counts always, and an answered one clears the count. A refusal
(429, 503) is an answer: back-pressure on one request, and no sign about the next. A backend that sent nothing to any
request for a whole time limit is out at once: each such sign takes minutes.

::

    JOINING --good poll--> UP --`fall` failures in a row--> DOWN --`rise` good polls in a row--> UP

A backend that failed on requests while its polls were good is held out, twice as long each time up to a bound. It is in
again once a request of the router's own was answered.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["BackendState", "Health", "HealthPolicy"]

HOLD_S = 2.0
"""First time that a backend is held out after it failed on requests, in seconds."""
MOST_HOLD_S = 60.0


class BackendState(Enum):
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
        self.state = BackendState.JOINING
        self.reason = ""
        self.num_joins = 0
        self._policy = policy
        self._is_warm = is_warm
        self._num_failed_polls = self._num_failed = self._num_good_polls = 0
        self._num_reads_seen = 0
        self._up_since: float | None = None  # None without a slow start
        self._hold_s = 0.0
        self._held_until = 0.0
        self._needs_probe = False

    @property
    def is_up(self) -> bool:
        """Whether it gets requests."""
        return self.state is BackendState.UP

    def poll_succeeded(self, now: float) -> bool:
        """Count a good poll; return whether the backend is in from now on."""
        self._num_failed_polls = 0
        self._num_good_polls += 1
        if self.state is BackendState.UP:
            if self._up_since is not None and now - self._up_since > MOST_HOLD_S:
                self._hold_s = 0.0
            return False
        needed = 1 if self.state is BackendState.JOINING else self._policy.rise
        if self._num_good_polls < needed or self._needs_probe:
            return False
        self._up_since = None if self._is_warm else now
        self._is_warm = False
        self._num_failed = 0
        self.state, self.reason = BackendState.UP, ""
        self.num_joins += 1
        return True

    def poll_failed(self, num_reads: int, reason: str) -> bool:
        """Count a failed poll, unless bytes came since the last one; return whether the backend is lost.

        It is lost again each time that as many polls fail: requests may be tried on a backend that is out.

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
        if self._num_failed_polls < self._policy.fall:
            return False
        self._num_failed_polls = 0
        self._fall(reason)
        return True

    def failed(self, now: float, reason: str) -> bool:
        """Count a request without an answer; return whether the backend is out from now on."""
        self._num_failed += 1
        return self._num_failed >= self._policy.fall and self.stalled(now, reason)

    def stalled(self, now: float, reason: str) -> bool:
        """Take the backend out until a probe is answered; return whether it is out from now on."""
        if not self._fall(reason):
            return False
        self.probe_failed(now)
        return True

    def wants_probe(self, now: float) -> bool:
        """Whether a request must be answered before the backend is in, and may be sent now."""
        return self._needs_probe and now >= self._held_until

    def probe_failed(self, now: float) -> None:
        """Hold the backend out, for longer than before."""
        self._needs_probe = True
        self._hold_s = min(MOST_HOLD_S, max(HOLD_S, 2 * self._hold_s))
        self._held_until = now + self._hold_s

    def answered(self) -> None:
        """Learn that a request or a probe was answered."""
        self._num_failed = 0
        self._needs_probe = False

    def share(self, now: float) -> float:
        """Return the share of its full load that the backend may have, above 0 and up to 1: less in a slow start."""
        if self._up_since is None or self._policy.slow_start_s == 0:
            return 1.0
        share = (now - self._up_since) / self._policy.slow_start_s
        return min(1.0, max(0.02, share))

    def _fall(self, reason: str) -> bool:
        if self.state is not BackendState.UP:
            self.reason = reason
            return False
        self.state, self.reason = BackendState.DOWN, reason
        self._num_good_polls = 0
        return True
