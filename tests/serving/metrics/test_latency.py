"""The last minute's latency: percentiles that are right within their promise, a window that moves, bounded memory."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.serving.hosting.protocol import FinishedRequest, Observations
from manylora.serving.metrics import latency
from manylora.serving.metrics.latency import MAX_ADAPTERS, NUM_SLICES, WINDOW_S, LatencyWindow, LogHistogram

DURATIONS = st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=200)


@given(DURATIONS, DURATIONS)
def test_quantiles_are_within_two_percent_of_the_exact_ones(ours: list[float], others: list[float]) -> None:
    histogram, other = LogHistogram(), LogHistogram()
    for value in ours:
        histogram.add(value)
    for value in others:
        other.add(value)
    histogram.update([other])
    values = sorted(ours + others)
    assert len(histogram) == len(values)
    shares = (0.01, 0.5, 0.9, 0.99, 1.0)
    for share, found in zip(shares, histogram.quantiles(shares), strict=True):
        exact = values[math.ceil(share * len(values)) - 1]
        assert found == pytest.approx(exact, rel=0.0201)


def test_no_time_at_all_is_counted_as_a_little() -> None:
    histogram = LogHistogram()
    histogram.add(0.0)
    assert 0 < histogram.quantiles([0.5])[0] < 2e-6
    with pytest.raises(ValueError, match="empty"):
        LogHistogram().quantiles([0.5])


def observed(name: str, seconds: float, count: int = 1) -> Observations:
    return Observations(
        queue_s=[seconds] * count,
        ttft_s={name: [seconds] * count},
        inter_token_s={name: [seconds] * count},
        finished=[FinishedRequest(name, "stop", seconds, 1, 1)] * count,
    )


def test_by_adapter_and_in_all() -> None:
    window = LatencyWindow()
    window.observe(observed("quick", 0.01, 98), 100.0)
    window.observe(observed("slow", 1.0), 101.0)
    window.observe(observed("", 2.0), 101.0)
    total = window.total(102.0)
    for durations in (total.ttft_s, total.inter_token_s, total.e2e_s, total.queue_s):
        assert durations is not None
        assert (durations.count, durations.p50) == (100, pytest.approx(0.01, rel=0.02))
        assert durations.p99 == pytest.approx(1.0, rel=0.02)
    slow = window.of_adapter("slow", 102.0)
    assert slow.e2e_s is not None
    assert (slow.e2e_s.count, slow.e2e_s.p50) == (1, pytest.approx(1.0, rel=0.02))
    assert slow.queue_s is None
    base = window.of_adapter("", 102.0)
    assert base.ttft_s is not None
    assert base.ttft_s.p50 == pytest.approx(2.0, rel=0.02)
    assert window.of_adapter("nobody", 102.0).ttft_s is None


def test_what_is_older_than_the_window_is_forgotten_whether_anything_comes_or_not() -> None:
    window = LatencyWindow()
    slice_s = WINDOW_S / NUM_SLICES
    for number in range(NUM_SLICES):
        window.observe(observed("m", 1.0), 1000.0 + number * slice_s)

    def count(now: float) -> int:
        ttft = window.total(now).ttft_s
        return ttft.count if ttft else 0

    assert count(1000.0 + WINDOW_S - slice_s) == NUM_SLICES
    assert count(1000.0 + WINDOW_S) == NUM_SLICES - 1
    window.observe(observed("n", 1.0), 1000.0 + WINDOW_S)
    assert count(1000.0 + WINDOW_S) == NUM_SLICES
    assert count(1000.0 + 3 * WINDOW_S) == 0
    assert window.of_adapter("m", 1000.0 + 3 * WINDOW_S).ttft_s is None


def test_adapters_beyond_the_limit_count_in_the_total_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_ADAPTERS >= 1000
    monkeypatch.setattr(latency, "MAX_ADAPTERS", 2)
    window = LatencyWindow()
    for name in "abc":
        window.observe(observed(name, 1.0), 0.0)
    total = window.total(0.0).ttft_s
    assert total is not None
    assert total.count == 3
    assert [window.of_adapter(name, 0.0).ttft_s is not None for name in "abc"] == [True, True, False]
