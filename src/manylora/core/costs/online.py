"""Costs of steps, learnt online, to limit prompt chunks by time and to compare prompts.

The model of a step's duration is a constant, plus a cost per token, per token and unit of its adapter's rank, and per
token of KV that is read. The four coefficients are fitted to recent steps by least squares with exponential fading,
starting from a guess. A step is weighted by its tokens: a short step is bound by reads of the base weights, and says
little about the cost of a long one.

Little depends on this form: it compares prompts, and finds the tokens of a step as long as recent steps.
``lab/costs/calibrate.py`` fits a device more closely, from a log.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from manylora.core.scheduling import Sequence

__all__ = ["OnlineCosts", "StepLoad", "solve_nonnegative"]

FADE = 0.99  # factor on the weight of earlier steps with every usual step: a memory of about 100 steps
GUESS_WEIGHT = 0.1  # weight of the guess, in usual steps: enough to determine coefficients that the steps do not


class StepLoad(NamedTuple):
    """The content of a step before its launch, as far as its duration depends on it."""

    num_tokens: int  # tokens in the step
    num_sequences: int  # sequences in it
    context: int  # tokens of KV that it reads, its own included
    num_adapted: int  # tokens with an adapter
    sum_rank: int  # sum of ranks over tokens
    max_rank: int  # largest rank

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one token."""
        return self.num_tokens == self.num_sequences

    @classmethod
    def of(cls, decodes: Seq[Sequence], prompts: Seq[tuple[Sequence, int]] = ()) -> StepLoad:
        """Return the load of sequences that decode, and of others with their numbers of tokens."""
        ranks = [sequence.row_rank for sequence in decodes]
        num_all, num_adapted = len(ranks), len(ranks) - ranks.count(0)
        context, sum_rank = sum([sequence.num_computed for sequence in decodes]) + num_all, sum(ranks)
        for sequence, num_tokens in prompts:
            ranks.append(rank := sequence.row_rank)
            num_all += num_tokens
            context += sequence.num_computed + num_tokens
            num_adapted += num_tokens if rank else 0
            sum_rank += num_tokens * rank
        return cls(num_all, len(ranks), context, num_adapted, sum_rank, max(ranks, default=0))


USUAL = (1.0, 512.0, 512.0 * 32.0, 16_384.0)
"""A usual step: 1, its tokens, its sum of ranks, its context. Features are in these units, for numerical stability."""

GUESS = (0.005, 512 * 1.5e-4, 0.0, 0.005)  # seconds of a usual step, by quantity: a 7B model on a data-centre GPU


class OnlineCosts:
    """Prices steps. The caller starts to observe steps when ``is_asked``: a price has been requested."""

    def __init__(self) -> None:
        self.is_asked = False
        self._gram = [[GUESS_WEIGHT * (row == column) for column in range(4)] for row in range(4)]
        self._moment = [GUESS_WEIGHT * guess for guess in GUESS]
        self._coefficients = _per_unit(list(GUESS))

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn the duration of a step."""
        weight = min(1.0, load.num_tokens / USUAL[1])
        faded = FADE**weight
        features = [value / usual for value, usual in zip(_quantities(load), USUAL, strict=True)]
        for row, one in enumerate(features):
            sums = self._gram[row]
            for column, other in enumerate(features):
                # The guess never fades: otherwise equal steps would leave the coefficients undetermined.
                kept = GUESS_WEIGHT if row == column else 0.0
                sums[column] = (sums[column] - kept) * faded + kept + weight * one * other
            kept = GUESS_WEIGHT * GUESS[row]
            self._moment[row] = (self._moment[row] - kept) * faded + kept + weight * one * seconds
        self._coefficients = _per_unit(solve_nonnegative(self._gram, self._moment))

    def step_s(self, load: StepLoad) -> float:
        """Return the duration of a step, in seconds."""
        return sum([value * price for value, price in zip(_quantities(load), self._coefficients, strict=True)])

    def token_s(self, rank: int) -> float:
        """Return the seconds that one more prompt token adds to a step; ``rank`` is its adapter's, 0 for the base."""
        _, token_s, row_rank_s, context_s = self._coefficients
        return token_s + rank * row_rank_s + context_s

    def prompt_s(self, sequence: Sequence) -> float:
        """Return the seconds that a sequence's tokens without KV add to steps; above 0."""
        self.is_asked = True
        return max(1e-6, sequence.num_to_run * self.token_s(sequence.rank))


def _quantities(load: StepLoad) -> tuple[float, ...]:
    return 1.0, load.num_tokens, load.sum_rank, load.context


def _per_unit(usual: list[float]) -> tuple[float, float, float, float]:
    steps, tokens, row_rank, context = (value / size for value, size in zip(usual, USUAL, strict=True))
    return steps, tokens, row_rank, context


def solve_nonnegative(gram: Seq[Seq[float]], moment: Seq[float]) -> list[float]:
    """Solve the normal equations of a few terms; negative coefficients are set to 0 and left out, the lowest first.

    ``gram`` has the sums of products of features, and is positive definite; ``moment`` those of features and target.
    """
    kept = list(range(len(moment)))
    while kept:
        solution = _solve([[gram[row][column] for column in kept] for row in kept], [moment[row] for row in kept])
        worst = min(range(len(kept)), key=solution.__getitem__)
        if solution[worst] >= 0.0:
            break
        del kept[worst]
    return [solution[kept.index(place)] if place in kept else 0.0 for place in range(len(moment))]


def _solve(matrix: list[list[float]], target: list[float]) -> list[float]:
    """Solve a small positive definite system by elimination, which needs no pivoting."""
    size = len(target)
    for pivot in range(size):
        for row in range(pivot + 1, size):
            factor = matrix[row][pivot] / matrix[pivot][pivot]
            for column in range(pivot, size):
                matrix[row][column] -= factor * matrix[pivot][column]
            target[row] -= factor * target[pivot]
    solution = [0.0] * size
    for row in reversed(range(size)):
        known = sum([matrix[row][column] * solution[column] for column in range(row + 1, size)])
        solution[row] = (target[row] - known) / matrix[row][row]
    return solution
