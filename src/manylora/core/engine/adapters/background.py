"""Background reads: adapters registered without their weights are read while the reader has nothing else to do.

A fault in the weights is then found before the first request, and the first request finds them in host memory. Reads
give way to everything that was demanded: one at a time, only while no load is in flight, only into host memory that is
spare, and while requests are in flight only a small share of the time. A read that is demanded meanwhile has another
reader.
"""

from __future__ import annotations

from collections import deque

from manylora.core.adapters.residency import TierState
from manylora.core.engine.adapters.cache import AdapterCache
from manylora.core.types import AdapterKey, AdapterVersion

__all__ = ["BackgroundReads"]

BUSY_SHARE = 0.05
"""Share of the time that reads may take while requests are in flight: they take processor time and disk from steps."""


class BackgroundReads:
    """Reads versions in order of registration. Times are in seconds."""

    def __init__(self, cache: AdapterCache) -> None:
        self._cache = cache
        self._unread: deque[AdapterKey] = deque()
        self._reading: AdapterKey | None = None
        self._began_at = 0.0
        self._rests_until = 0.0

    @property
    def has_work(self) -> bool:
        """Whether any version may be left to read."""
        return bool(self._unread)

    def add(self, version: AdapterVersion) -> None:
        """Add a version that is on disk."""
        self._unread.append(version.key)

    def launch(self, now: float, *, is_busy: bool) -> None:
        """Start a read if there is nothing else to load; ``is_busy`` says whether requests are in flight."""
        cache = self._cache
        if cache.has_loads:
            return
        if self._reading is not None:
            self._reading = None
            self._rests_until = now + (now - self._began_at) * (1.0 / BUSY_SHARE - 1.0)
        if is_busy and now < self._rests_until:
            return
        while self._unread:
            key = self._unread.popleft()
            if not cache.knows(key) or cache.residency(key).host is not TierState.ABSENT:
                continue
            version = cache.residency(key).version
            if cache.has_spare_host(version):
                cache.read_ahead(version, now)
                self._reading, self._began_at = key, now
                return
