"""Cost profiles: measured costs of a live engine's steps and loads, in a JSON file.

A step is a sum of terms, each a non-negative number of seconds per unit of one feature. Only matrix products are not
linear in the number of rows: a few rows are bound by reads of the weights, many by arithmetic. Their time is linear
between knots.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import msgspec

from manylora.core.adapters.shape import BaseShape
from manylora.core.costs.features import StepFeatures
from manylora.core.errors import ConfigError

__all__ = [
    "TERMS",
    "TIERS",
    "CostProfile",
    "DriftComponent",
    "FitError",
    "LoadCost",
    "Noise",
    "RowTimes",
    "SpeedDrift",
    "StepCost",
    "read_profile",
    "term_units",
]

FORMAT = 1
TIERS = ("host", "device")

TERMS: Mapping[str, str] = {
    "step": "step",
    "sequence": "sequence",
    "prompt": "prompt chunk",
    "sampled": "sampled row",
    "context_token": "token of KV read by a decoding row",
    "prompt_pair": "pair of query and key in a prompt",
    "adapted": "step with an adapter",
    "adapter": "distinct adapter",
    "rank": "rank of a distinct adapter",
    "decode_row_rank": "decoding row and rank",
    "prompt_row_rank": "prompt token and rank",
    "padded_row_rank": "adapted row and largest rank",
    "changed": "step with an adapter whose rows are not those of the step before",
}
"""Terms of a step beside its rows: name and unit."""


def term_units(features: StepFeatures) -> tuple[int, ...]:
    """Return a step's number of units of each of ``TERMS``, in their order."""
    return (
        1,
        features.num_decodes + features.num_prompts,
        features.num_prompts,
        features.num_sampled,
        features.context_tokens,
        features.prompt_pairs,
        features.num_adapters > 0,
        features.num_adapters,
        features.sum_rank,
        features.decode_row_rank,
        features.prompt_row_rank,
        features.num_adapted_decodes * features.max_rank,
        features.is_changed > 0 and features.num_adapters > 0,
    )


class RowTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a number of rows: monotone, and linear between knots."""

    knots: tuple[int, ...]  # numbers of rows, rising; the first is 0
    row_s: tuple[float, ...]  # seconds per row from each knot to the next; the last has no end


class StepCost:
    """Prices steps by a profile's terms, prepared for one call per step.

    Args:
        terms: Seconds per unit, by name; a missing term is 0.
    """

    def __init__(self, terms: Mapping[str, float], rows: RowTimes) -> None:
        self._terms = tuple(terms.get(name, 0.0) for name in TERMS)
        self._knots, self._row_s = rows.knots, rows.row_s
        costs = (one * (end - start) for one, (start, end) in zip(rows.row_s, pairwise(rows.knots), strict=False))
        self._totals = tuple(accumulate(costs, initial=0.0))  # seconds of the number of rows at each knot

    def seconds(self, features: StepFeatures) -> float:
        """Return the duration of a step on the device, in seconds."""
        num_rows = features.num_decodes + features.num_prompt_tokens
        at = bisect_right(self._knots, num_rows) - 1
        seconds = self._totals[at] + self._row_s[at] * (num_rows - self._knots[at])
        for cost, units in zip(self._terms, term_units(features), strict=True):
            seconds += cost * units
        return seconds


class LoadCost(msgspec.Struct, frozen=True, kw_only=True):
    """Duration of a load on an idle link: a constant and seconds per byte.

    ``num_measured`` is the number of loads it was fitted from; 0 for a guess.
    """

    fixed_s: float
    byte_s: float
    num_measured: int = 0


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of measured over fitted times."""

    mean: float  # mean measured over mean fitted: the factor of a simulation without noise
    quantiles: tuple[float, ...]  # evenly spaced quantiles, from the least to the largest, from which noise is drawn


class DriftComponent(msgspec.Struct, frozen=True, kw_only=True):
    """Drift of the machine's speed on one time scale; see ``lab/costs/fitted.py``."""

    size: float  # standard deviation of the logarithm of step times: 0.2 is a fifth slower or faster
    length_s: float  # time constant in seconds, after which the correlation is 1/e


