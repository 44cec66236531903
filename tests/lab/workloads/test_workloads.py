"""Any description makes a sound workload: in order, inside its bounds, of adapters that exist, and the same again."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.lab.workloads import AdapterSet, WorkloadSpec, make_workload
from manylora.lab.workloads.arrivals import ArrivalProcess, GammaArrivals, OnOffArrivals, PoissonArrivals, StepArrivals
from manylora.lab.workloads.lengths import (
    Distribution,
    ExponentialTokens,
    GammaTokens,
    LognormalTokens,
    ParametricLengths,
    TokenBounds,
)
from manylora.lab.workloads.locality import Drift, Sessions
from manylora.lab.workloads.popularity import (
    GeometricShares,
    Popularity,
    PowerShares,
    RankShares,
    TurnTaking,
    UniformShares,
    ZipfShares,
)

rates = st.floats(0.05, 50.0)
arrivals: st.SearchStrategy[ArrivalProcess] = st.one_of(
    st.builds(PoissonArrivals, rate=rates),
    st.builds(GammaArrivals, rate=rates, cov=st.floats(0.2, 8.0)),
    st.builds(OnOffArrivals, rate=rates, on_s=st.floats(0.1, 20.0), off_s=st.floats(0.1, 20.0)),
    st.builds(
        StepArrivals,
        rates=st.lists(st.sampled_from((0.0, 0.5, 3.0)), min_size=1, max_size=4).map(lambda some: (1.0, *some)),
        step_s=st.floats(0.5, 10.0),
    ),
)
tokens: st.SearchStrategy[Distribution] = st.one_of(
    st.builds(ExponentialTokens, mean=st.floats(0.1, 500.0)),
    st.builds(GammaTokens, shape=st.floats(0.2, 3.0), scale=st.floats(0.5, 500.0)),
    st.builds(LognormalTokens, mu=st.floats(-1.0, 6.0), sigma=st.floats(0.0, 2.0)),
)
popularities: st.SearchStrategy[Popularity | None] = st.one_of(
    st.none(),
    st.sampled_from((GeometricShares(), RankShares(), TurnTaking(), UniformShares())),
    st.builds(ZipfShares, s=st.floats(0.0, 3.0), q=st.floats(-0.5, 10.0)),
    st.builds(PowerShares, alpha=st.floats(0.01, 1.0)),
    st.builds(Sessions, num_at_once=st.floats(0.5, 50.0)),
)
specs = st.builds(
    WorkloadSpec,
    arrivals=arrivals,
    lengths=st.builds(
        ParametricLengths,
        prompt=tokens,
        output=tokens,
        correlation=st.sampled_from((0.0, -1.0, 0.5)),
        scale=st.floats(0.01, 3.0),
        bounds=st.builds(TokenBounds, max_prompt=st.just(300), max_output=st.just(100)),
    ),
    num_requests=st.integers(1, 60),
    duration_s=st.one_of(st.none(), st.floats(0.5, 40.0)),
    adapters=st.builds(
        AdapterSet,
        count=st.integers(2, 30),
        ranks=st.sampled_from(((8,), (8, 64), (8, 16, 32))),
        base_share=st.sampled_from((0.0, 0.3, 1.0)),
    ),
    popularity=popularities,
    drift=st.one_of(st.none(), st.builds(Drift, period_s=st.floats(0.5, 10.0), top=st.just(1))),
)


@settings(max_examples=150)
@given(spec=specs, seed=st.integers(0, 2**31))
def test_a_workload_is_sound(spec: WorkloadSpec, seed: int) -> None:
    workload = make_workload(spec, seed)
    names = {one.name for one in workload.adapters}
    assert len(names) == spec.adapters.count and spec.num_requests is not None
    assert len(workload.requests) <= spec.num_requests
    if spec.duration_s is None:
        assert len(workload.requests) == spec.num_requests
    times = [one.arrival_s for one in workload.requests]
    assert times == sorted(times) and all(0 <= time < (spec.duration_s or float("inf")) for time in times)
    for one in workload.requests:
        assert 1 <= one.num_prompt_tokens <= 300 and 1 <= one.num_output_tokens <= 100
        assert one.adapter is None or one.adapter in names
        assert (one.adapter is None) or spec.adapters.base_share < 1
    assert make_workload(spec, seed) == workload
