"""From events to records to figures."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from manylora.core.events import (
    AdapterAwaited,
    AdapterLoaded,
    AdapterLoadStarted,
    RequestAdmitted,
    RequestArrived,
    RequestFinished,
    RequestPreempted,
    RequestSquashed,
    TokensEmitted,
)
from manylora.core.types import AdapterKey, FinishReason, Tier
from manylora.lab.measure import (
    Recorder,
    RequestRecord,
    Slo,
    interval_of_runs,
    percentiles,
    summarise,
)
from manylora.lab.measure.tables import failures, figures

KEY = AdapterKey("k")


def arrived(at: float, request_id: str, name: str = "poet") -> RequestArrived:
    return RequestArrived(at, request_id, KEY if name else None, 10, name, 100)


def finished(at: float, request_id: str, reason: FinishReason = FinishReason.STOP) -> RequestFinished:
    return RequestFinished(at, request_id, KEY, reason, 1.0, 1.6, 2.0, 10, 3, 0, 1)


def record(index: int, **changes: object) -> RequestRecord:
    settings: dict[str, object] = {
        "request_id": str(index),
        "adapter": "",
        "rank": 0,
        "num_prompt_tokens": 10,
        "num_output_tokens": 3,
        "arrived_at": float(index),
        "admitted_at": index + 0.5,
        "first_token_at": index + 1.0,
        "finished_at": index + 3.0,
        "gaps_s": (0.5, 1.5),
        "max_gap_s": 1.5,
    }
    return RequestRecord(**(settings | changes))  # type: ignore[arg-type]


def test_a_request_is_recorded_from_arrival_to_end():
    recorder = Recorder(replica=2, ranks={"poet": 16})
    for event in (
        arrived(1.0, "r"),
        RequestAdmitted(1.6, "r", KEY, 0.6, 0, False),
        TokensEmitted(2.0, ("r",)),
        RequestSquashed(2.1, "r", 11),
        TokensEmitted(2.5, ("r",)),
        TokensEmitted(2.8, ("r",)),
        finished(2.8, "r"),
    ):
        recorder(event)
    (one,) = recorder.records
    assert (one.adapter, one.rank, one.replica, one.was_resident) == ("poet", 16, 2, False)
    assert list(one.gaps_s) == pytest.approx([0.5, 0.3])
    assert one.max_gap_s == pytest.approx(0.5)
    assert (one.ttft_s, one.queueing_s, one.tpot_s) == pytest.approx((1.0, 0.6, 0.4))
    assert (one.num_squashes, one.num_preemptions, one.error) == (1, 1, None)


def test_only_spans_in_which_nothing_else_was_missing_count_as_waiting_for_an_adapter():
    recorder = Recorder()
    for event in (
        arrived(1.0, "r"),
        arrived(1.0, "q"),  # somebody else's turn comes first: its load is hidden
        AdapterLoadStarted(1.0, KEY, Tier.HOST, 100),
        AdapterAwaited(1.1, "r", KEY),
        AdapterLoaded(1.3, KEY, Tier.HOST, 0.3),
        AdapterLoadStarted(1.4, KEY, Tier.DEVICE, 200),
        AdapterAwaited(1.4, "r", KEY),
        AdapterLoaded(1.5, KEY, Tier.DEVICE, 0.1),
        finished(2.0, "r"),
        finished(2.0, "q"),
    ):
        recorder(event)
    assert [one.adapter_wait_s for one in recorder.records] == pytest.approx([0.3, 0.0])


def test_a_wait_after_the_first_token_is_a_gap():
    recorder = Recorder()
    for event in (
        arrived(1.0, "r"),
        TokensEmitted(1.1, ("r",)),
        RequestPreempted(1.2, "r", 5),
        AdapterLoadStarted(1.2, KEY, Tier.DEVICE, 200),
        AdapterAwaited(1.2, "r", KEY),
        AdapterLoaded(1.7, KEY, Tier.DEVICE, 0.5),
        TokensEmitted(1.8, ("r",)),
        finished(1.8, "r"),
    ):
        recorder(event)
    (one,) = recorder.records
    assert one.adapter_wait_s == 0.0
    assert one.max_gap_s == pytest.approx(0.7)


def test_a_link_is_busy_with_one_load_at_a_time():
    recorder = Recorder()
    for key in ("a", "b"):
        recorder(AdapterLoadStarted(1.0, AdapterKey(key), Tier.DEVICE, 100))
    recorder(AdapterLoaded(1.2, AdapterKey("a"), Tier.DEVICE, 0.2))
    recorder(AdapterLoaded(1.5, AdapterKey("b"), Tier.DEVICE, 0.5))
    loads = recorder.timeline.loads[Tier.DEVICE]
    assert list(loads.busy_s) == pytest.approx([0.2, 0.3])
    assert sum(loads.num_bytes) == 200


def test_a_failed_load_ends_the_wait_and_moves_nothing():
    recorder = Recorder()
    recorder(arrived(1.0, "r"))
    recorder(AdapterLoadStarted(1.0, KEY, Tier.DEVICE, 100))
    recorder(AdapterAwaited(1.0, "r", KEY))
    recorder(AdapterLoaded(1.5, KEY, Tier.DEVICE, 0.5, "gone"))
    recorder(finished(1.5, "r", FinishReason.ERROR))
    (one,) = recorder.records
    assert one.adapter_wait_s == pytest.approx(0.5)
    assert one.error == "error"
    assert not recorder.timeline.loads[Tier.DEVICE].at


def test_a_summary_counts_what_users_felt():
    records = [
        record(0),
        record(1, adapter="a", was_resident=True, adapter_wait_s=0.5),
        record(2, adapter="a", was_resident=False, num_preemptions=2, num_squashes=1, first_token_at=6.0),
        record(3, error="full", first_token_at=None, admitted_at=None, num_output_tokens=0, gaps_s=()),
    ]
    summary = summarise(records, slo=Slo(ttft_s=2.0), group=lambda one: one.adapter or "base")
    assert (summary.num_requests, summary.num_errors) == (4, 1)
    assert summary.duration_s == 6.0
    assert summary.requests_per_s == pytest.approx(3 / 6)
    assert summary.output_tokens_per_s == pytest.approx(9 / 6)
    assert summary.slo_attainment == 0.5
    assert summary.goodput_per_s == pytest.approx(2 / 6)
    assert summary.hit_rate == 0.5
    assert summary.adapter_wait_share == pytest.approx(0.5 / (1 + 1 + 4))
    assert (summary.preempted_share, summary.squashed_share) == (0.25, 0.25)
    assert summary.tbt is not None
    assert (summary.tbt.count, summary.tbt.mean) == (6, 1.0)
    assert summary.groups["a"].num_requests == 2
    assert summary.groups["base"].slo_attainment == 0.5
    assert summary.groups["base"].queueing_share == pytest.approx(0.5 / 3)


def test_the_warm_up_is_left_out():
    summary = summarise([record(index) for index in range(10)], warm_up_s=4.0)
    assert summary.num_requests == 6


def test_an_empty_run_has_a_summary():
    summary = summarise([])
    assert summary.ttft is None
    assert summary.requests_per_s == summary.slo_attainment == 0.0


@pytest.mark.parametrize(
    ("slo", "is_met"),
    [
        (Slo(), True),
        (Slo(ttft_s=1.0, tbt_s=1.5, e2e_s=3.0, tpot_s=1.0), True),
        (Slo(ttft_s=0.9), False),
        (Slo(tbt_s=1.4), False),
        (Slo(e2e_s=2.9), False),
        (Slo(tpot_s=0.9), False),
    ],
)
def test_a_promise_is_kept_up_to_its_limit(slo: Slo, is_met: bool):
    assert slo.is_met(record(0)) is is_met


def test_percentiles_are_interpolated():
    found = percentiles(range(101))
    assert found is not None
    assert (found.p50, found.p90, found.p99, found.highest) == (50, 90, 99, 100)
    assert percentiles([]) is None


def test_the_interval_of_repeated_runs_is_students():
    interval = interval_of_runs([1.0, 2.0, 3.0])
    assert (interval.middle, interval.high) == pytest.approx((2.0, 2.0 + 4.303 / 3**0.5), rel=1e-3)
    assert interval_of_runs([1.0]).high == inf


def test_the_limits_of_an_slo_are_named_and_failures_have_reasons():
    assert str(Slo(ttft_s=1.0, tbt_s=0.05)) == "first token 1 s, longest gap 0.05 s"
    assert str(Slo()) == "no limit"
    summary = summarise([record(0)], slo=Slo(ttft_s=1.0))
    assert ("within the SLO (first token 1 s)", "100.0%") in figures(summary, slo=Slo(ttft_s=1.0)).rows
    failed = [replace(record(0), error=text) for text in ("5 wait, 5 allowed", "cancelled", "17 wait, 5 allowed")]
    assert failures([record(0), *failed]).rows == (("5 wait, 5 allowed", "2"), ("cancelled", "1"))
