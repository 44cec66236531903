"""Calibration: fit a cost profile to step logs, and estimate its errors.

Terms minimise relative errors (a decode step of milliseconds counts as much as a prompt of seconds), are robust to
steps delayed by other work, and are not negative. Errors are those of a fit to three quarters of the log on the fourth
quarter; whole stretches of the log are held out, because neighbouring steps are nearly equal. The profile itself is
fitted to the whole log.

Source: CaraServe, section 5, fits prefill and decode separately, by linear regression on the sum of ranks (unpadded
kernels) or on the batch times the largest rank (padded). Here both are terms of one model, because a step may contain
both phases.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from manylora.core.costs.features import StepFeatures
from manylora.core.costs.step_log import LoadRecord, LogHeader, LogLine, StepRecord
from manylora.core.errors import ConfigError
from manylora.lab.costs.drift import Array, DriftEstimate, estimate_drift, fit_nonnegative, noise_within, speed_between
from manylora.lab.costs.profile import (
    TERMS,
    TIERS,
    CostProfile,
    FitError,
    LoadCost,
    Noise,
    RowTimes,
    SpeedDrift,
    StepCost,
    term_units,
)

__all__ = ["fit_profile", "fit_robustly", "noise_of", "predict_times", "regime_of", "split_log", "step_shares"]

LEAST_STEPS = 40  # least number of steps for a fit
STRETCH = 20  # steps in a stretch of the log; every fourth stretch is held out
IN_SEGMENT = 12  # least number of steps between two knots

NUM_QUANTILES = 101

HUBER = 1.345  # residuals beyond so many standard deviations count linearly, not squared: Huber's usual choice
ROUNDS = 10  # rounds of reweighting; coefficients converge well before
RUNS_APART_S = 1e6  # seconds between two runs of a log: longer than any drift component
MOST_INTERFERENCE = 0.9  # largest slowdown of a step by a concurrent load

GUESSED_LOADS = {"host": LoadCost(fixed_s=0.0, byte_s=1 / 2e9), "device": LoadCost(fixed_s=0.0, byte_s=1 / 16e9)}
"""For tiers without a load in the log: an NVMe disk, a PCIe 4 link."""


def regime_of(features: StepFeatures) -> str:
    """Return ``decode``, ``prefill`` or ``mixed``."""
    if not features.num_prompts:
        return "decode"
    return "mixed" if features.num_decodes else "prefill"


def split_log(lines: Iterable[LogLine]) -> tuple[LogHeader, list[StepRecord], list[LoadRecord]]:
    """Return the header, steps and loads of a log; several runs may follow each other if they are of one engine.

    Each run has its own clock: later runs are shifted behind earlier ones, far enough to be uncorrelated.
    ``ConfigError`` if there is no header, or two name different models, machines or kernels.
    """
    header: LogHeader | None = None
    steps: list[StepRecord] = []
    loads: list[LoadRecord] = []
    shift_s: float | None = 0.0  # unknown until a later run's first line
    latest = -math.inf
    for line in lines:
        match line:
            case StepRecord() | LoadRecord():
                if shift_s is None:
                    shift_s = latest + RUNS_APART_S - line.launched_at
                if shift_s:
                    ends_at = line.ended_at + shift_s
                    line = msgspec.structs.replace(line, launched_at=line.launched_at + shift_s, ended_at=ends_at)
                latest = max(latest, line.ended_at)
                if isinstance(line, StepRecord):
                    steps.append(line)
                else:
                    loads.append(line)
            case LogHeader():
                shift_s = 0.0 if latest == -math.inf else None
                if header is not None and _identity(header) != _identity(line):
                    raise ConfigError(
                        f"The logs are of different engines: {_identity(header)} and {_identity(line)}; "
                        "a profile is of one"
                    )
                header = header or line
    if header is None:
        raise ConfigError("The log has no header: it is empty, or its beginning is missing")
    return header, steps, loads


def _identity(header: LogHeader) -> tuple[str, str, str]:
    return header.base.fingerprint, header.machine, header.lora_kernel


def fit_profile(lines: Iterable[LogLine], *, command: str = "") -> CostProfile:
    """Fit a profile to the lines of step logs; ``command`` is written into it as its origin.

    ``ConfigError`` if the logs are of different engines, or too short.
    """
    header, steps, loads = split_log(lines)
    if len(steps) < LEAST_STEPS:
        raise ConfigError(f"Got {len(steps)} steps in the logs, expected {LEAST_STEPS} or more")
    is_held_out = [index // STRETCH % 4 == 3 for index in range(len(steps))]
    kept = [step for step, is_out in zip(steps, is_held_out, strict=True) if not is_out]
    held_out = [step for step, is_out in zip(steps, is_held_out, strict=True) if is_out]
    errors = tuple(_errors(_fit(header, kept, loads, ()), kept, held_out, loads))
    profile = msgspec.structs.replace(_fit(header, steps, loads, errors), command=command)
    return msgspec.structs.replace(profile, speed_drift=_speed_drift(profile, _components(profile, steps, loads)))


def predict_times(
    profile: CostProfile, steps: Sequence[StepRecord], loads: Sequence[LoadRecord], *, is_typical: bool = False
) -> Array:
    """Return the durations of steps beside these loads in a simulation, in seconds, ``[n]``.

    With ``is_typical`` a duration has the median of the machine's noise, otherwise the mean, which is twice as large
    where one step in ten waits for another process.
    """
    beside = _beside(steps, loads) @ np.array([profile.interference[tier] for tier in TIERS])
    factors = np.ones(len(steps))
    for index, step in enumerate(steps):
        noise = profile.noise.get("prompt" if step.features.num_prompts else "decode")
        if noise is not None:
            factors[index] = noise.quantiles[len(noise.quantiles) // 2] if is_typical else noise.mean
    predicted: Array = _fitted(profile, steps) * factors + beside
    return predicted


def step_shares(profile: CostProfile, features: Sequence[StepFeatures]) -> dict[str, float]:
    """Return each term's share of steps' fitted time, by the names in ``TERMS``, ``rows`` and ``turn``."""
    units = np.array([term_units(one) for one in features], dtype=np.float64).sum(axis=0).tolist()
    seconds = {name: profile.terms.get(name, 0.0) * amount for name, amount in zip(TERMS, units, strict=True)}
    rows = StepCost({}, profile.rows)
    seconds["rows"] = sum(rows.seconds(one) for one in features)
    num_sequences = sum(one.num_sequences for one in features)
    seconds["turn"] = profile.turn_s * len(features) + profile.turn_sequence_s * num_sequences
    total = sum(seconds.values())
    return {name: amount / total for name, amount in seconds.items()}


def _fit(
    header: LogHeader, steps: Sequence[StepRecord], loads: Sequence[LoadRecord], errors: tuple[FitError, ...]
) -> CostProfile:
    """Fit everything but the drift."""
    features = [step.features for step in steps]
    took = np.array([step.took_s for step in steps])
    device = np.array([step.took_s if step.device_s is None else step.device_s for step in steps])
    beside = _beside(steps, loads)
    knots = _knots([one.num_tokens for one in features])
    units = np.array([term_units(one) for one in features], dtype=np.float64)
    coefficients = fit_robustly(np.hstack([units, _segments(features, knots), beside]), device).tolist()
    terms, interference = coefficients[: len(TERMS)], coefficients[-len(TIERS) :]
    sizes = np.array([[1.0, one.num_sequences] for one in features])
    turn_s, turn_sequence_s = fit_nonnegative(sizes, took - device).tolist()
    load_costs = {tier: _fit_loads([load for load in loads if load.tier.value == tier], tier) for tier in TIERS}
    profile = CostProfile(
        base=header.base,
        num_pages=header.num_pages,
        machine=header.machine,
        lora_kernel=header.lora_kernel,
        command="",
        terms=dict(zip(TERMS, terms, strict=True)),
        rows=RowTimes(knots=knots, row_s=tuple(coefficients[len(TERMS) : -len(TIERS)])),
        turn_s=turn_s,
        turn_sequence_s=turn_sequence_s,
        loads={tier: cost for tier, (cost, _) in load_costs.items()},
        noise={},
        interference={tier: min(one, MOST_INTERFERENCE) for tier, one in zip(TIERS, interference, strict=True)},
        errors=errors,
        num_steps=len(steps),
        reads_host=header.reads_host,
    )
    # A step that loads to both tiers hardly delayed would have taken no time, or less: no noise could be drawn from it.
    undisturbed = took - beside @ np.array(list(profile.interference.values()))
    undisturbed = np.maximum(undisturbed, (1.0 - MOST_INTERFERENCE) * took)
    is_prompt = np.array([one.num_prompts > 0 for one in features])
    fitted = _fitted(profile, steps)
    noise = {
        kind: noise_of(undisturbed[of], fitted[of])
        for kind, of in (("decode", ~is_prompt), ("prompt", is_prompt))
        if of.any()
    }
    noise |= {tier: one for tier, (_, one) in load_costs.items() if one is not None}
    return msgspec.structs.replace(profile, noise=noise)


def _fitted(profile: CostProfile, steps: Sequence[StepRecord]) -> Array:
    """Return the durations of steps from turn to turn by their terms, without noise, in seconds."""
    cost = StepCost(profile.terms, profile.rows)
    turn_s, sequence_s = profile.turn_s, profile.turn_sequence_s
    return np.array([cost.seconds(one.features) + turn_s + sequence_s * one.features.num_sequences for one in steps])


def _knots(num_rows: Sequence[int]) -> tuple[int, ...]:
    """Return powers of two with enough steps between them, so that no slope depends on a few steps."""
    knots = [0]
    for knot in (1 << power for power in range(20)):
        num_between = sum(knots[-1] < one <= knot for one in num_rows)
        num_beyond = sum(one > knot for one in num_rows)
        if num_between >= IN_SEGMENT and num_beyond >= IN_SEGMENT:
            knots.append(knot)
    return tuple(knots)


def _segments(features: Sequence[StepFeatures], knots: Sequence[int]) -> Array:
    """Return each step's number of rows between every knot and the next, ``[n, knots]``."""
    rows = np.array([one.num_tokens for one in features], dtype=np.float64)
    ends = np.array([*knots[1:], np.inf])
    counts: Array = np.clip(rows[:, None], np.array(knots), ends) - np.array(knots)
    return counts


