"""Estimation of a machine's speed drift from step times: sizes and time constants of its components.

Neighbouring steps are slow together. The autocovariance of measured over predicted time is a function of their
distance in time; a sum of falling exponentials is fitted to it, one for every component of ``lab/costs/fitted.py``.
Steps are weighted by their duration, and durations are not replaced by their logarithms: a queue grows by the excess
work of a slow machine, and under load its waits depend on the integral of exactly this curve.

Source: Whitt, *Stochastic-Process Limits* (2002), chapter 9: in heavy traffic, service affects waits through its
asymptotic variance. Fitting a mixture of exponentials on a grid by non-negative least squares is from Provencher, *A
constrained regularization method* (1982), here without the regularization because the grid is coarse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from manylora.lab.costs.profile import DriftComponent, Noise

__all__ = ["Array", "DriftEstimate", "estimate_drift", "fit_nonnegative", "noise_within", "speed_between"]

Array = NDArray[np.float64]

LEAST_SIZE = 0.02  # smallest component; smaller ones cannot be measured, and short logs show some by chance

LARGEST = 4.0
"""Measured over predicted time is clipped to this factor: longer steps were delayed for reasons of their own."""

FIRST_LAG = 2.5  # the shortest lag, in steps
BIN_RATIO = 1.5  # ratio of a lag bin's end to its begin
GRID_RATIO = 2.0  # ratio of neighbouring lengths in the grid of components
STEPS_PER_LENGTH = 4  # least length of a component, in steps; shorter ones are noise of single steps
LENGTHS_PER_LOG = 6  # the longest component that can be measured is this part of the log

CHANCE = 4.0
"""Significance of the correlation of neighbours, in standard deviations: one steady log in 30,000 exceeds it."""

NEIGHBOURS = 100  # steps on each side from which the speed in between is estimated


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftEstimate:
    """The estimated drift."""

    components: tuple[DriftComponent, ...]  # from short to long; empty for a steady machine
    share: float  # the part of these in the variance of the logarithm of step times; the rest is noise of single steps


def estimate_drift(began_at: Array, took: Array, predicted: Array) -> DriftEstimate:
    """Return the drift in measured over predicted step times.

    Args:
        began_at: Start of each step, in seconds, rising, ``[n]``; runs are further apart than the longest component.
        took: Measured durations, in seconds, ``[n]``.
        predicted: Predicted durations, in seconds, ``[n]``.
    """
    ratios = took / predicted
    mean = float(ratios @ took / took.sum())
    deviations = np.clip(ratios / mean, 1 / LARGEST, LARGEST) - 1.0
    deviations -= deviations @ took / took.sum()
    variance = math.log1p(float(deviations**2 @ took / took.sum()))
    steady = DriftEstimate(components=(), share=0.0)
    step_s = float(np.median(took))
    longest_s = float(took.sum()) / LENGTHS_PER_LOG
    shortest_s = STEPS_PER_LENGTH * step_s
    if variance < LEAST_SIZE**2 or longest_s < shortest_s or not _hang_together(took * deviations):
        return steady
    edges = _powers(FIRST_LAG * step_s, longest_s, BIN_RATIO)
    products, weights, lags = _products(began_at, took, deviations, edges)
    lengths_s = _powers(shortest_s, longest_s, GRID_RATIO)
    # ``log(1 + c)`` is the log-covariance of log-normal factors.
    covariances = np.log1p(np.maximum(products / weights, -0.9))
    components = _merged(fit_nonnegative(np.exp(-lags[:, None] / lengths_s), covariances), lengths_s)
    if not components:
        return steady
    return DriftEstimate(components=components, share=min(1.0, sum(one.size**2 for one in components) / variance))


def noise_within(whole: Noise, share: float) -> Noise:
    """Return the noise without drift: the same distribution and mean, with less variance.

    Args:
        whole: Noise with drift.
        share: Drift's part of the variance of its logarithm.
    """
    quantiles = np.array(whole.quantiles) ** math.sqrt(1.0 - share)
    quantiles *= whole.mean / float((quantiles[1:] + quantiles[:-1]).mean() / 2)  # the mean of draws
    return Noise(mean=whole.mean, quantiles=tuple(round(float(one), 4) for one in quantiles))


def speed_between(found: DriftEstimate, at: Array, known_at: Array, known: Array) -> Array:
    """Return the machine's slowdown, as a factor, at some times from steps at others, ``[n]``.

    The best linear estimate (kriging): a weighted sum of the known residuals by their covariance with the target time.

    Args:
        found: The drift.
        at: Target times, in seconds, ``[n]``, rising.
        known_at: Known times, in seconds, ``[m]``, rising.
        known: Measured over predicted duration at the known times, ``[m]``.
    """
    logarithms = np.log(known)
    level = float(logarithms.mean())
    variance = sum(one.size**2 for one in found.components)
    own = variance * (1.0 / max(found.share, 1e-6) - 1.0) + 1e-9
    places = np.searchsorted(known_at, at)
    guessed = np.zeros(len(at))
    for place in np.unique(places):  # target times between the same two known times share their neighbours
        of, near = places == place, slice(max(0, place - NEIGHBOURS), place + NEIGHBOURS)
        times = known_at[near]
        among = _covariance(found.components, times[:, None] - times) + own * np.eye(len(times))
        across = _covariance(found.components, at[of][:, None] - times)
        guessed[of] = across @ np.linalg.solve(among, logarithms[near] - level)
    speeds: Array = np.exp(level + guessed + own / 2)  # the mean of a log-normal factor, not its median
    return speeds


def _covariance(components: Sequence[DriftComponent], apart_s: Array) -> Array:
    total = np.zeros_like(apart_s)
    for one in components:
        total += one.size**2 * np.exp(-np.abs(apart_s) / one.length_s)
    return total


def _products(began_at: Array, took: Array, deviations: Array, edges: Array) -> tuple[Array, Array, Array]:
    """Return, by bin of lags, the sums of products and of their weights, and the mean lag.

    Steps are paired at growing shifts, so the time is about linear in the length of the log.

    Lags are between middles of steps and at least ``FIRST_LAG`` steps: the nearest neighbouring steps are those that
    were both short, which would look like correlation.
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
    """Whether neighbouring steps are slow together more often than by chance."""
    products = np.concatenate([weighted[shift:] * weighted[:-shift] for shift in range(1, STEPS_PER_LENGTH + 1)])
    return float(products.sum()) > CHANCE * math.sqrt(float((products**2).sum()))


