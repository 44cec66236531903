"""Token quotas: how many tokens the running requests of each queue may hold together, and who holds them.

A queue that gets ``S * D * (1/SLO + rate)`` tokens serves ``rate`` requests a second, each holding at most ``S``
tokens for ``D`` seconds, within ``SLO`` seconds on average (an M/M/1 queue with ``mu = tokens / (S * D)``). What is
left of all tokens goes to the queues in proportion to these minima.

Where the minima exceed what there is, the paper says nothing. We give every queue the same ceiling, as high as it
can be: queues that need little get all of it, and the others share the rest evenly. Cutting all in proportion
would starve the short requests' lane first, whose minimum is smallest.

Source: Chameleon, section 4.3.5.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

__all__ = ["QueueLoad", "QuotaLedger", "minimum_quota", "share_out"]


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """What was seen of a queue's requests.

    Args:
        max_tokens: Largest demand of one (S).
        duration_s: Mean time from admission to end in seconds (D).
        rate: Arrivals per second.
    """

    max_tokens: int
    duration_s: float
    rate: float


def minimum_quota(load: QueueLoad, slo_s: float) -> float:
    """Return the tokens a queue needs to keep its requests within ``slo_s`` seconds on average."""
    return load.max_tokens * load.duration_s * (1.0 / slo_s + load.rate)


def share_out(total: int, minima: Seq[float]) -> tuple[int, ...]:
    """Share ``total`` tokens out among queues; the quotas add up to it, and each is at least 1.

    Args:
        total: At least one token per queue.
        minima: What each queue needs, 0 or more.
    """
    assert total >= len(minima) > 0
    needed = sum(minima)
    if needed <= 0:
        shares = [total / len(minima)] * len(minima)
    elif needed <= total:
        shares = [minimum * total / needed for minimum in minima]
    else:
        ceiling = _ceiling(total, minima)
        shares = [min(minimum, ceiling) for minimum in minima]
    quotas = [max(1, int(share)) for share in shares]
    # Rounding down left a few tokens over (or raising to 1 took some): the largest queue will not notice.
    quotas[max(range(len(quotas)), key=quotas.__getitem__)] += total - sum(quotas)
    return tuple(quotas)


def _ceiling(total: int, minima: Seq[float]) -> float:
    """Return the ``c`` for which the minima, cut at ``c``, add up to ``total``."""
    left = float(total)
    rising = sorted(minima)
    for index, minimum in enumerate(rising):
        even = left / (len(rising) - index)
        if minimum >= even:
            return even
        left -= minimum
    return rising[-1]


class QuotaLedger:
    """Who holds whose tokens. A request's tokens come from its own queue, or are lent by others.

    Invariant: what is held never exceeds the total. A queue's own part may be overdrawn for a while after the
    quotas have changed under running requests; nothing is taken from it until enough has come back.

    Args:
        quotas: Tokens of each queue.
    """

    def __init__(self, quotas: Seq[int]) -> None:
        self.quotas = tuple(quotas)
        self.total = sum(quotas)
        self.held = 0
        self._used = [0] * len(quotas)
        self._loans: dict[int, list[tuple[int, int]]] = {}  # by seq_id: (queue, tokens) it was charged to

    @property
    def num_loans(self) -> int:
        """Requests that hold tokens."""
        return len(self._loans)

    def used(self, queue: int) -> int:
        """Return the tokens of a queue's quota that are taken, lent ones included."""
        return self._used[queue]

    def free(self, queues: Iterable[int]) -> int:
        """Return the tokens these queues could give together."""
        own = sum(max(0, self.quotas[queue] - self._used[queue]) for queue in queues)
        return min(own, self.total - self.held)

    def take(self, seq_id: int, tokens: int, queues: Iterable[int]) -> None:
        """Charge a request to these queues, the first ones first."""
        loans = []
        left = tokens
        for queue in queues:
            part = min(left, max(0, self.quotas[queue] - self._used[queue]))
            if part:
                self._used[queue] += part
                loans.append((queue, part))
                left -= part
        assert left == 0 and self.held + tokens <= self.total, "more than there is"
        self.held += tokens
        self._loans[seq_id] = loans

    def give_back(self, seq_id: int) -> int:
        """Return a request's tokens to where they came from, and how many they were."""
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
        """Charge a request that runs already to its queue under new quotas, overdrawing it if need be."""
        self._used[queue] += tokens
        self.held += tokens
        self._loans[seq_id] = [(queue, tokens)]

    def check_integrity(self) -> None:
        """Assert that loans add up to what is used and held, and never to more than the total."""
        used = [0] * len(self.quotas)
        for loans in self._loans.values():
            for queue, tokens in loans:
                used[queue] += tokens
        assert used == self._used, (used, self._used)
        assert sum(used) == self.held <= self.total == sum(self.quotas)
