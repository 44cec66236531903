"""How the speed of a machine drifts: the sizes and time constants of the components, from its step times.

Steps that follow each other are slow together. The autocovariance of measured over predicted time says by how much, as
a function of how far apart they are; a sum of falling exponentials is fitted to it, one for every component of
``costs/speed.py``. It is taken over *time* (a long step counts as long as it lasts) and of times rather than of their
logarithms: a queue falls behind by the excess work of a slow machine, and under load its waits depend on the integral
of just this curve.

Source: Whitt, *Stochastic-Process Limits* (2002), chapter 9, for the claim on waits: in heavy traffic service enters
by its asymptotic variance. Fitting a mixture of exponentials on a grid by non-negative least squares is Provencher's
way, *A constrained regularization method* (1982), here without the regularization: the grid is coarse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from manylora.costs.profile import DriftComponent, Noise

__all__ = ["Array", "DriftEstimate", "estimate_drift", "fit_nonnegative", "noise_within", "speed_between"]

Array = NDArray[np.float64]

LEAST_SIZE = 0.02
"""Smaller components cannot be measured, and a short log shows some by chance."""

LARGEST = 4.0
"""A step so many times as long as foretold was held up by something of its own, and counts as no more than that."""

FIRST_LAG = 2.5
"""The shortest lag, in steps."""

BIN_RATIO = 1.5
"""Lags are put together by this factor."""

GRID_RATIO = 2.0
"""Lengths of components that are told apart."""

STEPS_PER_SPELL = 4
"""Shorter components are each step's own noise."""

SPELLS_PER_LOG = 6
"""A spell can be measured if the log holds some of them: none is looked for that is longer than this part of it."""

CHANCE = 4.0
"""Standard deviations by which neighbours must agree more than by chance: one steady log in thirty thousand does."""

