"""From step logs to a cost profile, and how far to trust it.

Terms are fitted to relative errors (a decode step of milliseconds counts as much as a prompt of seconds), robustly
(a step that something else held up is no measurement of it), and none is negative. Errors are those of a fit on three
quarters of the log for the fourth it has not seen; whole stretches of the log are held out, for neighbouring steps are
nearly the same. The profile itself is then fitted on everything.

Source: CaraServe, section 5, fits prefill and decode apart, by linear regression on the sum of ranks (unpadded
kernels) or on the batch times the largest rank (padded); here both are terms of one model, for a step may hold both
phases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from manylora.engine.features import StepFeatures
from manylora.engine.step_log import LoadRecord, LogHeader, LogLine, StepRecord
from manylora.errors import ConfigError
from manylora.sim.least_squares import Array, fit_nonnegative, fit_robustly
from manylora.sim.profile import TERMS, CostProfile, FitError, LoadCost, Noise, RowCost, StepCost, term_units

__all__ = ["LEAST_STEPS", "fit_profile", "regime_of", "split_log", "step_shares"]

LEAST_STEPS = 40
"""Steps below which a fit would be a guess."""

STRETCH = 20
"""Steps in a stretch of the log; every fourth stretch is held out."""

IN_SEGMENT = 12
"""Steps that must lie between two knots."""

NUM_QUANTILES = 101

GUESSED_LOADS = {"host": LoadCost(fixed_s=0.0, byte_s=1 / 2e9), "device": LoadCost(fixed_s=0.0, byte_s=1 / 16e9)}
"""For tiers that a log has no load to: an NVMe disk, a PCIe 4 link."""


def regime_of(features: StepFeatures) -> str:
    """Return ``decode``, ``prefill`` or ``mixed``."""
    if not features.num_prompts:
        return "decode"
    return "mixed" if features.num_decodes else "prefill"


def split_log(lines: Iterable[LogLine]) -> tuple[LogHeader, list[StepRecord], list[LoadRecord]]:
    """Sort a log's lines; several runs may follow each other if they are of one engine.

    Raises:
        ConfigError: There is no header, or two name different models, machines or kernels.
    """
    header: LogHeader | None = None
    steps, loads = [], []
    for line in lines:
        match line:
            case StepRecord():
                steps.append(line)
            case LoadRecord():
                loads.append(line)
            case LogHeader():
                if header is not None and _identity(header) != _identity(line):
                    raise ConfigError(
                        f"The logs are of different engines: {_identity(header)} and {_identity(line)}; "
                        "a profile is of one"
                    )
                header = header or line
    if header is None:
        raise ConfigError("The log is empty")
    return header, steps, loads


def _identity(header: LogHeader) -> tuple[str, str, str]:
    return header.base.fingerprint, header.machine, header.lora_kernel


def fit_profile(lines: Iterable[LogLine], *, command: str = "") -> CostProfile:
    """Fit a profile to step logs.

    Args:
        lines: The logs, one after the other.
        command: What to write into the profile as its origin.

    Raises:
        ConfigError: The logs are of different engines, or too short.
    """
    header, steps, loads = split_log(lines)
    if len(steps) < LEAST_STEPS:
        raise ConfigError(f"The log has {len(steps)} steps, expected {LEAST_STEPS} at least")
    is_held_out = [index // STRETCH % 4 == 3 for index in range(len(steps))]
    kept = [step for step, is_out in zip(steps, is_held_out, strict=True) if not is_out]
    held_out = [step for step, is_out in zip(steps, is_held_out, strict=True) if is_out]
    errors = tuple(_errors(_StepFit(kept), held_out))
    fit = _StepFit(steps)
    load_costs = {tier: _fit_loads([load for load in loads if load.tier.value == tier], tier) for tier in GUESSED_LOADS}
    return CostProfile(
        base=header.base,
        num_pages=header.num_pages,
        machine=header.machine,
        lora_kernel=header.lora_kernel,
        command=command,
        terms=fit.terms,
        rows=fit.rows,
        turn_s=fit.turn[0],
        turn_sequence_s=fit.turn[1],
        loads={tier: cost for tier, (cost, _) in load_costs.items()},
        noise={**fit.noise, **{tier: noise for tier, (_, noise) in load_costs.items() if noise is not None}},
        errors=errors,
        num_steps=len(steps),
    )


def step_shares(profile: CostProfile, features: Sequence[StepFeatures]) -> dict[str, float]:
    """Return which share of steps' fitted time each term has; ``rows`` and ``turn`` beside the names in ``TERMS``."""
    units = np.array([term_units(one) for one in features], dtype=np.float64).sum(axis=0).tolist()
    seconds = {name: profile.terms.get(name, 0.0) * amount for name, amount in zip(TERMS, units, strict=True)}
    rows = StepCost({}, profile.rows)
    seconds["rows"] = sum(rows.seconds(one) for one in features)
    num_sequences = sum(one.num_sequences for one in features)
    seconds["turn"] = profile.turn_s * len(features) + profile.turn_sequence_s * num_sequences
    total = sum(seconds.values())
    return {name: amount / total for name, amount in seconds.items()}


