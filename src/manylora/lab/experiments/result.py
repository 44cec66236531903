"""The result of a case: figures by name and curves for plots, as JSON and back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

__all__ = ["Curve", "Result", "cdf"]

SHARES = (*(index / 50 for index in range(50)), 0.99, 0.995, 1.0)
DIGITS = 5


@dataclass(frozen=True, slots=True)
class Curve:
    """Points to draw a line through."""

    x: tuple[float, ...]
    y: tuple[float, ...]

    def to_json(self) -> list[list[float]]:
        """Return both columns, short."""
        return [[_short(value) for value in column] for column in (self.x, self.y)]


@dataclass(frozen=True, slots=True)
class Result:
    """A case, run.

    Args:
        figures: Numbers by name; times in seconds unless the name says otherwise, shares in [0, 1].
    """

    figures: dict[str, float]
    curves: dict[str, Curve] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """Return plain data."""
        return {
            "figures": {name: _short(value) for name, value in self.figures.items()},
            "curves": {name: curve.to_json() for name, curve in self.curves.items()},
        }

    @classmethod
    def from_json(cls, data: dict[str, dict[str, list[list[float]]]]) -> Result:
        """Return what ``to_json`` made."""
        curves = {name: Curve(tuple(x), tuple(y)) for name, (x, y) in data["curves"].items()}
        return cls({name: float(value) for name, value in data["figures"].items()}, curves)  # type: ignore[arg-type]


def cdf(values: Iterable[float]) -> Curve:
    """Return the cumulative distribution of values as a curve: x is a value, y the share of values up to it."""
    found = np.fromiter(values, dtype=np.float64)
    if not len(found):
        return Curve((), ())
    return Curve(tuple(np.quantile(found, SHARES).tolist()), SHARES)


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