class SpeedDrift(msgspec.Struct, frozen=True, kw_only=True):
    """The part of steps' noise that is correlated in time, and the rest."""

    components: tuple[DriftComponent, ...]  # from short to long
    noise: dict[str, Noise]  # independent noise of each step without drift, by ``decode`` and ``prompt``


class FitError(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of a fit on steps held out."""

    regime: str  # ``decode``, ``prefill`` or ``mixed``
    num_steps: int  # steps held out
    mean_s: float  # mean time of these steps, in seconds
    r2: float  # share of the variance explained
    median_error: float  # median of the relative error of the typical duration, which has the median of the noise
    p90_error: float  # 90th percentile of that relative error
    # ``r2`` without the machine's drift, as estimated from the steps before and after; ``None`` for a steady machine.
    steady_r2: float | None = None


class CostProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Measured costs from which a live engine can be simulated."""

    base: BaseShape  # the base model's shape
    num_pages: int  # pages in the pool of the measured engine
    machine: str
    lora_kernel: str
    command: str  # the command that wrote this profile
    terms: dict[str, float]  # seconds per unit, by the names in ``TERMS``
    rows: RowTimes
    turn_s: float  # time of a turn of the loop beside the step (planning, waking up), in seconds
    turn_sequence_s: float  # the same per sequence
    loads: dict[str, LoadCost]  # costs of loads, by tier: ``host`` (from disk) and ``device`` (from the host)
    # Noise of ``decode`` (steps without a prompt), ``prompt`` (other steps), ``host`` and ``device`` (loads).
    noise: dict[str, Noise]
    # Slowdown of a step by a concurrent load, in seconds per second of the load, by tier.
    interference: dict[str, float]
    errors: tuple[FitError, ...]  # on steps held out
    num_steps: int  # steps it was fitted from
    reads_host: bool = False  # whether its steps can read adapters from host memory
    # Drift of the machine's speed; ``None`` if steady, or if an older version wrote the profile.
    speed_drift: SpeedDrift | None = None
    format: int = FORMAT  # version of this format

    def write(self, path: str | Path) -> None:
        """Write the profile as JSON, a line for each field."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items()]
        Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def read_profile(path: str | Path) -> CostProfile:
    """Read a profile, or raise ``ConfigError`` with the reason."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"Cannot read the cost profile {path}: {error.strerror}") from None
    try:
        profile = msgspec.json.decode(content, type=CostProfile)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not a cost profile of `manylora calibrate`: {error}") from None
    if profile.format != FORMAT:
        raise ConfigError(f"{path} is a cost profile of format {profile.format}, expected {FORMAT}: calibrate again")
    if unknown := sorted(set(profile.terms) - set(TERMS)):
        raise ConfigError(f"{path} has a term {unknown[0]!r}, expected one of {', '.join(TERMS)}")
    if fault := _fault_of(profile):
        raise ConfigError(f"{path} is not a cost profile of `manylora calibrate`: {fault}")
    return profile


def _fault_of(profile: CostProfile) -> str | None:
    """Return what no measurement gives, as of a file that was changed by hand."""
    rows, drift = profile.rows, profile.speed_drift
    loads = [cost for load in profile.loads.values() for cost in (load.fixed_s, load.byte_s)]
    noise = [*profile.noise.values(), *(() if drift is None else drift.noise.values())]
    factors = [factor for one in noise for factor in (one.mean, *one.quantiles)]
    costs = (*profile.terms.values(), *rows.row_s, profile.turn_s, profile.turn_sequence_s, *loads, *factors)
    if min(costs) < 0:
        return f"a cost of {min(costs)}"
    if rows.knots[:1] != (0,) or len(rows.row_s) != len(rows.knots) or list(rows.knots) != sorted(set(rows.knots)):
        return f"rows of {rows}, expected knots that rise from 0, and a cost for each"
    if set(profile.loads) != {*TIERS}:
        return f"loads to {', '.join(profile.loads)}, expected host and device"
    if not all(tier in TIERS and 0 <= share < 1 for tier, share in profile.interference.items()):
        return f"interference of {profile.interference}, expected shares below 1 of host and device"
    if not all(one.quantiles for one in noise):
        return "noise without quantiles"
    if drift is not None and not all(one.size >= 0 and one.length_s > 0 for one in drift.components):
        return f"speed drift of {drift.components}, expected sizes from 0 and lengths above 0"
    return None
