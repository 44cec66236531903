"""What a step takes, learnt while steps run: so that prompts can be cut to time, and weighed against each other.

A step's seconds are taken to be a constant, so much per token, so much per token and unit of its adapter's rank, and so
much per token of KV that is read. The four are fitted to the steps lately run, older ones fading, by least squares that
starts from a guess. A step counts by its tokens: where it is short the device mostly waits for its weights, and says
little of what a long one costs.

Only the *form* is assumed, and little hangs on it: policies ask how one prompt compares with another, or
how many tokens make a step as long as those it has seen. ``costs/calibrate.py`` fits a device more closely, from a log.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from manylora.scheduling import Sequence

__all__ = ["OnlineCosts", "StepLoad"]

FADE = 0.99
"""Weight that what is known keeps with every step as long as a usual one: a memory of about 100 of those."""

GUESS_WEIGHT = 0.1
"""Weight of the guess, in usual steps: enough to settle what steps leave open."""


class StepLoad(NamedTuple):
    """What a step's time is made of, each in the unit of its coefficient.

    Args:
        steps: 1, for what a step costs by itself.
        tokens: Tokens that run.
        row_rank: Sum over them of their adapter's rank.
        context: Tokens of KV that are read.
    """

    steps: float
    tokens: float
    row_rank: float
    context: float


USUAL = StepLoad(1.0, 512.0, 512.0 * 32.0, 16_384.0)
"""Sizes of a usual step: features are measured in these, for the sums' sake."""

GUESS = (0.005, 512 * 1.5e-4, 0.0, 0.005)
"""Seconds of a usual step by what takes them: a 7B model on a data-centre GPU."""


class OnlineCosts:
    """Prices steps. It learns only from the first question on: until then ``is_asked`` is false."""

    def __init__(self) -> None:
        self.is_asked = False
        self._gram = [[GUESS_WEIGHT * (row == column) for column in range(4)] for row in range(4)]
        self._moment = [GUESS_WEIGHT * guess for guess in GUESS]
        self._coefficients = _per_unit(list(GUESS))

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn that a step took so long."""
        weight = min(1.0, load.tokens / USUAL.tokens)
        faded = FADE**weight
        features = [value / usual for value, usual in zip(load, USUAL, strict=True)]
        for row, one in enumerate(features):
            sums = self._gram[row]
            for column, other in enumerate(features):
                # The guess never fades, or a step that never varies would leave nothing to tell its parts apart by.
                kept = GUESS_WEIGHT if row == column else 0.0
                sums[column] = (sums[column] - kept) * faded + kept + weight * one * other
            kept = GUESS_WEIGHT * GUESS[row]
            self._moment[row] = (self._moment[row] - kept) * faded + kept + weight * one * seconds
        self._coefficients = _per_unit(_solve_nonnegative(self._gram, self._moment))

    def step_s(self, load: StepLoad) -> float:
        """Return what a step would take, in seconds."""
        return sum([value * price for value, price in zip(load, self._coefficients, strict=True)])

    def token_s(self, rank: int) -> float:
        """Return what one more token of a prompt adds to a step, in seconds.

        Args:
            rank: Its adapter's; 0 for the base.
        """
        _, token_s, row_rank_s, context_s = self._coefficients
        return token_s + rank * row_rank_s + context_s

    def prompt_s(self, sequence: Sequence) -> float:
        """Return what the tokens whose KV a sequence lacks add to steps, in seconds; above 0."""
        self.is_asked = True
        rank = sequence.version.rank if sequence.version else 0
        return max(1e-6, sequence.num_to_run * self.token_s(rank))

    @staticmethod
    def load_of(planned: Iterable[tuple[Sequence, int]]) -> StepLoad:
        """Return what sequences with so many tokens each amount to."""
        tokens = row_rank = context = 0
        for sequence, num_tokens in planned:
            tokens += num_tokens
            context += sequence.num_computed + num_tokens
            if sequence.version is not None:
                row_rank += num_tokens * sequence.version.rank
        return StepLoad(1.0, tokens, row_rank, context)


def _per_unit(usual: list[float]) -> tuple[float, float, float, float]:
    steps, tokens, row_rank, context = (value / size for value, size in zip(usual, USUAL, strict=True))
    return steps, tokens, row_rank, context


def _solve_nonnegative(gram: list[list[float]], moment: list[float]) -> list[float]:
    """Solve the normal equations; whatever would be negative is left out, the worst first, and is 0."""
    kept = list(range(len(moment)))
    while kept:
        solution = _solve([[gram[row][column] for column in kept] for row in kept], [moment[row] for row in kept])
        worst = min(range(len(kept)), key=solution.__getitem__)
        if solution[worst] >= 0.0:
            break
        del kept[worst]
    return [solution[kept.index(place)] if place in kept else 0.0 for place in range(len(moment))]


def _solve(matrix: list[list[float]], target: list[float]) -> list[float]:
    """Solve a small positive definite system by elimination; such a one needs no pivoting."""
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
