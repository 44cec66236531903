"""Token quotas: the tokens that the running requests of each queue may hold together, and a ledger of them.

A queue that gets ``S * D * (1/SLO + rate)`` tokens serves ``rate`` requests a second, each holding at most ``S``
tokens for ``D`` seconds, within ``SLO`` seconds on average (an M/M/1 queue with ``mu = tokens / (S * D)``). The
remaining tokens go to the queues in proportion to these minima.

The paper does not treat minima that exceed the total. They often do, because ``S`` is the *largest* demand, many times
the mean in every queue. Then we share in proportion to the tokens that each queue holds at busy times: queues keep up
with their arrivals equally well, and a queue of few large requests, which varies most, is not cut short. Where these do
not fit either, the smaller queue takes first: the fast lane is guaranteed at any load, and the largest requests
wait. (In proportion, all queues would fall behind alike, and the one with most requests would wait longest.)

Source: Chameleon, section 4.3.5.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import ceil, sqrt

__all__ = ["QueueLoad", "QuotaLedger", "in_proportion", "minimum_quota", "share_out"]


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """Statistics of a queue's requests."""

    max_tokens: int  # largest demand of a request (S)
    mean_tokens: float  # mean charge of a request: below its demand where adapters are shared
    duration_s: float  # mean time from admission to end in seconds (D)
    rate: float  # arrivals per second

    @property
    def busy_tokens(self) -> float:
        """Tokens its running requests hold at a busy time while it keeps up: the mean and two standard deviations.

        By Little's law ``rate * duration`` requests run on average, and their number varies as its square root.
        """
        num_running = self.rate * self.duration_s
        return self.mean_tokens * (num_running + 2.0 * sqrt(num_running))


def minimum_quota(load: QueueLoad, slo_s: float) -> float:
    """Return the tokens a queue needs to keep its requests within ``slo_s`` seconds on average."""
    return load.max_tokens * load.duration_s * (1.0 / slo_s + load.rate)


def share_out(total: int, loads: Seq[QueueLoad], slo_s: float, *, least: int = 1) -> tuple[int, ...]:
    """Share ``total`` tokens among queues, each at least ``least``; ``slo_s`` is the time a request may take."""
    minima = [minimum_quota(load, slo_s) for load in loads]
    if sum(minima) <= total:
        return in_proportion(total, minima, least=least)
    busy = [load.busy_tokens for load in loads]
    if sum(busy) <= total:
        return in_proportion(total, busy, least=least)
    return smallest_first(total, busy, least=least)


def smallest_first(total: int, wanted: Seq[float], *, least: int = 1) -> tuple[int, ...]:
    """Give each in turn as many as it wants, at least ``least``; the last gets the rest."""
    parts: list[int] = []
    for place, want in enumerate(wanted[:-1], 1):
        left = total - sum(parts) - least * (len(wanted) - place)
        parts.append(max(least, min(ceil(want), left)))
    return (*parts, total - sum(parts))


def in_proportion(total: int, weights: Seq[float], *, least: int = 1) -> tuple[int, ...]:
    """Split ``total`` in proportion to ``weights``, evenly if all are 0, into integers of at least ``least``."""
    assert total >= least * len(weights) > 0
    parts = [0] * len(weights)
    left, rest = total, list(range(len(weights)))
    while rest:
        whole = sum(weights[index] for index in rest)
        shares = {index: left * weights[index] / whole if whole > 0 else left / len(rest) for index in rest}
        short = [index for index in rest if shares[index] < least]
        for index in short or rest:
            parts[index] = max(least, int(shares[index]))
        if not short:
            break
        # The other queues give up the missing tokens, in proportion.
        left -= least * len(short)
        rest = [index for index in rest if index not in short]
    # The largest part gets the few tokens that rounding down left.
    parts[max(range(len(parts)), key=parts.__getitem__)] += total - sum(parts)
    return tuple(parts)


class QuotaLedger:
    """The tokens that each request holds, of its own queue or lent by others.

    Invariant: held tokens never exceed the total. A queue may be overdrawn for a while after the quotas have changed
    under running requests; it gives no tokens until enough have returned.
    """

    def __init__(self, quotas: Seq[int]) -> None:
        self.quotas = tuple(quotas)
        self.total = sum(quotas)
        self.held = 0
        self._used = [0] * len(quotas)
        self._loans: dict[int, list[tuple[int, int]]] = {}  # by seq_id: charges as (queue, tokens)

    @property
    def num_loans(self) -> int:
        """Requests that hold tokens."""
        return len(self._loans)

    def used(self, queue: int) -> int:
        """Return the tokens of a queue's quota in use, lent tokens included."""
        return self._used[queue]

    def free(self, queues: Seq[int]) -> int:
        """Return the tokens that these queues together have left."""
        own = sum(max(0, self.quotas[queue] - self._used[queue]) for queue in queues)
        return min(own, self.total - self.held)

    def charge(self, seq_id: int, tokens: int, queues: Seq[int]) -> None:
        """Charge a request to these queues, in their order."""
        assert tokens <= self.free(queues), "more tokens than are free"
        loans = []
        left = tokens
        for queue in queues:
            part = min(left, max(0, self.quotas[queue] - self._used[queue]))
            if part:
                self._used[queue] += part
                loans.append((queue, part))
                left -= part
        self.held += tokens
        self._loans[seq_id] = loans

    def release(self, seq_id: int) -> int:
        """Release a request's tokens to the queues charged; return their number."""
        tokens = 0
        for queue, part in self._loans.pop(seq_id):
            self._used[queue] -= part
            tokens += part
        self.held -= tokens
        return tokens

    def held_by(self, seq_id: int) -> int:
        """Return the tokens that a request holds."""
        return sum(part for _, part in self._loans[seq_id])

    def carry_over(self, seq_id: int, tokens: int, queue: int) -> None:
        """Charge a running request to its queue under new quotas; the queue may be overdrawn."""
        self._used[queue] += tokens
        self.held += tokens
        self._loans[seq_id] = [(queue, tokens)]

    def check_integrity(self) -> None:
        """Assert that charges add up to the used and held tokens, and never exceed the total."""
        used = [0] * len(self.quotas)
        for loans in self._loans.values():
            for queue, tokens in loans:
                used[queue] += tokens
        assert used == self._used, (used, self._used)
        assert sum(used) == self.held <= self.total == sum(self.quotas)
