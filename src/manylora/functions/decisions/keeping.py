"""How long an idle device is kept, and how many are opened: by rent against the waiting that they save.

A device that is kept ready costs its rent each second. Letting it go costs its next request a cold start. With a price
for a request's second of waiting, both are dollars, and a cold start is worth ``even_s`` seconds of rent::

    even_s = seconds of the cold start * price of a second of waiting / rent of a second

Without knowledge of the next request, keeping for ``even_s`` costs at most twice what the best choice in hindsight does
(ski rental). With the idle times seen so far the best time is the one that would have cost least over them, which is
none where gaps are longer than the rent is worth, and more than ``even_s`` where nearly all gaps end soon after it.

Source: the histogram of idle times is that of Shahrad et al., ATC '20, with a price in place of percentiles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

__all__ = ["IdleGaps", "num_devices_worth"]

NUM_GAPS = 64  # idle times that are remembered
LEAST_GAPS = 4  # idle times before which the history says too little

MOST_EVENS = 4.0
"""Longest time that a device is kept, in multiples of ``even_s``: the history may mislead by so much at most."""


class IdleGaps:
    """The idle times of a device, from the end of its last request to the next one, whether or not it was kept."""

    def __init__(self) -> None:
        self.since: float | None = None
        self._gaps: deque[float] = deque(maxlen=NUM_GAPS)

    def note(self, gap_s: float) -> None:
        """Note an idle time that has ended."""
        self._gaps.append(gap_s)

    def end(self, now: float) -> None:
        """Note that the device is in use: its idle time has ended, if one had begun at ``since``."""
        if self.since is not None:
            self.note(now - self.since)
            self.since = None

    def keep_s(self, even_s: float) -> float:
        """Return how long a device is kept when it becomes idle; a cold start is worth ``even_s`` seconds of rent."""
        gaps = sorted(self._gaps)
        if len(gaps) < LEAST_GAPS:
            return even_s
        best_s, least = 0.0, len(gaps) * even_s  # let go at once: every gap ends with a cold start
        rent = 0.0
        for index, gap in enumerate(gaps):
            if gap > MOST_EVENS * even_s:
                break
            rent += gap
            later = len(gaps) - index - 1
            cost = rent + later * (gap + even_s)
            if cost <= least:
                best_s, least = gap, cost
        return min(1.1 * best_s, MOST_EVENS * even_s)  # gaps like the longest that is worth it, not only shorter ones


def num_devices_worth(busy_shares: Sequence[float], requests_per_s: float, even_s: float) -> int:
    """Return how many devices of one backbone are worth their rent at the load that is expected of all functions.

    One more is worth it while the requests that find all others busy are more than one in ``even_s`` seconds. A
    function's requests join its own batch, so the busy devices are the busy functions, which are taken to be
    independent; each is busy for a share of the time.
    """
    chances = [1.0]  # of so many functions that run
    for share in busy_shares:
        chances = [
            stay * (1.0 - share) + come * share for stay, come in zip([*chances, 0.0], [0.0, *chances], strict=True)
        ]
    found_busy, num = 1.0, 0
    while num < len(busy_shares) and requests_per_s * found_busy * even_s > 1.0:
        found_busy -= chances[num]
        num += 1
    return num