class _StepFit:
    """Terms, rows, turns and noise, fitted to steps."""

    def __init__(self, steps: Sequence[StepRecord]) -> None:
        features = [step.features for step in steps]
        took = np.array([step.took_s for step in steps])
        device = np.array([step.took_s if step.device_s is None else step.device_s for step in steps])
        knots = _knots([one.num_tokens for one in features])
        terms = np.array([term_units(one) for one in features], dtype=np.float64)
        coefficients = fit_robustly(np.hstack([terms, _segments(features, knots)]), device)
        self.terms = dict(zip(TERMS, coefficients[: len(TERMS)].tolist(), strict=True))
        self.rows = RowCost(knots=knots, row_s=tuple(coefficients[len(TERMS) :].tolist()))
        sizes = np.array([[1.0, one.num_sequences] for one in features])
        self.turn: tuple[float, float] = tuple(fit_nonnegative(sizes, took - device).tolist())
        self._cost = StepCost(self.terms, self.rows)
        is_prompt = np.array([one.num_prompts > 0 for one in features])
        fitted = self.fitted(features)
        kinds: Mapping[str, Array] = {"decode": ~is_prompt, "prompt": is_prompt}
        self.noise = {kind: _noise(took[of], fitted[of]) for kind, of in kinds.items() if of.any()}

    def fitted(self, features: Sequence[StepFeatures]) -> Array:
        """Return what the terms say steps take from turn to turn, before the mean of their noise."""
        return np.array([self._cost.seconds(one) + self.turn[0] + self.turn[1] * one.num_sequences for one in features])

    def foretold(self, features: Sequence[StepFeatures]) -> Array:
        """Return what a simulation without jitter takes for steps."""
        factors = [self.noise.get("prompt" if one.num_prompts else "decode") for one in features]
        means = np.array([1.0 if factor is None else factor.mean for factor in factors])
        seconds: Array = self.fitted(features) * means
        return seconds


def _knots(num_rows: Sequence[int]) -> tuple[int, ...]:
    """Return powers of two with enough steps between them, so that no slope hangs on a few."""
    knots = [0]
    for knot in (1 << power for power in range(20)):
        num_between = sum(knots[-1] < one <= knot for one in num_rows)
        num_beyond = sum(one > knot for one in num_rows)
        if num_between >= IN_SEGMENT and num_beyond >= IN_SEGMENT:
            knots.append(knot)
    return tuple(knots)


def _segments(features: Sequence[StepFeatures], knots: Sequence[int]) -> Array:
    """Return how many of each step's rows lie between every knot and the next, ``[n, knots]``."""
    rows = np.array([one.num_tokens for one in features], dtype=np.float64)
    ends = np.array([*knots[1:], np.inf])
    counts: Array = np.clip(rows[:, None], np.array(knots), ends) - np.array(knots)
    return counts


def _noise(measured: Array, fitted: Array) -> Noise:
    quantiles = np.quantile(measured / fitted, np.linspace(0.0, 1.0, NUM_QUANTILES))
    return Noise(
        mean=round(float(measured.sum() / fitted.sum()), 4), quantiles=tuple(round(float(one), 4) for one in quantiles)
    )


def _fit_loads(loads: Sequence[LoadRecord], tier: str) -> tuple[LoadCost, Noise | None]:
    """Fit loads that succeeded; where the executor does not measure, those alone on their link."""
    done = [load for load in loads if load.error is None]
    lone = []
    free_at = float("-inf")
    for load in sorted(done, key=lambda one: one.launched_at):
        if load.device_s is not None:
            lone.append((load.num_bytes, load.device_s))
        elif load.launched_at >= free_at:
            lone.append((load.num_bytes, load.ended_at - load.launched_at))
        free_at = max(free_at, load.ended_at)
    if len(lone) < 2:
        return GUESSED_LOADS[tier], None
    sizes, seconds = np.array(lone, dtype=np.float64).T
    matrix = np.column_stack([np.ones_like(sizes), sizes])
    fixed_s, byte_s = fit_robustly(matrix, seconds).tolist()
    return (
        LoadCost(fixed_s=fixed_s, byte_s=byte_s, num_measured=len(lone)),
        _noise(seconds, matrix @ np.array([fixed_s, byte_s])),
    )


def _errors(fit: _StepFit, steps: Sequence[StepRecord]) -> Iterable[FitError]:
    for regime in ("decode", "prefill", "mixed"):
        of = [step for step in steps if regime_of(step.features) == regime]
        if len(of) < 2:
            continue
        measured = np.array([step.took_s for step in of])
        residuals = fit.foretold([step.features for step in of]) - measured
        relative = np.abs(residuals) / measured
        variance = float(((measured - measured.mean()) ** 2).sum())
        yield FitError(
            regime=regime,
            num_steps=len(of),
            mean_s=float(measured.mean()),
            r2=1.0 - float((residuals**2).sum()) / variance if variance else 0.0,
            median_error=float(np.median(relative)),
            p90_error=float(np.quantile(relative, 0.9)),
        )