def fit_nonnegative(matrix: Array, target: Array) -> Array:
    """Return ``x >= 0`` ``[k]`` that minimises ``|matrix @ x - target|`` for ``[n, k]`` and ``[n]``.

    Columns (steps, rows, pairs of tokens) differ by orders of magnitude and are normalised first.
    """
    from scipy.optimize import nnls  # imports in a quarter of a second, and most commands fit nothing

    sizes = np.linalg.norm(matrix, axis=0)
    sizes[sizes == 0.0] = 1.0
    solution: Array = nnls(matrix / sizes, target)[0] / sizes
    return solution


def _powers(least: float, most: float, ratio: float) -> Array:
    """Return ``least``, ``least * ratio`` and so on, up to the first that is no less than ``most``."""
    powers: Array = least * np.power(ratio, np.arange(math.ceil(math.log(most / least, ratio)) + 1.0))
    return powers


def _merged(squares: Array, lengths_s: Array) -> tuple[DriftComponent, ...]:
    """Merge neighbours of the grid, given the squares of their sizes: one component with a length in between."""
    components = []
    for is_there, run in groupby(range(len(squares)), key=lambda index: squares[index] > 0):
        of = list(run)
        total = float(squares[of].sum())
        if is_there and total >= LEAST_SIZE**2:
            length_s = math.exp(float(squares[of] @ np.log(lengths_s[of])) / total)
            components.append(DriftComponent(size=round(math.sqrt(total), 4), length_s=float(f"{length_s:.3g}")))
    return tuple(components)
