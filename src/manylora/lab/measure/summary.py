"""The summary of a run: latencies, throughput, SLO attainment and cache hits; intervals over repeated runs.

It is computed from request records, so simulated runs, live engines and load tests of remote servers share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from manylora.core.options import CheckedOptions, option
from manylora.lab.measure.records import RequestRecord

__all__ = [
    "Estimate",
    "PercentileSummary",
    "Slo",
    "Summary",
    "counted_of",
    "gaps_of",
    "interval_of_runs",
    "percentiles",
    "summarise",
]

SHARES = (0.5, 0.9, 0.99)

# Two-sided 95 % points of Student's t by degrees of freedom, 1 to 30: runs are few, and scipy is an extra.
STUDENT_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PercentileSummary:
    """Mean, percentiles and maximum of a distribution, in the unit of its values."""

    count: int
    mean: float
    p50: float  # the median; percentiles are interpolated linearly
    p90: float
    p99: float
    highest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """An estimate and its 95 % confidence interval."""

    middle: float
    low: float
    high: float


def percentiles(values: Iterable[float] | NDArray[np.float64]) -> PercentileSummary | None:
    """Return the percentiles of values, ``None`` if there are none."""
    found = values if isinstance(values, np.ndarray) else np.fromiter(values, dtype=np.float64)
    if not len(found):
        return None
    p50, p90, p99 = (float(value) for value in np.quantile(found, SHARES))
    return PercentileSummary(
        count=len(found), mean=float(found.mean()), p50=p50, p90=p90, p99=p99, highest=float(found.max())
    )


def interval_of_runs(values: Seq[float]) -> Estimate:
    """Return the mean of a figure over repeated runs, each with its own seed, with Student's interval.

    The interval of a single run is infinite.
    """
    assert values
    mean = float(np.mean(values))
    if len(values) == 1:
        return Estimate(middle=mean, low=-np.inf, high=np.inf)
    t = STUDENT_T[min(len(values) - 1, len(STUDENT_T)) - 1]
    half = t * float(np.std(values, ddof=1)) / sqrt(len(values))
    return Estimate(middle=mean, low=mean - half, high=mean + half)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo(CheckedOptions):
    """Limits on the latency of a request; ``None`` sets no limit."""

    ttft_s: float | None = option(None, above=0, unit="s", help="On the time to first token.")
    tbt_s: float | None = option(None, above=0, unit="s", help="On the longest time between two tokens.")
    tpot_s: float | None = option(None, above=0, unit="s", help="On the mean time per token after the first.")
    e2e_s: float | None = option(None, above=0, unit="s", help="On the time from arrival to the last token.")

    def __str__(self) -> str:
        limits = (
            ("first token", self.ttft_s),
            ("longest gap", self.tbt_s),
            ("mean gap", self.tpot_s),
            ("whole answer", self.e2e_s),
        )
        return ", ".join(f"{name} {limit:g} s" for name, limit in limits if limit is not None) or "no limit"

    def is_met(self, record: RequestRecord) -> bool:
        """Whether a request got a full answer within the limits."""
        if record.error is not None or record.ttft_s is None:
            return False
        kept = (
            (record.ttft_s, self.ttft_s),
            (record.max_gap_s, self.tbt_s),
            (record.tpot_s, self.tpot_s),
            (record.e2e_s, self.e2e_s),
        )
        return all(limit is None or value is None or value <= limit for value, limit in kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """A group of requests, such as one rank, one class of size or one tenant; times in seconds."""

    num_requests: int
    ttft: PercentileSummary | None
    tbt: PercentileSummary | None
    e2e: PercentileSummary | None
    queueing_share: float  # mean share of a request's time before its admission
    slo_attainment: float  # share of requests within the SLO


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run. Times in seconds, shares in [0, 1]; latencies count successful requests."""

    num_requests: int
    num_errors: int  # requests that were refused, failed or were cancelled
    duration_s: float  # from the first arrival to the last end
    requests_per_s: float  # successful requests; the token rates count these as well
    output_tokens_per_s: float
    total_tokens_per_s: float  # prompt and output tokens
    ttft: PercentileSummary | None
    tbt: PercentileSummary | None  # time between tokens, every gap counted
    tpot: PercentileSummary | None
    e2e: PercentileSummary | None
    queueing: PercentileSummary | None  # time before admission
    normalised: PercentileSummary | None  # end-to-end time per output token
    slo_attainment: float  # share of all requests within the SLO
    goodput_per_s: float  # requests per second within the SLO
    # Share of requests for an adapter that found it on the device; ``None`` where that is unknown.
    hit_rate: float | None
    adapter_wait_share: float  # share of all time to first token in which a request waited for nothing but its adapter
    num_adapter_waits: int  # requests that at any time waited for nothing but their adapter
    cached_share: float  # share of prompt tokens from the prefix cache
    preempted_share: float  # share of requests pre-empted at least once, squashes included
    squashed_share: float
    adapter_spread: PercentileSummary | None  # distribution over adapters of their mean time to first token
    groups: dict[str, GroupSummary] = field(default_factory=dict)


