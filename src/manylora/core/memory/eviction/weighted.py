"""Chameleon's score: a weighted sum of frequency, recency and size, lowest first.

::

    score = F * uses / most uses of any adapter  +  R * (1 - idle / window)  +  S * pages / most pages of any adapter
                (both within the window)                (0 beyond the window)       (seen so far)

The paper says "within a specific time frame" and gives neither its length nor the normalisation. Here the window is
five minutes (the paper's period for other refreshes), and each term lies in [0, 1]: frequency relative to the most used
adapter in the window, recency to the window, size to the largest adapter seen. These do not depend on the set of idle
adapters, so dropping one adapter changes no other's score.

Large adapters score high as in the paper (a miss costs more): the score is per adapter, not per byte.

Source: Chameleon, section 4.2, "Cost-Aware Eviction Policy"; ``fair`` is its ablation with equal weights (fig. 17).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable

from manylora.core.memory.eviction.policy import IdleItem
from manylora.core.types import AdapterKey

__all__ = ["WINDOW_S", "WeightedScore"]

WINDOW_S = 300.0


class WeightedScore:
    """Frequency, recency and size, with the weights F, R and S."""

    def __init__(self, frequency: float, recency: float, size: float, *, window_s: float = WINDOW_S) -> None:
        self._weights = (frequency, recency, size)
        self._window_s = window_s
        self._recent: deque[tuple[float, AdapterKey]] = deque()  # uses in the window, oldest first
        self._num_uses: dict[AdapterKey, int] = {}
        self._num_with: dict[int, int] = {}  # number of uses -> adapters that have as many
        self._most_uses = 0
        self._most_pages = 1
        self._moved: dict[AdapterKey, None] = {}

    def used(self, key: AdapterKey, now: float) -> None:
        """Count a use."""
        self._recent.append((now, key))
        self._change(key, 1)

    def forget(self, key: AdapterKey) -> None:
        """Remove its uses."""
        if key in self._num_uses:
            self._recent = deque(use for use in self._recent if use[1] != key)
            self._change(key, -self._num_uses[key])
        self._moved.pop(key, None)

    def evicted(self, item: IdleItem) -> None:
        """Do nothing: uses of an adapter that is reloaded still count."""

    def place(self, item: IdleItem) -> tuple[Hashable, float]:
        """Group adapters that differ only in age."""
        assert isinstance(item.key, str)
        self._most_pages = max(self._most_pages, item.num_pages)
        return (self._num_uses.get(item.key, 0), item.num_pages), item.idle_since

    def moved(self, now: float) -> Iterable[AdapterKey]:
        """Return the adapters whose number of uses in the window has changed."""
        while self._recent and self._recent[0][0] < now - self._window_s:
            self._change(self._recent.popleft()[1], -1)
        moved, self._moved = self._moved, {}
        return moved

    def worth(self, item: IdleItem, now: float) -> float:
        """Return F * frequency + R * recency + S * size, each in [0, 1]."""
        assert isinstance(item.key, str)
        frequency, recency, size = self._weights
        uses = self._num_uses.get(item.key, 0) / max(1, self._most_uses)
        freshness = max(0.0, 1.0 - (now - item.idle_since) / self._window_s)
        return frequency * uses + recency * freshness + size * item.num_pages / self._most_pages

    def _change(self, key: AdapterKey, by: int) -> None:
        """Change a count and update the largest, which changes by one except when an adapter is forgotten."""
        old = self._num_uses.pop(key, 0)
        new = old + by
        if old:
            self._num_with[old] -= 1
        if new:
            self._num_uses[key] = new
            self._num_with[new] = self._num_with.get(new, 0) + 1
        self._most_uses = max(self._most_uses, new)
        while self._most_uses and not self._num_with.get(self._most_uses):
            self._num_with.pop(self._most_uses, None)
            self._most_uses -= 1
        self._moved[key] = None
