"""Exact clustering of numbers: the number of queues, and the cuts between them.

In one dimension an optimal cluster is a run of neighbours, so the best clustering into ``k`` follows from the
best into ``k - 1`` of every prefix, and dynamic programming makes K-means exact::

    D[k][j] = min over i of D[k-1][i-1] + (sum of squares of sizes i..j about their mean)

512 numbers and up to 4 clusters take ten milliseconds, once in five minutes.

Source: Chameleon, section 4.3.4 (K-means for K = 1 .. 4, midpoints of neighbouring centroids); the recurrence is
that of Ckmeans.1d.dp (Wang and Song, The R Journal 2011).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

__all__ = ["Clustering", "choose", "cluster", "cut_offs"]

MAX_POINTS = 512
ALIKE = 0.25
LITTLE = 0.1


@dataclass(frozen=True, slots=True)
class Clustering:
    """The best clustering into a number of clusters."""

    centroids: tuple[float, ...]  # means of the clusters, rising
    wcss: float  # within-cluster sum of squares
    num_points: int  # numbers clustered


def cluster(sizes: Seq[float], max_clusters: int) -> list[Clustering]:
    """Return the best clusterings into 1, 2, ... ``max_clusters``; fewer if there are fewer distinct numbers.

    Of more than ``MAX_POINTS`` sizes, an evenly spaced sample in order of size is used.
    """
    points = np.sort(np.asarray(sizes, dtype=np.float64))
    if len(points) > MAX_POINTS:
        points = points[np.linspace(0, len(points) - 1, MAX_POINTS).round().astype(int)]
    count = len(points)
    centred = points - points.mean()  # sums of squares of small numbers lose no digits
    sums = np.concatenate([[0.0], np.cumsum(centred)])
    squares = np.concatenate([[0.0], np.cumsum(centred**2)])
    # spread[i, j]: sum of squares of points i..j about their mean; infinite below the diagonal.
    size = np.arange(count)[None, :] - np.arange(count)[:, None] + 1
    total = sums[None, 1:] - sums[:-1, None]
    spread = squares[None, 1:] - squares[:-1, None] - total**2 / np.maximum(size, 1)
    spread = np.where(size > 0, np.maximum(spread, 0.0), np.inf)

    best = spread[0]  # D[1]
    firsts: list[np.ndarray] = []  # first point of the last cluster of points 0..j, for 2, 3, ... clusters
    found = [Clustering((float(points.mean()),), float(best[-1]), count)]
    for num_clusters in range(2, min(max_clusters, len(np.unique(points))) + 1):
        totals = np.concatenate([[np.inf], best[:-1]])[:, None] + spread
        firsts.append(totals.argmin(axis=0))
        best = totals.min(axis=0)
        stop, centroids = count, []
        for first in reversed(firsts):
            start = int(first[stop - 1])
            centroids.append(float(points[start:stop].mean()))
            stop = start
        centroids.append(float(points[:stop].mean()))
        assert len(centroids) == num_clusters
        found.append(Clustering(tuple(reversed(centroids)), float(best[-1]), count))
    return found


def choose(clusterings: Seq[Clustering], criterion: str) -> Clustering:
    """Choose the number of clusters, of clusterings into 1, 2, ... as ``cluster`` returns them.

    ``wcss`` is the paper's criterion to the letter, the least sum of squares: it falls with every cluster, so this is
    the most that are allowed (unless there are fewer distinct sizes).

    ``elbow`` can choose fewer. Queues are there because long requests hold up short ones, so where sizes are alike
    (standard deviation below a quarter of the mean) one queue is enough; otherwise it is the smallest number after
    which another cluster would explain less than a tenth of the variance.
    """
    if criterion == "wcss":
        return min(clusterings, key=lambda one: one.wcss)
    whole = clusterings[0]
    deviation = (whole.wcss / whole.num_points) ** 0.5
    if deviation < ALIKE * abs(whole.centroids[0]):
        return whole
    for fewer, more in pairwise(clusterings):
        if fewer.wcss - more.wcss < LITTLE * whole.wcss:
            return fewer
    return clusterings[-1]


def cut_offs(clustering: Clustering) -> tuple[float, ...]:
    """Return the midpoints of neighbouring centroids; a size equal to one belongs above it."""
    return tuple((low + high) / 2 for low, high in pairwise(clustering.centroids))