NEIGHBOURS = 100
"""Steps on each side that tell the speed in between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftEstimate:
    """What was found.

    Args:
        components: From short to long; none for a steady machine.
        share: Their part of the variance of the logarithm of steps' times; the rest is each step's own.
    """

    components: tuple[DriftComponent, ...]
    share: float


def estimate_drift(began_at: Array, took: Array, foretold: Array) -> DriftEstimate:
    """Return the components in which steps took longer or shorter than foretold.

    Args:
        began_at: When each step began, in seconds, rising, ``[n]``; between runs lies more than any spell lasts.
        took: What each took, in seconds, ``[n]``.
        foretold: What it should have taken, in seconds, ``[n]``.
    """
    ratios = took / foretold
    mean = float(ratios @ took / took.sum())
    deviations = np.clip(ratios / mean, 1 / LARGEST, LARGEST) - 1.0
    deviations -= deviations @ took / took.sum()
    variance = math.log1p(float(deviations**2 @ took / took.sum()))
    steady = DriftEstimate(components=(), share=0.0)
    step_s = float(np.median(took))
    longest_s = float(took.sum()) / SPELLS_PER_LOG
    shortest_s = STEPS_PER_SPELL * step_s
    if variance < LEAST_SIZE**2 or longest_s < shortest_s or not _hang_together(took * deviations):
        return steady
    edges = _powers(FIRST_LAG * step_s, longest_s, BIN_RATIO)
    products, weights, lags = _products(began_at, took, deviations, edges)
    lengths_s = _powers(shortest_s, longest_s, GRID_RATIO)
    components = _merged(_fit(products / weights, lags, lengths_s), lengths_s)
    if not components:
        return steady
    return DriftEstimate(components=components, share=min(1.0, sum(one.size**2 for one in components) / variance))


def noise_within(whole: Noise, share: float) -> Noise:
    """Return what is left of the noise within a spell: the same distribution with less variance, and the same mean.

    Args:
        whole: All of it.
        share: Part of the variance of its logarithm that components have.
    """
    quantiles = np.array(whole.quantiles) ** math.sqrt(1.0 - share)
    quantiles *= whole.mean / float((quantiles[1:] + quantiles[:-1]).mean() / 2)  # what a draw is on the mean
    return Noise(mean=whole.mean, quantiles=tuple(round(float(one), 4) for one in quantiles))


def speed_between(found: DriftEstimate, at: Array, known_at: Array, known: Array) -> Array:
    """Return how slow the machine was at some times, as a factor, from steps at others, ``[n]``.

    The best linear guess (kriging): the known residuals, each weighed by how much its time says of the one asked for.

    Args:
        found: The components.
        at: Times to tell, in seconds, ``[n]``, rising.
        known_at: Times that are known, in seconds, ``[m]``, rising.
        known: Measured over foretold there, ``[m]``.
    """
    logarithms = np.log(known)
    level = float(logarithms.mean())
    variance = sum(one.size**2 for one in found.components)
    own = variance * (1.0 / max(found.share, 1e-6) - 1.0) + 1e-9
    places = np.searchsorted(known_at, at)
    guessed = np.zeros(len(at))
    for place in np.unique(places):  # times between the same two known ones share their neighbours
        of, near = places == place, slice(max(0, place - NEIGHBOURS), place + NEIGHBOURS)
        times = known_at[near]
        among = _covariance(found.components, times[:, None] - times) + own * np.eye(len(times))
        across = _covariance(found.components, at[of][:, None] - times)
        guessed[of] = across @ np.linalg.solve(among, logarithms[near] - level)
    speeds: Array = np.exp(level + guessed + own / 2)  # the mean of what steps take there, not their median
    return speeds


def _covariance(components: Sequence[DriftComponent], apart_s: Array) -> Array:
    total = np.zeros_like(apart_s)
    for one in components:
        total += one.size**2 * np.exp(-np.abs(apart_s) / one.length_s)
    return total


def _products(began_at: Array, took: Array, deviations: Array, edges: Array) -> tuple[Array, Array, Array]:
    """Return, by bin of lags, the sums of products and of their weights, and the mean lag.

    Every step is paired with the next, the second next, and so on, ever more sparsely: a long log costs little more
    than its length.

    Lags go from middle to middle and begin at some steps: of steps next to each other, those that are nearest are those
    that were both quick, which looks as if they were quick together.
    """
    num_bins, at = len(edges) - 1, began_at + took / 2
    products, weights, lags, counts = np.zeros((4, num_bins))
    weighted = took * deviations
    shift = 1
    while shift < len(took):
        apart_s = at[shift:] - at[:-shift]
        bins = np.searchsorted(edges, apart_s, side="right") - 1
        of = np.flatnonzero((bins >= 0) & (bins < num_bins))
        if not len(of) and apart_s.min() > edges[-1]:
            break
        cells = bins[of]
        products += np.bincount(cells, weighted[of] * weighted[of + shift], minlength=num_bins)
        weights += np.bincount(cells, took[of] * took[of + shift], minlength=num_bins)
        lags += np.bincount(cells, apart_s[of], minlength=num_bins)
        counts += np.bincount(cells, minlength=num_bins)
        shift = max(shift + 1, int(shift * 1.05))
    is_seen = counts > 0
    return products[is_seen], weights[is_seen], lags[is_seen] / counts[is_seen]


def _hang_together(weighted: Array) -> bool:
    """Whether steps near to each other are slow together more than chance would have it, of whatever size they are."""
    products = np.concatenate([weighted[shift:] * weighted[:-shift] for shift in range(1, STEPS_PER_SPELL + 1)])
    return float(products.sum()) > CHANCE * math.sqrt(float((products**2).sum()))


def _fit(covariances: Array, lags: Array, lengths_s: Array) -> Array:
    """Return the square of each spell's size: of log-normal factors, ``log(1 + covariance)`` is that of logarithms."""
    return fit_nonnegative(np.exp(-lags[:, None] / lengths_s), np.log1p(np.maximum(covariances, -0.9)))


def fit_nonnegative(matrix: Array, target: Array) -> Array:
    """Return ``x >= 0`` that minimises ``|matrix @ x - target|``, columns brought to one size first.

    Args:
        matrix: ``[n, k]``; columns may differ by many orders: steps, rows, pairs of tokens.
        target: ``[n]``.
    """
    from scipy.optimize import nnls  # takes a quarter of a second to import, and most commands fit nothing

    sizes = np.linalg.norm(matrix, axis=0)
    sizes[sizes == 0.0] = 1.0
    solution: Array = nnls(matrix / sizes, target)[0] / sizes
    return solution


def _powers(least: float, most: float, ratio: float) -> Array:
    """Return ``least``, ``least * ratio`` and so on, up to the first that is no less than ``most``."""
    powers: Array = least * np.power(ratio, np.arange(math.ceil(math.log(most / least, ratio)) + 1.0))
    return powers


def _merged(squares: Array, lengths_s: Array) -> tuple[DriftComponent, ...]:
    """Put neighbours of the grid together, which are one spell whose length lies in between."""
    components = []
    for is_there, run in groupby(range(len(squares)), key=lambda index: squares[index] > 0):
        of = list(run)
        total = float(squares[of].sum())
        if is_there and total >= LEAST_SIZE**2:
            length_s = math.exp(float(squares[of] @ np.log(lengths_s[of])) / total)
            components.append(DriftComponent(size=round(math.sqrt(total), 4), length_s=float(f"{length_s:.3g}")))
    return tuple(components)
