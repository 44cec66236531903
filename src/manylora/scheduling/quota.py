"""Token quotas: how many tokens the running requests of each queue may hold together, and who holds them.

A queue that gets ``S * D * (1/SLO + rate)`` tokens serves ``rate`` requests a second, each holding at most ``S``
tokens for ``D`` seconds, within ``SLO`` seconds on average (an M/M/1 queue with ``mu = tokens / (S * D)``). What is
left of all tokens goes to the queues in proportion to these minima.

Where the minima exceed what there is, the paper says nothing. They often do, for ``S`` is the *largest* demand, many
times the mean in every queue. We share in proportion to what each queue holds at its busy times: so they keep up
with their arrivals equally well, and a queue of few large requests, which varies most, is not cut short.

Source: Chameleon, section 4.3.5.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import sqrt

__all__ = ["QueueLoad", "QuotaLedger", "in_proportion", "minimum_quota", "share_out"]


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """What was seen of a queue's requests.

    Args:
        max_tokens: Largest demand of one (S).
        mean_tokens: Mean demand.
        duration_s: Mean time from admission to end in seconds (D).
        rate: Arrivals per second.
    """

    max_tokens: int
    mean_tokens: float
    duration_s: float
    rate: float

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


def share_out(total: int, loads: Seq[QueueLoad], slo_s: float) -> tuple[int, ...]:
    """Share ``total`` tokens out among queues; the quotas add up to it, and each is at least 1.

    Args:
        total: At least one token per queue.
        loads: What was seen of each queue.
        slo_s: Seconds a request may take.
    """
    minima = [minimum_quota(load, slo_s) for load in loads]
    return in_proportion(total, minima if sum(minima) <= total else [load.busy_tokens for load in loads])


def in_proportion(total: int, weights: Seq[float]) -> tuple[int, ...]:
    """Split ``total`` in proportion to ``weights``, evenly if there are none, into integers of at least 1."""
    assert total >= len(weights) > 0
    whole = sum(weights)
    shares = [total * weight / whole for weight in weights] if whole > 0 else [total / len(weights)] * len(weights)
    parts = [max(1, int(share)) for share in shares]
    # Rounding left a few tokens over, or raising to 1 took some: the largest part will not notice.
    parts[max(range(len(parts)), key=parts.__getitem__)] += total - sum(parts)
    return tuple(parts)


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

    def free(self, queues: Seq[int]) -> int:
        """Return the tokens these queues could give together."""
        own = sum(max(0, self.quotas[queue] - self._used[queue]) for queue in queues)
        return min(own, self.total - self.held)

    def take(self, seq_id: int, tokens: int, queues: Seq[int]) -> None:
        """Charge a request to these queues, the first ones first."""
        assert tokens <= self.free(queues), "more than there is"
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
