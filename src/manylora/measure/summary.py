"""A run in figures: what its users felt, and what it cost to give them that.

Everything is derived from request records, so a simulated run, a live engine and a remote server that a load generator
asked are summed up by the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from manylora.errors import ConfigError
from manylora.measure.records import RequestRecord
from manylora.measure.statistics import Percentiles, percentiles

__all__ = ["GroupSummary", "Slo", "Summary", "gaps_of", "summarise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What a request is promised; a promise that is ``None`` was not made.

    Args:
        ttft_s: Longest time to its first token, in seconds.
        tbt_s: Longest time between two tokens, in seconds.
        tpot_s: Longest mean time per token after the first, in seconds.
        e2e_s: Longest time in all, in seconds.
    """

    ttft_s: float | None = None
    tbt_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tbt_s", "tpot_s", "e2e_s"):
            limit = getattr(self, name)
            if limit is not None and not limit > 0:
                raise ConfigError(f"Got {name} = {limit!r}, expected above 0 seconds")

    def is_met(self, record: RequestRecord) -> bool:
        """Whether a request got a full answer, and all it was promised."""
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
    """Some of the requests: those of one rank, one class of size, one tenant.

    Args:
        num_requests: How many.
        ttft: Time to first token, in seconds.
        tbt: Time between tokens, in seconds.
        e2e: Time in all, in seconds.
        queueing_share: Mean share of a request's time that went by before it was admitted.
        slo_attainment: Share of them that got what was promised.
    """

    num_requests: int
    ttft: Percentiles | None
    tbt: Percentiles | None
    e2e: Percentiles | None
    queueing_share: float
    slo_attainment: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run. Times in seconds, shares in [0, 1]; latencies are those of requests that ended well.

    Args:
        num_requests: Requests counted.
        num_errors: Those that were refused, failed or were cancelled.
        duration_s: From the first arrival counted to the last end.
        requests_per_s: Requests that ended well, per second.
        output_tokens_per_s: Tokens they got, per second.
        total_tokens_per_s: Prompt tokens as well.
        ttft: Time to first token.
        tbt: Time between tokens, every gap counted.
        tpot: A request's mean time per token after the first.
        e2e: Time in all.
        queueing: Time before admission.
        normalised: Time in all per output token.
        slo_attainment: Share of all requests that got what was promised.
        goodput_per_s: Requests per second that did.
        hit_rate: Share of requests for an adapter that found it on the device; ``None`` where that is unknown.
        adapter_wait_share: Share of all time to first token in which a request waited for nothing but its adapter.
        num_adapter_waits: Requests that did so for any time.
        cached_share: Share of prompt tokens from the prefix cache.
        preempted_share: Share of requests that gave their pages back at least once, squashes included.
        squashed_share: Share of requests squashed at least once.
        adapter_spread: Mean time to first token of each adapter: are some served worse?
        groups: Some of the requests each, by label.
    """

    num_requests: int
    num_errors: int
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft: Percentiles | None
    tbt: Percentiles | None
    tpot: Percentiles | None
    e2e: Percentiles | None
    queueing: Percentiles | None
    normalised: Percentiles | None
    slo_attainment: float
    goodput_per_s: float
    hit_rate: float | None
    adapter_wait_share: float
    num_adapter_waits: int
    cached_share: float
    preempted_share: float
    squashed_share: float
    adapter_spread: Percentiles | None
    groups: dict[str, GroupSummary] = field(default_factory=dict)


def summarise(
    records: Seq[RequestRecord],
    *,
    slo: Slo | None = None,
    warm_up_s: float = 0.0,
    group: Callable[[RequestRecord], str] | None = None,
) -> Summary:
    """Reduce records to figures.

    Args:
        records: In any order.
        slo: What was promised; with nothing promised, a full answer is enough.
        warm_up_s: Requests that arrived this soon after the first are left out.
        group: Labels a request, for figures by group.
    """
    slo = slo or Slo()
    began = min((record.arrived_at for record in records), default=0.0) + warm_up_s
    counted = [record for record in records if record.arrived_at >= began]
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


def _adapter_spread(records: Seq[RequestRecord]) -> Percentiles | None:
    by_adapter: dict[str, list[float]] = {}
    for record in records:
        if record.adapter and record.ttft_s is not None:
            by_adapter.setdefault(record.adapter, []).append(record.ttft_s)
    return percentiles(sum(values) / len(values) for values in by_adapter.values())


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
