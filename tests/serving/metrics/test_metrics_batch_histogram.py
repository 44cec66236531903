"""Counting many values at once shows what prometheus-client shows of them one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from manylora.serving.metrics.prometheus import BatchHistogram

EDGES = (0.1, 1.0, 2.5)


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.05, 0.1, 0.5, 1.0, 2.5, 9.0]), st.integers(1, 4)), max_size=20))
def test_batch_histogram_shows_what_prometheus_client_does(values: list[tuple[float, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    batched = BatchHistogram("waits", "How long.", {"model_name": "m"}, registry=ours, buckets=EDGES)
    histogram = Histogram("waits", "How long.", ["model_name"], registry=theirs, buckets=EDGES).labels("m")
    for value, count in values:
        batched.add(value, count)
        for _ in range(count):
            histogram.observe(value)

    def lines(registry: CollectorRegistry) -> dict[str, float]:
        text = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text if "_created" not in line}

    shown, expected = lines(ours), lines(theirs)
    assert shown.keys() == expected.keys()
    for name, value in expected.items():
        assert abs(shown[name] - value) < 1e-9
