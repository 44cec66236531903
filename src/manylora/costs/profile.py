"""A cost profile: what a live engine's steps and loads cost, as numbers in a file.

A step is a sum of terms, each a number of seconds per unit of one feature, none negative. Only the matrix products need
more than a straight line in the number of rows: a few rows cost what reading the weights costs, many what multiplying
by them does. Their time is linear between knots.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from manylora.adapters.shape import BaseShape
from manylora.costs.features import StepFeatures
from manylora.errors import ConfigError

__all__ = [
    "TERMS",
    "CostProfile",
    "DriftComponent",
    "FitError",
    "LoadCost",
    "Noise",
    "RowCost",
    "SpeedDrift",
    "StepCost",
    "read_profile",
    "term_units",
]

FORMAT = 1

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
}
"""Terms of a step beside its rows: name, and what one unit of it is."""


def term_units(features: StepFeatures) -> tuple[int, ...]:
    """Return how many units of each of ``TERMS`` a step has, in their order."""
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
    )


class RowCost(msgspec.Struct, frozen=True, kw_only=True):
    """What rows cost, row by row: monotone, and linear between knots.

    Args:
        knots: Numbers of rows, rising; the first is 0.
        row_s: Seconds per row beyond each knot, up to the next; the last goes on for ever.
    """

    knots: tuple[int, ...]
    row_s: tuple[float, ...]

    def totals(self) -> tuple[float, ...]:
        """Return the seconds of as many rows as each knot says."""
        totals = [0.0]
        for index in range(1, len(self.knots)):
            totals.append(totals[-1] + self.row_s[index - 1] * (self.knots[index] - self.knots[index - 1]))
        return tuple(totals)


class StepCost:
    """Prices steps by features: a profile's terms, made ready to be asked every step.

    Args:
        terms: Seconds per unit by name; what is not named costs nothing.
        rows: What rows cost.
    """

    def __init__(self, terms: Mapping[str, float], rows: RowCost) -> None:
        self._terms = tuple(terms.get(name, 0.0) for name in TERMS)
        self._knots, self._row_s, self._totals = rows.knots, rows.row_s, rows.totals()

    def seconds(self, features: StepFeatures) -> float:
        """Return what the device takes for a step, in seconds."""
        num_rows = features.num_decodes + features.num_prompt_tokens
        at = bisect_right(self._knots, num_rows) - 1
        seconds = self._totals[at] + self._row_s[at] * (num_rows - self._knots[at])
        for cost, units in zip(self._terms, term_units(features), strict=True):
            seconds += cost * units
        return seconds


class LoadCost(msgspec.Struct, frozen=True, kw_only=True):
    """What a load costs on an idle link.

    Args:
        fixed_s: Seconds, whatever its size.
        byte_s: Seconds per byte.
        num_measured: Loads it was fitted from; 0 says that it is a guess.
    """

    fixed_s: float
    byte_s: float
    num_measured: int = 0


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """How measured times lie about fitted ones.

    Args:
        mean: Mean measured over mean fitted: what a simulation without jitter multiplies by.
        quantiles: Measured over fitted, from the least to the largest in equal shares: what jitter is drawn from.
    """

    mean: float
    quantiles: tuple[float, ...]


class DriftComponent(msgspec.Struct, frozen=True, kw_only=True):
    """How the machine's speed wanders at one scale of time; see ``costs/speed.py``.

    Args:
        size: Standard deviation of the logarithm of steps' times: 0.2 is a fifth slower or faster.
        length_s: Time after which a spell is forgotten but for 1/e of it, in seconds.
    """

    size: float
    length_s: float


class SpeedDrift(msgspec.Struct, frozen=True, kw_only=True):
    """What of the noise in steps has a memory, and what is left without it.

    Args:
        components: Slow and fast components, from short to long.
        noise: As the profile's, by ``decode`` and ``prompt``, of steps within a spell: what each step draws afresh.
    """

    components: tuple[DriftComponent, ...]
    noise: dict[str, Noise]


class FitError(msgspec.Struct, frozen=True, kw_only=True):
    """How well a fit foretells steps that it has not seen.

    Args:
        regime: ``decode``, ``prefill`` or ``mixed``.
        num_steps: Steps held out.
        mean_s: Their mean time, in seconds.
        r2: Share of the variance explained.
        median_error: Median of the relative error.
        p90_error: Its 90th percentile.
        steady_r2: Share explained of what is left when the machine's speed is taken out, as the steps before and after
            those held out show it; ``None`` where no components were found.
    """

    regime: str
    num_steps: int
    mean_s: float
    r2: float
    median_error: float
    p90_error: float
    steady_r2: float | None = None


class CostProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulated engine needs to take the place of a live one.

    Args:
        base: The base model's shape.
        num_pages: Pages in the pool of the engine that was measured.
        machine: What it ran on, in words.
        lora_kernel: Which implementation of adapters' arithmetic.
        command: What made this profile.
        terms: Seconds per unit, by the names in ``TERMS``.
        rows: What rows cost.
        turn_s: What a turn of the loop adds to every step (deciding, waking up), in seconds.
        turn_sequence_s: The same per sequence.
        loads: What loads cost, by tier: ``host`` (from disk) and ``device`` (from the host).
        noise: By ``decode`` (steps without a prompt), ``prompt`` (the others), ``host`` and ``device`` (loads).
        interference: How much a load slows down the step beside it, in seconds per second of the load, by tier.
        errors: On steps held out.
        num_steps: Steps it was fitted from.
        reads_host: Whether its steps can read adapters from host memory.
        drift: How the machine's speed wanders; ``None`` if it did not, or if the profile is older than this.
        format: Version of this form.
    """

    base: BaseShape
    num_pages: int
    machine: str
    lora_kernel: str
    command: str
    terms: dict[str, float]
    rows: RowCost
    turn_s: float
    turn_sequence_s: float
    loads: dict[str, LoadCost]
    noise: dict[str, Noise]
    interference: dict[str, float]
    errors: tuple[FitError, ...]
    num_steps: int
    reads_host: bool = False
    speed_drift: SpeedDrift | None = None
    format: int = FORMAT

    def write(self, path: str | Path) -> None:
        """Write it as JSON: every key on lines of its own but the model's shape, which is long and for machines."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        lines = [f"  {json.dumps(name)}: {_shown(name, value)}" for name, value in fields.items()]
        Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _shown(name: str, value: Any) -> str:
    if name in ("base", "rows"):
        return json.dumps(value)
    if name == "noise":
        return _by_line(value, "  ")
    if name == "speed_drift" and value is not None:
        shown = {"components": json.dumps(value["components"]), "noise": _by_line(value["noise"], "    ")}
        return "{\n" + ",\n".join(f"    {json.dumps(key)}: {one}" for key, one in shown.items()) + "\n  }"
    return json.dumps(value, indent=2).replace("\n", "\n  ")


def _by_line(value: dict[str, Any], indent: str) -> str:
    inner = [f"{indent}  {json.dumps(key)}: {json.dumps(one)}" for key, one in value.items()]
    return "{\n" + ",\n".join(inner) + f"\n{indent}}}"


def read_profile(path: str | Path) -> CostProfile:
    """Read a profile.

    Raises:
        ConfigError: There is no such file, or it is not a profile; says which and why.
    """
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
    return profile
