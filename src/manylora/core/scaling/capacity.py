"""The rate that one replica can take: as given, or predicted from its steps; corrected where traffic contradicts it."""

from __future__ import annotations

from manylora.core.costs.step_model import StepModel

__all__ = ["ReplicaCapacity", "predict_capacity"]

FEWEST_JUDGED = 20  # requests below which a share within the SLO says nothing
BACK_OFF = 0.95  # part of a rate that broke the SLO which is taken to keep it
NEWEST = 0.1  # weight of the newest prediction: the requests in flight are a small sample
STEP = 0.9  # largest change by one contradiction: it may have another cause, as cold adapters

LEAST, MOST = 0.1, 4.0  # bounds of the correction


def predict_capacity(
    steps: StepModel,
    *,
    prompt_tokens: float,
    answer_tokens: float,
    mean_rank: float,
    max_num_seqs: int,
    kv_tokens: int | None,
) -> float:
    """Return the requests per second of a replica whose steps are full, for requests of mean lengths and rank.

    A request takes its prompt's share of steps once, and one place in as many decode steps as its answer has tokens.
    ``kv_tokens`` is the KV that the replica has room for; ``None`` if unknown.
    """
    context = prompt_tokens + answer_tokens / 2
    num = max_num_seqs if kv_tokens is None else max(1, min(max_num_seqs, int(kv_tokens / max(1.0, context))))
    rank = int(mean_rank)
    decode_s = steps.decode_s(num, num * context, num, num * rank, rank)
    tokens = num + prompt_tokens
    prompt_s = steps.prefill_s(tokens, num * context + prompt_tokens, tokens, tokens * mean_rank, rank)
    return 1.0 / max(1e-9, max(0.0, prompt_s - decode_s) + answer_tokens * decode_s / num)


class ReplicaCapacity:
    """The rate per replica that keeps the SLO of a share of requests, the ``goal``; ``utilization`` of it is used.

    It is the rate that ``manylora plan`` prints; without it, what ``predict`` is told. A contradiction corrects it: the
    SLO broke at a lower rate, or was kept at a higher one.
    """

    def __init__(self, *, utilization: float, goal: float, rate: float | None = None) -> None:
        self._utilization = utilization
        self._goal = goal
        self._rate = rate
        self._is_given = rate is not None
        self._correction = 1.0

    @property
    def safe_rate(self) -> float | None:
        """Requests per second that a replica should take at most; ``None`` while unknown."""
        return None if self._rate is None else self._rate * self._correction * self._utilization

    def predict(self, rate: float) -> None:
        """Update the capacity by a prediction, in requests per second; ignored if the configuration gives it."""
        if not self._is_given:
            self._rate = rate if self._rate is None else self._rate + NEWEST * (rate - self._rate)

    def learn(self, rate: float, num_judged: int, num_kept: int) -> None:
        """Learn from a time of steady load, of ``rate`` requests per second on each replica.

        ``num_judged`` requests have a known time to first token, or one over the SLO already; ``num_kept`` are within
        it.
        """
        safe = self.safe_rate
        if safe is None or num_judged < FEWEST_JUDGED:
            return
        is_kept = num_kept >= self._goal * num_judged
        if is_kept and rate > safe:
            self._correct(rate / safe)
        elif not is_kept:
            self.contradict(rate)

    def contradict(self, rate: float) -> None:
        """Learn that ``rate`` requests per second were the most that a replica took, or too many for it."""
        safe = self.safe_rate
        if safe is not None and rate < safe:
            self._correct(BACK_OFF * rate / safe)

    def _correct(self, factor: float) -> None:
        factor = min(1 / STEP, max(STEP, factor))
        self._correction = min(MOST, max(LEAST, self._correction * factor))
