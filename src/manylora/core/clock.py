"""Clocks: the one place where time is read.

The loop asks ``now`` and waits until the next event. On the wall clock that blocks, and ``wake`` ends the wait when a
device or a client has an event; on the virtual clock it jumps. Nothing else differs between serving and simulating.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Protocol

__all__ = ["Clock", "VirtualClock", "WallClock"]


class Clock(Protocol):
    """Seconds from a fixed origin, and a wait that can be ended."""

    def now(self) -> float:
        """Return the current time in seconds."""

    def wait_until(self, deadline: float) -> None:
        """Return at ``deadline`` (may be infinite) or earlier when woken."""

    def wake(self) -> None:
        """End the current or the next wait; safe from any thread."""


class WallClock:
    """Real time: monotonic seconds."""

    def __init__(self) -> None:
        self._woken = threading.Event()

    def now(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic()

    def wait_until(self, deadline: float) -> None:
        """Sleep until ``deadline`` or ``wake``."""
        timeout = None if math.isinf(deadline) else max(0.0, deadline - time.monotonic())
        self._woken.wait(timeout)
        self._woken.clear()

    def wake(self) -> None:
        """End the wait in progress, or the next one."""
        self._woken.set()


class VirtualClock:
    """Simulated time: waiting is free and exact."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now = start_s

    def now(self) -> float:
        """Return virtual seconds."""
        return self._now

    def wait_until(self, deadline: float) -> None:
        """Jump to ``deadline``."""
        assert not math.isinf(deadline), "waiting for ever: no event is pending"
        self._now = max(self._now, deadline)

    def wake(self) -> None:
        """Do nothing: no other thread exists to be woken."""