def summarise(
    records: Seq[RequestRecord],
    *,
    slo: Slo | None = None,
    warm_up_s: float = 0.0,
    group: Callable[[RequestRecord], str] | None = None,
) -> Summary:
    """Summarise records, given in any order; those that arrived within ``warm_up_s`` of the first are left out.

    Without an SLO every full answer meets it. ``group`` returns the label of a request's group.
    """
    slo = slo or Slo()
    counted = counted_of(records, warm_up_s)
    good = [record for record in counted if record.error is None]
    first_at = min((record.arrived_at for record in counted), default=0.0)
    duration_s = max((record.finished_at for record in counted), default=0.0) - first_at
    per_s = 1.0 / duration_s if duration_s > 0 else 0.0
    num_met = sum(slo.is_met(record) for record in counted)
    num_output = sum(record.num_output_tokens for record in good)
    num_prompt = sum(record.num_prompt_tokens for record in good)
    looked_at = [record for record in counted if record.was_resident is not None]
    ttft_s = [record.ttft_s for record in good if record.ttft_s is not None]
    groups: dict[str, list[RequestRecord]] = {}
    for record in counted if group else ():
        assert group is not None
        groups.setdefault(group(record), []).append(record)
    return Summary(
        num_requests=len(counted),
        num_errors=len(counted) - len(good),
        duration_s=duration_s,
        requests_per_s=len(good) * per_s,
        output_tokens_per_s=num_output * per_s,
        total_tokens_per_s=(num_output + num_prompt) * per_s,
        ttft=percentiles(ttft_s),
        tbt=percentiles(gaps_of(good)),
        tpot=percentiles(record.tpot_s for record in good if record.tpot_s is not None),
        e2e=percentiles(record.e2e_s for record in good),
        queueing=percentiles(record.queueing_s for record in good if record.queueing_s is not None),
        normalised=percentiles(record.e2e_s / record.num_output_tokens for record in good if record.num_output_tokens),
        slo_attainment=_share(num_met, len(counted)),
        goodput_per_s=num_met * per_s,
        hit_rate=_share(sum(bool(r.was_resident) for r in looked_at), len(looked_at)) if looked_at else None,
        adapter_wait_share=_share(sum(record.adapter_wait_s for record in good), sum(ttft_s)),
        num_adapter_waits=sum(record.adapter_wait_s > 0 for record in counted),
        cached_share=_share(sum(record.num_cached_tokens for record in good), num_prompt),
        preempted_share=_share(sum(record.num_preemptions > 0 for record in counted), len(counted)),
        squashed_share=_share(sum(record.num_squashes > 0 for record in counted), len(counted)),
        adapter_spread=_adapter_spread(good),
        groups={label: _summarise_group(groups[label], slo) for label in sorted(groups)},
    )


def counted_of(records: Seq[RequestRecord], warm_up_s: float) -> list[RequestRecord]:
    """Return the records that are counted: without those that arrived within ``warm_up_s`` of the first."""
    began = min((record.arrived_at for record in records), default=0.0) + warm_up_s
    return [record for record in records if record.arrived_at >= began]


def gaps_of(records: Seq[RequestRecord]) -> NDArray[np.float64]:
    """Return all gaps between tokens in seconds, request by request."""
    parts = [np.asarray(record.gaps_s, dtype=np.float64) for record in records if len(record.gaps_s)]
    return np.concatenate(parts) if parts else np.empty(0)


def _summarise_group(records: Seq[RequestRecord], slo: Slo) -> GroupSummary:
    good = [record for record in records if record.error is None]
    shares = [record.queueing_s / record.e2e_s for record in good if record.queueing_s is not None and record.e2e_s > 0]
    return GroupSummary(
        num_requests=len(records),
        ttft=percentiles(record.ttft_s for record in good if record.ttft_s is not None),
        tbt=percentiles(gaps_of(good)),
        e2e=percentiles(record.e2e_s for record in good),
        queueing_share=_share(sum(shares), len(shares)),
        slo_attainment=_share(sum(slo.is_met(record) for record in records), len(records)),
    )


def _adapter_spread(records: Seq[RequestRecord]) -> PercentileSummary | None:
    by_adapter: dict[str, list[float]] = {}
    for record in records:
        if record.adapter and record.ttft_s is not None:
            by_adapter.setdefault(record.adapter, []).append(record.ttft_s)
    return percentiles(sum(values) / len(values) for values in by_adapter.values())


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
