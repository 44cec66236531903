"""How many cores the assisted rows of a step go to, and which rows go to which: by tokens per core (CaraServe, 4.2).

A core's time for ``n`` rows of an adapter is ``fixed + n * row``: reading the weights, and arithmetic. A second core
halves the arithmetic, and reads the weights again. It pays from ``fixed / row`` rows on, the *tokens per core*. And it
adds a wait, a copy and a sum to the stream, so the number of cores also stays below the one at which these cost as much
as the arithmetic that another core saves: the square root of (time of all rows / time of a handoff).

The live executor divides a step by it, with costs that it measures (``execution/assist``), and the simulator prices
the shares of the same division (``lab/costs/workers.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = [
    "CORE_BYTES_PER_S",
    "CORE_FLOPS_PER_S",
    "HANDOFF_S",
    "MAX_WORKERS",
    "ROW_BYTES_PER_S",
    "RowCost",
    "row_cost",
    "split_rows",
]

CORE_FLOPS_PER_S = 230e9
"""Operations of a core per second in rows of adapters: AMD EPYC with AVX-512 (``bench/device.py --workers``)."""

CORE_BYTES_PER_S = 10e9
"""Rate at which a core reads weights of adapters that no cache holds, beside the arithmetic of rows."""

ROW_BYTES_PER_S = 26.6e9  # the same for one row alone, whose arithmetic the read hides

HANDOFF_S = 10e-6
"""A wait, a copy and a sum of one exchange, in seconds, on a GPU's stream and in the thread that launches them."""

MAX_WORKERS = 16  # workers of an engine at most, however many cores it has


@dataclass(frozen=True, slots=True)
class RowCost:
    """A core's time in seconds: ``fixed_s`` to read the weights of an adapter, and ``row_s`` for each row.

    ``handoff_s`` is the stream's, for the exchanges with one more core.
    """

    fixed_s: float
    row_s: float
    handoff_s: float = 0.0

    @property
    def tokens_per_core(self) -> float:
        """Rows from which on another core pays."""
        return max(1.0, self.fixed_s / self.row_s) if self.row_s > 0 else math.inf


def row_cost(
    num_weights: int,
    element_bytes: int,
    flops_per_s: float = CORE_FLOPS_PER_S,
    bytes_per_s: float = CORE_BYTES_PER_S,
    handoff_s: float = 0.0,
) -> RowCost:
    """Return the cost of rows of an adapter with so many weights, at a core's rates."""
    return RowCost(num_weights * element_bytes / bytes_per_s, 2 * num_weights / flops_per_s, handoff_s)


def split_rows(segments: Sequence[tuple[int, RowCost]], num_workers: int) -> list[int]:
    """Return the first row of each worker's share, of equal cost, and the number of rows at the end.

    Args:
        segments: Number of rows of each adapter, one after another, and their cost.
        num_workers: Workers at most; fewer are used if each would have less than its tokens per core.
    """
    total = sum(num_rows for num_rows, _ in segments)
    wanted = math.ceil(sum(num_rows / cost.tokens_per_core for num_rows, cost in segments))
    handoff_s = max(cost.handoff_s for _, cost in segments)
    if handoff_s > 0:
        wanted = min(wanted, round(math.sqrt(sum(num_rows * cost.row_s for num_rows, cost in segments) / handoff_s)))
    num = max(1, min(num_workers, wanted, total))
    row_costs = [np.full(n, cost.fixed_s / max(n, 1) + cost.row_s) for n, cost in segments]
    ends = np.cumsum(np.concatenate(row_costs))
    # A share begins with the row in whose middle the shares before it are complete; each has a row at least.
    middles = ends - np.concatenate(row_costs) / 2
    firsts = [0]
    for share in range(1, num):
        first = int(np.searchsorted(middles, ends[-1] * share / num))
        firsts.append(min(max(first, firsts[-1] + 1), total - num + share))
    return [*firsts, total]
