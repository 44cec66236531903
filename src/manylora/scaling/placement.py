"""Which replica is given up, and which adapters a new one holds before it takes requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

__all__ = ["hottest", "least_missed"]


def least_missed(num_in_flight: Mapping[int, int]) -> int:
    """Return the replica with the fewest requests, of equals the last: it is drained soonest."""
    return min(num_in_flight, key=lambda index: (num_in_flight[index], -index))


def hottest(adapters: Iterable[Mapping[str, int]], limit: int) -> list[str]:
    """Return the adapters with the most requests in flight, given the counts at each replica."""
    total: Counter[str] = Counter()
    for counts in adapters:
        total.update(counts)
    return [name for name, _ in total.most_common(limit)]
