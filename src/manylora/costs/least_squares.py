"""Least squares with coefficients that cannot be negative: a row, a byte or an adapter never makes a step shorter.

Source: Lawson and Hanson, *Solving Least Squares Problems* (1974), chapter 23: coefficients leave zero one at a time,
where the residual falls fastest, and go back to zero where the unconstrained solution would make them negative.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Array", "fit_nonnegative", "fit_robustly"]

Array = NDArray[np.float64]

HUBER = 1.345
"""Residuals beyond so many standard deviations count linearly, not squared: Huber's usual choice."""

ROUNDS = 10
"""Rounds of reweighting; coefficients settle well before."""


def fit_nonnegative(matrix: Array, target: Array) -> Array:
    """Return ``x >= 0`` that minimises ``|matrix @ x - target|``.

    Args:
        matrix: ``[n, k]``.
        target: ``[n]``.
    """
    scale = np.linalg.norm(matrix, axis=0)  # columns differ by many orders: steps, rows, pairs of tokens
    scale[scale == 0.0] = 1.0
    scaled = matrix / scale
    gram, moment = scaled.T @ scaled, scaled.T @ target
    tolerance = 1e-12 * max(1.0, float(np.abs(moment).max(initial=0.0)))
    solution = np.zeros(matrix.shape[1])
    is_free = np.zeros(matrix.shape[1], dtype=bool)
    for _ in range(10 * matrix.shape[1]):  # it ends by itself; the bound is for the sake of rounding
        gradient = np.where(is_free, -np.inf, moment - gram @ solution)
        if is_free.all() or gradient.max() <= tolerance:
            break
        is_free[int(gradient.argmax())] = True
        while True:
            wanted = np.zeros_like(solution)
            wanted[is_free] = np.linalg.lstsq(scaled[:, is_free], target, rcond=None)[0]
            is_out = is_free & (wanted <= tolerance)
            if not is_out.any():
                solution = wanted
                break
            # Go towards what is wanted until the first coefficient reaches zero, and hold it there.
            room = solution[is_out] / np.maximum(solution[is_out] - wanted[is_out], 1e-300)
            solution = solution + min(1.0, float(room.min())) * (wanted - solution)
            is_free &= solution > tolerance
            solution[~is_free] = 0.0
            if not is_free.any():
                break
    coefficients: Array = solution / scale
    return coefficients


def fit_robustly(matrix: Array, seconds: Array) -> Array:
    """Return ``x >= 0`` that makes *relative* errors small, and lets single bad measurements go.

    Short steps count as much as long ones. A step that something else on the machine held up says little about the
    next: residuals are weighed by Huber's rule, from round to round.

    Args:
        matrix: ``[n, k]``.
        seconds: ``[n]``, above zero.
    """
    relative = matrix / seconds[:, None]
    weights = np.ones_like(seconds)
    coefficients = np.zeros(matrix.shape[1])
    for _ in range(ROUNDS):
        coefficients = fit_nonnegative(relative * weights[:, None], weights)
        errors = np.abs(relative @ coefficients - 1.0)
        deviation = 1.4826 * float(np.median(errors)) + 1e-12
        weights = np.sqrt(np.minimum(1.0, HUBER * deviation / np.maximum(errors, 1e-300)))
    return coefficients