def _beside(steps: Sequence[StepRecord], loads: Sequence[LoadRecord]) -> Array:
    """Return the overlap of each step with loads to each tier, in seconds, ``[n, tiers]``."""
    begins, ends = np.array([step.launched_at for step in steps]), np.array([step.ended_at for step in steps])
    beside = np.zeros((len(steps), len(TIERS)))
    for column, tier in enumerate(TIERS):
        for begins_at, ends_at in _spans(load for load in loads if load.tier.value == tier):
            beside[:, column] += np.clip(np.minimum(ends, ends_at) - np.maximum(begins, begins_at), 0.0, None)
    return beside


def _spans(loads: Iterable[LoadRecord]) -> Iterable[tuple[float, float]]:
    """Yield start and end of loads of one tier, without their wait for the link."""
    free_at = -math.inf
    for load in sorted(loads, key=lambda one: one.ended_at):
        waited_until = max(load.launched_at, free_at)
        yield waited_until if load.device_s is None else load.ended_at - load.device_s, load.ended_at
        free_at = load.ended_at


def noise_of(measured: Array, fitted: Array) -> Noise:
    """Return the noise, with a last quantile that gives the draws beyond the one before it their measured mean.

    Draws are uniform between neighbouring quantiles: with the maximum as the last quantile, a single load of a hundred
    times the duration would make one load in a hundred take fifty times.
    """
    ratios = np.sort(measured / fitted)
    quantiles = np.quantile(ratios, np.linspace(0.0, 1.0, NUM_QUANTILES))
    highest = ratios[-max(1, len(ratios) // (NUM_QUANTILES - 1)) :]
    quantiles[-1] = np.clip(2.0 * highest.mean() - quantiles[-2], quantiles[-2], ratios[-1])
    return Noise(
        mean=round(float(measured.sum() / fitted.sum()), 4), quantiles=tuple(round(float(one), 4) for one in quantiles)
    )


def _fit_loads(loads: Sequence[LoadRecord], tier: str) -> tuple[LoadCost, Noise | None]:
    """Fit loads that succeeded, without their wait for the link."""
    spans = _spans(loads)
    done = sorted(loads, key=lambda one: one.ended_at)
    lone = [
        (load.num_bytes, ends_at - begins_at)
        for load, (begins_at, ends_at) in zip(done, spans, strict=True)
        if load.error is None
    ]
    if len(lone) < 2:
        return GUESSED_LOADS[tier], None
    sizes, seconds = np.array(lone, dtype=np.float64).T
    matrix = np.column_stack([np.ones_like(sizes), sizes])
    fixed_s, byte_s = fit_robustly(matrix, seconds).tolist()
    return (
        LoadCost(fixed_s=fixed_s, byte_s=byte_s, num_measured=len(lone)),
        noise_of(seconds, matrix @ np.array([fixed_s, byte_s])),
    )


def _components(profile: CostProfile, steps: Sequence[StepRecord], loads: Sequence[LoadRecord]) -> DriftEstimate:
    began_at, took = np.array([(step.launched_at, step.took_s) for step in steps]).T
    return estimate_drift(began_at, took, predict_times(profile, steps, loads))


def _middles(steps: Sequence[StepRecord]) -> Array:
    return np.array([(step.launched_at + step.ended_at) / 2 for step in steps])


def _speed_drift(profile: CostProfile, found: DriftEstimate) -> SpeedDrift | None:
    if not found.components:
        return None
    noise = {kind: noise_within(one, found.share) for kind, one in profile.noise.items() if kind not in TIERS}
    return SpeedDrift(components=found.components, noise=noise)


def _errors(
    profile: CostProfile, kept: Sequence[StepRecord], held_out: Sequence[StepRecord], loads: Sequence[LoadRecord]
) -> Iterable[FitError]:
    """Yield the errors of a fit to the steps ``kept`` on those held out, with and without the machine's drift."""
    found = _components(profile, kept, loads)
    speeds = np.ones(len(held_out))
    if found.components:
        known_at = _middles(kept)
        known = np.array([step.took_s for step in kept]) / predict_times(profile, kept, loads)
        speeds = speed_between(found, _middles(held_out), known_at, known)
    for regime in ("decode", "prefill", "mixed"):
        of = [index for index, step in enumerate(held_out) if regime_of(step.features) == regime]
        if len(of) < 2:
            continue
        steps = [held_out[index] for index in of]
        measured, predicted = np.array([step.took_s for step in steps]), predict_times(profile, steps, loads)
        relative = np.abs(predict_times(profile, steps, loads, is_typical=True) / measured - 1.0)
        yield FitError(
            regime=regime,
            num_steps=len(of),
            mean_s=float(measured.mean()),
            r2=_explained(measured, predicted),
            median_error=float(np.median(relative)),
            p90_error=float(np.quantile(relative, 0.9)),
            steady_r2=_explained(measured / speeds[of], predicted) if found.components else None,
        )


def _explained(measured: Array, predicted: Array) -> float:
    variance = float(((measured - measured.mean()) ** 2).sum())
    return 1.0 - float(((predicted - measured) ** 2).sum()) / variance if variance else 0.0


def fit_robustly(matrix: Array, seconds: Array) -> Array:
    """Return ``x >= 0`` ``[k]`` that minimises *relative* errors of ``[n, k]`` and ``[n]``, robust to outliers.

    Short steps count as much as long ones. Residuals of steps delayed by other work are down-weighted by Huber's rule,
    from round to round. A row, a byte or an adapter never makes a step shorter, so no coefficient is negative.
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
