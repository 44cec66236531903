"""Step-time models of an engine, fitted to its own steps while it serves.

::

    step --every fourth--> StepLoad --observe--> sums of products, fading --fits--> padded    decode, prefill
                                                                                    unpadded  decode, prefill

Both kernel families are fitted to the same steps, so that the errors say which one runs. A step is predicted before it
is learnt from: these predictions give the errors *out of sample*. Steps that a machine delayed are weighed down in the
fit (Huber) and count in full in the errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from manylora.core.costs.online import StepLoad, solve_nonnegative
from manylora.core.costs.step_model import PRIOR, TOKEN_KNOTS, StepModel

__all__ = ["RankFit", "StepFit", "model_of"]

EVERY = 4  # one step in this many is observed, so that the cost of a step is not felt
FADE = 0.996  # factor on the weight of earlier steps: a memory of 250 observed steps
PRIOR_WEIGHT = 0.02  # weight of the prior in usual steps: enough to determine coefficients that the steps do not
SOLVE_EVERY = 16  # observed steps between two solutions
OUTLIER = 3.0  # error, in mean absolute errors, from which on a step is weighed down
LEAST_STEPS = 48  # observed steps from which on a fit is used


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFit:
    """One fitted line and its errors."""

    phase: str  # ``decode`` or ``prefill``
    family: str  # ``padded`` or ``unpadded``
    num_steps: int  # steps it was fitted to, since the start
    coefficients: tuple[float, ...]  # seconds per unit of each term of ``core/costs/step_model.py``
    # Share of the variance that it explains, among the steps it was fitted to; ``None`` without variance.
    r2: float | None
    error_s: float  # root mean square error among them, in seconds
    r2_out: float | None  # the same as ``r2`` of predictions made before each step was learnt from
    error_out_s: float  # root mean square error of these predictions, in seconds


class RankFit:
    """Fits both families to decode steps and to steps with prompts. Only for the engine's thread."""

    def __init__(self) -> None:
        self._num_seen = 0
        terms = PRIOR.step_s, PRIOR.request_s, PRIOR.context_s, PRIOR.rank_s, PRIOR.rank_s
        prompt = PRIOR.prompt_step_s, *PRIOR.token_s, PRIOR.prompt_context_s, PRIOR.token_rank_s, PRIOR.token_rank_s
        self._decode = _Lines("decode", (1.0, 32.0, 16_384.0, 1024.0, 1024.0), terms)
        self._prefill = _Lines("prefill", (1.0, *([256.0] * len(TOKEN_KNOTS)), 16_384.0, 8192.0, 8192.0), prompt)

    def is_due(self) -> bool:
        """Count a step; return whether it is to be observed."""
        self._num_seen += 1
        return self._num_seen % EVERY == 0

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn the duration of a step."""
        padded, unpadded = load.num_adapted * load.max_rank, load.sum_rank
        if load.is_decode:
            self._decode.observe((1.0, load.num_tokens, load.context, padded, unpadded), seconds)
        else:
            tokens = [max(0, load.num_tokens - knot) for knot in TOKEN_KNOTS]
            self._prefill.observe((1.0, *tokens, load.context, padded, unpadded), seconds)

    def fits(self) -> tuple[StepFit, ...]:
        """Return the lines that were fitted to enough steps: two for each phase, or none."""
        return (*self._decode.fits(), *self._prefill.fits())


def model_of(fits: Iterable[StepFit]) -> StepModel | None:
    """Return the step-time model of an engine: for each phase, the fit with the smallest error out of sample.

    Without a fit of prompts, or of decoding, that phase is priced by the prior; without any the result is ``None``.
    """
    best: dict[str, StepFit] = {}
    for fit in fits:
        if fit.phase not in best or fit.error_out_s < best[fit.phase].error_out_s:
            best[fit.phase] = fit
    if not best:
        return None
    decode, prefill = best.get("decode"), best.get("prefill")
    one = PRIOR.step_s, PRIOR.request_s, PRIOR.context_s, PRIOR.rank_s
    many = PRIOR.prompt_step_s, *PRIOR.token_s, PRIOR.prompt_context_s, PRIOR.token_rank_s
    step_s, request_s, context_s, rank_s = one if decode is None else decode.coefficients
    prompt_step_s, *token_s, prompt_context_s, token_rank_s = many if prefill is None else prefill.coefficients
    return StepModel(
        step_s=step_s,
        request_s=request_s,
        context_s=context_s,
        rank_s=rank_s,
        is_padded=decode is not None and decode.family == "padded",
        prompt_step_s=prompt_step_s,
        token_s=tuple(token_s),
        prompt_context_s=prompt_context_s,
        token_rank_s=token_rank_s,
        is_prompt_padded=prefill is not None and prefill.family == "padded",
    )


class _Errors:
    """Fading sums of errors, and of the values they are compared with."""

    def __init__(self) -> None:
        self.weight = self.error = self.value = self.square = 0.0

    def add(self, error: float, value: float) -> None:
        self.weight = self.weight * FADE + 1.0
        self.error = self.error * FADE + error * error
        self.value = self.value * FADE + value
        self.square = self.square * FADE + value * value

    def r2(self) -> float | None:
        return _r2(self.error, self.square - self.value * self.value / self.weight) if self.weight else None

    def rms(self) -> float:
        return math.sqrt(self.error / self.weight) if self.weight else 0.0


class _Lines:
    """The two families of one phase, over one set of sums; the last two terms are padded and unpadded.

    Features are in units of a ``usual`` step, for numerical stability. ``prior`` has seconds per unit of each term,
    before any step.
    """

    def __init__(self, phase: str, usual: tuple[float, ...], prior: tuple[float, ...]) -> None:
        self._phase = phase
        self._usual = usual
        size = len(usual)
        self._prior = [one * unit for one, unit in zip(prior, usual, strict=True)]
        self._gram = [[0.0] * size for _ in range(size)]
        self._moment = [0.0] * size
        self._square = 0.0
        self._num_steps = 0
        self._scale = 0.0
        shared = tuple(range(size - 2))
        self._families = {"padded": (*shared, size - 2), "unpadded": (*shared, size - 1)}
        self._solutions = {name: [self._prior[term] for term in terms] for name, terms in self._families.items()}
        self._errors = {name: _Errors() for name in self._families}

    def observe(self, features: Seq[float], seconds: float) -> None:
        values = [value / unit for value, unit in zip(features, self._usual, strict=True)]
        residuals = {
            name: seconds - sum([values[term] * one for term, one in zip(terms, self._solutions[name], strict=True)])
            for name, terms in self._families.items()
        }
        self._num_steps += 1
        if self._num_steps > SOLVE_EVERY:  # the first predictions come from the prior
            for name, residual in residuals.items():
                self._errors[name].add(residual, seconds)
        self._learn(values, seconds, self._weight(min(map(abs, residuals.values()))))
        if self._num_steps % SOLVE_EVERY == 0:
            self._solve()

    def fits(self) -> tuple[StepFit, ...]:
        if self._num_steps < LEAST_STEPS:
            return ()
        return tuple(self._fit(name) for name in self._families)

    def _weight(self, residual: float) -> float:
        """Return the weight of a step with that error, and learn the usual error."""
        usual = self._scale
        is_known = self._num_steps > LEAST_STEPS
        if self._num_steps > SOLVE_EVERY:
            self._scale += 0.02 * ((min(residual, 2 * OUTLIER * usual) if is_known else residual) - usual)
        return OUTLIER * usual / residual if is_known and residual > OUTLIER * usual > 0 else 1.0

    def _learn(self, values: Seq[float], seconds: float, weight: float) -> None:
        for row, value in enumerate(values):
            sums, part = self._gram[row], weight * value
            for column, other in enumerate(values):
                sums[column] = sums[column] * FADE + part * other
            self._moment[row] = self._moment[row] * FADE + part * seconds
        self._square = self._square * FADE + weight * seconds * seconds

    def _solve(self) -> None:
        for name, terms in self._families.items():
            gram = [[self._gram[row][column] + PRIOR_WEIGHT * (row == column) for column in terms] for row in terms]
            self._solutions[name] = solve_nonnegative(
                gram, [self._moment[term] + PRIOR_WEIGHT * self._prior[term] for term in terms]
            )

    def _fit(self, name: str) -> StepFit:
        terms, solution, errors = self._families[name], self._solutions[name], self._errors[name]
        product = sum(one * self._moment[term] for one, term in zip(solution, terms, strict=True))
        square = sum(
            one * other * self._gram[row][column]
            for one, row in zip(solution, terms, strict=True)
            for other, column in zip(solution, terms, strict=True)
        )
        error = max(0.0, self._square - 2 * product + square)
        weight = self._gram[0][0]  # of the constant
        return StepFit(
            phase=self._phase,
            family=name,
            num_steps=self._num_steps,
            coefficients=tuple(one / self._usual[term] for one, term in zip(solution, terms, strict=True)),
            r2=_r2(error, self._square - self._moment[0] ** 2 / weight),
            error_s=math.sqrt(error / weight),
            r2_out=errors.r2(),
            error_out_s=errors.rms(),
        )


def _r2(error: float, variance: float) -> float | None:
    """Return the explained share; ``None`` where all steps take the same time."""
    return 1.0 - error / variance if variance > 1e-12 else None
