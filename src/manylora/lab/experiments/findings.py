"""The findings of an experiment, compared with the published claims.

Seeds are paired: a change or a ratio is taken between runs of the same arrivals, lengths and adapters, then averaged,
so that its interval is the interval of the difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum
from itertools import combinations, pairwise
from math import exp, expm1, inf, isfinite, log, nan
from statistics import fmean

from manylora.lab.experiments.cases import Result
from manylora.lab.experiments.spec import Claim, Experiment
from manylora.lab.measure import Estimate, interval_of_runs

__all__ = ["Comparison", "Findings", "Verdict", "compare", "crossing", "overall"]

LEAST = 0.01  # changes below one per cent have no direction


class Verdict(Enum):
    """How a published number and ours stand to each other."""

    AGREES = "agrees"  # the whole interval is where the claim's tolerance puts it
    OPEN = "open"  # a part of the interval is there
    DIRECTION = "agrees in direction"
    """Better where it was published to be better, worse where worse; by another amount.

    Where seeds disagree on the direction, or it is less than ``LEAST``, it is ``DIFFERS``.
    """
    DIFFERS = "differs"
    NOT_REACHED = "not reached"  # nothing to compare: the runs do not go that far
    ONE_RUN = "no verdict"  # one seed: chance is unknown


@dataclass(frozen=True, slots=True)
class Comparison:
    """A claim beside ours."""

    claim: Claim  # the published figure
    ours: Estimate | None  # the same of our runs; ``None`` where they do not go that far
    verdict: Verdict  # agreement of the two


class Findings:
    """The results of an experiment: one for each seed, by setup and label of the point."""

    def __init__(self, experiment: Experiment, results: Mapping[tuple[str, str], Seq[Result]]) -> None:
        self.experiment = experiment
        self._results = results

    @property
    def num_seeds(self) -> int:
        """Runs of each case."""
        return len(next(iter(self._results.values())))

    def runs(self, setup: str, point: str) -> Seq[Result]:
        """Return the results at a point, by seed."""
        return self._results[setup, point]

    def figure(self, setup: str, point: str, name: str) -> Estimate:
        """Return a figure at a point: its mean over seeds, not a number where a run has no such figure."""
        return interval_of_runs([run.figures.get(name, nan) for run in self._results[setup, point]])

    def change(self, setup: str, point: str, name: str) -> Estimate | None:
        """Return by how much a figure differs from the experiment's ``versus``: the geometric mean over seeds, less 1.

        ``None`` where a figure is not above 0, so that there is no ratio.
        """
        assert self.experiment.versus is not None
        pairs = zip(self.runs(setup, point), self.runs(self.experiment.versus, point), strict=True)
        values = [(one.figures.get(name, 0.0), other.figures.get(name, 0.0)) for one, other in pairs]
        if min(map(min, values)) <= 0.0:
            return None
        logs = interval_of_runs([log(one / other) for one, other in values])
        return Estimate(middle=expm1(logs.middle), low=expm1(logs.low), high=expm1(logs.high))

    def compare(self) -> list[Comparison]:
        """Hold every claim against ours."""
        seeds, is_drawn = range(self.num_seeds), self.experiment.calculation is None
        claims = self.experiment.claims
        return [compare(one, [self._evaluate(one, seed) for seed in seeds], is_drawn=is_drawn) for one in claims]

    def _evaluate(self, claim: Claim, seed: int) -> float | None:
        if claim.form == "order":
            return self._order(claim, seed)
        if claim.form.startswith("crossing"):
            own = self._crossing(claim.setup, claim, seed)
            if claim.form == "crossing" or own is None:
                return own
            other = self._crossing(claim.versus or claim.setup, claim, seed)
            return None if other is None else own / other
        if claim.relative:
            return self._relative(claim, seed)
        own = self._value(claim.setup, claim.point, claim.figure, seed)
        other = self._value(claim.versus or claim.setup, claim.versus_point or claim.point, claim.figure, seed)
        if claim.form in ("value", "at-most", "at-least"):
            return own
        if claim.form == "overhead":
            least = self._value(claim.bound or claim.setup, claim.point, claim.figure, seed)
            return (own - least) / (other - least) - 1.0 if other > least else None
        return _against(claim, own, other)

    def _relative(self, claim: Claim, seed: int) -> float | None:
        """Return the mean over shares of the place where the other setup crosses the limit."""
        versus = claim.versus or claim.setup
        capacity = self._crossing(versus, claim, seed)
        if capacity is None:
            return None
        values = []
        for share in claim.relative:
            own, other = (self._at(name, claim.figure, share * capacity, seed) for name in (claim.setup, versus))
            if own is None or other is None:
                return None
            values.append(_against(claim, own, other))
        return fmean(values)

    def _value(self, setup: str, point: str, figure: str, seed: int) -> float:
        label = point if (setup, point) in self._results else self.experiment.points[0].label
        return self._results[setup, label][seed].figures.get(figure, nan)

    def _order(self, claim: Claim, seed: int) -> float:
        places = [one.partition("@") for one in claim.order]
        values = [self._value(setup, point or claim.point, claim.figure, seed) for setup, _, point in places]
        pairs = list(combinations(values, 2))
        if not all(map(isfinite, values)):
            return nan
        return sum(first < second for first, second in pairs) / len(pairs)

    def _crossing(self, setup: str, claim: Claim, seed: int) -> float | None:
        assert claim.limit is not None, f"{claim.text}: a crossing needs a limit"
        places = [(point.x, self._value(setup, point.label, claim.figure, seed)) for point in self.experiment.points]
        return crossing(places, claim.limit)

    def _at(self, setup: str, figure: str, x: float, seed: int) -> float | None:
        """Return a figure between two points."""
        points = self.experiment.points
        for here, there in pairwise(points):
            if here.x <= x <= there.x:
                y, next_y = (self._value(setup, one.label, figure, seed) for one in (here, there))
                part = (x - here.x) / (there.x - here.x)
                return exp(log(y) + part * (log(next_y) - log(y))) if min(y, next_y) > 0 else y + part * (next_y - y)
        return None


def compare(claim: Claim, values: Seq[float | None], *, is_drawn: bool = True) -> Comparison:
    """Hold a claim against ours, one value for each seed; ``None`` where a run does not go that far.

    ``is_drawn`` says whether chance has a part in it, so that one run makes no verdict.
    """
    known = [value for value in values if value is not None and isfinite(value)]
    if len(known) < len(values):
        return Comparison(claim, None, Verdict.NOT_REACHED)
    ours = interval_of_runs(known)
    return Comparison(claim, ours, Verdict.ONE_RUN if is_drawn and len(values) == 1 else _judge(claim, ours))


def crossing(places: Seq[tuple[float, float]], limit: float) -> float | None:
    """Return where a figure first exceeds a limit; ``None`` if it does nowhere, or from the first place on.

    ``places`` are points on the axis and figures there, rising; between two, the figure is interpolated by its
    logarithm.
    """
    for (x, y), (next_x, next_y) in pairwise(places):
        if y <= limit < next_y:
            return x + (next_x - x) * _share(y, next_y, limit)
    return None


def _against(claim: Claim, own: float, other: float) -> float:
    if not other:
        return nan
    return own / other - 1.0 if claim.form.startswith("change") else own / other


def _share(low: float, high: float, at: float) -> float:
    """Return how far ``at`` is from ``low`` to ``high``; latencies grow by factors, so in logarithms."""
    if min(low, at) > 0:
        low, high, at = log(low), log(high), log(at)
    return (at - low) / (high - low)


def _judge(claim: Claim, ours: Estimate) -> Verdict:
    least = -inf if claim.form.endswith("at-most") else claim.published - claim.tolerance
    most = inf if claim.form == "at-least" else claim.published + claim.tolerance
    is_drawn = claim.form != "order" and isfinite(ours.high - ours.low)  # an order is kept in every seed, or is not
    low, high = (ours.low, ours.high) if is_drawn else (ours.middle, ours.middle)
    if least <= low and high <= most:
        return Verdict.AGREES
    if low <= most and least <= high:
        return Verdict.OPEN
    if claim.form not in ("change", "overhead", "ratio", "crossing-ratio"):
        return Verdict.DIFFERS
    nothing = 0.0 if claim.form in ("change", "overhead") else 1.0
    is_clear = abs(ours.middle - nothing) >= LEAST and (low == high or not low <= nothing <= high)
    if is_clear and (ours.middle - nothing) * (claim.published - nothing) > 0:
        return Verdict.DIRECTION
    return Verdict.DIFFERS


def overall(comparisons: Seq[Comparison]) -> Verdict | None:
    """Return the verdict of an experiment's worst claim, ``None`` without claims."""
    verdicts = [one.verdict for one in comparisons]
    for verdict in (Verdict.ONE_RUN, Verdict.DIFFERS, Verdict.NOT_REACHED, Verdict.DIRECTION, Verdict.OPEN):
        if verdict in verdicts:
            return verdict
    return Verdict.AGREES if verdicts else None
