"""The plan of queues: their number, cut-offs and quotas, made again every few minutes from recent requests.

Before the first hundred requests there is one queue with all tokens. The first plan rests on few requests, and on the
durations of short requests only, so it is made again each time the number of requests doubles, until the regular time.

Source: Chameleon, sections 4.3.4 and 4.3.5; the static plan is the baseline of section 5.4.5.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from manylora.core.scheduling.policies.chameleon.clustering import choose, cluster, cut_offs
from manylora.core.scheduling.policies.chameleon.quota import QueueLoad, in_proportion, share_out
from manylora.core.scheduling.policies.request_size import Demand, RequestSizer

__all__ = ["QueuePlan", "RequestHistory", "plan_queues", "plan_static"]

MAX_QUEUES = 4
FIRST_PLAN_AFTER = 100
SLO_FACTOR = 5.0
WINDOW = 2048


@dataclass(frozen=True, slots=True)
class QueuePlan:
    """Queues in order of size."""

    cut_offs: tuple[float, ...]  # sizes at which the next queue begins, rising; one fewer than queues
    quotas: tuple[int, ...]  # tokens of each

    def queue_of(self, size: float) -> int:
        """Return the index of the queue for a size."""
        return bisect_right(self.cut_offs, size)


class RequestHistory:
    """The latest requests: their arrivals, demands and durations."""

    def __init__(self) -> None:
        self.arrivals: deque[tuple[float, Demand]] = deque(maxlen=WINDOW)
        self._ended: deque[tuple[Demand, int, float]] = deque(maxlen=WINDOW)
        self.num_arrivals = 0

    def arrived(self, demand: Demand, now: float) -> None:
        """Add an arrival."""
        self.num_arrivals += 1
        self.arrivals.append((now, demand))

    def ended(self, demand: Demand, held_tokens: int, duration_s: float) -> None:
        """Add an ended request: its charge, and its time from admission to end."""
        self._ended.append((demand, held_tokens, duration_s))

    def mean_duration_s(self) -> float:
        """Return the mean duration in seconds; 1 before any request ended."""
        total_s = sum(duration_s for _, _, duration_s in self._ended)
        return total_s / len(self._ended) if total_s > 0 else 1.0

    def loads(self, sizer: RequestSizer, cuts: Seq[float], now: float) -> list[QueueLoad]:
        """Return the load of each queue that these cut-offs would make."""
        span_s = max(now - self.arrivals[0][0], 1e-9)
        num_queues = len(cuts) + 1
        largest, demanded, counts = [0] * num_queues, [0] * num_queues, [0] * num_queues
        for _, demand in self.arrivals:
            queue = bisect_right(cuts, sizer.size(demand))
            largest[queue] = max(largest[queue], demand.tokens)
            demanded[queue] += demand.tokens
            counts[queue] += 1
        held, seconds, ends = [0] * num_queues, [0.0] * num_queues, [0] * num_queues
        for demand, held_tokens, duration_s in self._ended:
            queue = bisect_right(cuts, sizer.size(demand))
            held[queue] += held_tokens
            seconds[queue] += duration_s
            ends[queue] += 1
        mean_s = self.mean_duration_s()
        return [
            QueueLoad(
                max_tokens=largest[queue],
                mean_tokens=held[queue] / ends[queue] if ends[queue] else demanded[queue] / max(1, counts[queue]),
                duration_s=seconds[queue] / ends[queue] if ends[queue] else mean_s,
                rate=counts[queue] / span_s,
            )
            for queue in range(num_queues)
        ]


def plan_queues(
    history: RequestHistory,
    sizer: RequestSizer,
    *,
    criterion: str,
    total: int,
    least: int,
    slo_s: float | None,
    now: float,
) -> QueuePlan:
    """Cluster recent sizes, cut between the clusters, and share the tokens by load.

    ``sizer`` is fitted to the history, which has a request. ``least`` is the least charge of one, in tokens; ``slo_s``
    the time that one may take, five times the mean when ``None``.
    """
    sizes = [sizer.size(demand) for _, demand in history.arrivals]
    cuts = cut_offs(choose(cluster(sizes, min(MAX_QUEUES, total // least)), criterion))
    slo_s = slo_s or SLO_FACTOR * history.mean_duration_s()
    return QueuePlan(cuts, share_out(total, history.loads(sizer, cuts, now), slo_s, least=least))


def plan_static(history: RequestHistory, sizer: RequestSizer, *, total: int, least: int) -> QueuePlan:
    """Cut the range from the smallest to the largest size into four equal parts with equal quotas."""
    sizes = [sizer.size(demand) for _, demand in history.arrivals]
    low, high = min(sizes), max(sizes)
    num_queues = min(MAX_QUEUES, total // least)
    cuts = tuple(low + (high - low) * index / num_queues for index in range(1, num_queues))
    return QueuePlan(cuts, in_proportion(total, [1.0] * num_queues))
