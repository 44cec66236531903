"""Least squares without negative coefficients, for the few terms of an online cost model: plain Python, no arrays."""

from __future__ import annotations

from collections.abc import Sequence as Seq

__all__ = ["solve_nonnegative"]


def solve_nonnegative(gram: Seq[Seq[float]], moment: Seq[float]) -> list[float]:
    """Solve the normal equations; negative coefficients are set to 0 and left out, the lowest first.

    Args:
        gram: Sums of products of features, positive definite.
        moment: Sums of products of features and target.
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
