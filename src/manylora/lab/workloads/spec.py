"""The description of a workload (arrivals, lengths, adapters, popularity), and the workload made from it.

::

    [workload]
    name = "chameleon"
    num_requests = 5000

    [workload.arrivals]
    kind = "poisson"
    rate = 8.0

    [workload.lengths]
    kind = "trace"
    file = "AzureLLMInferenceTrace_conv.csv"
    scale = 0.173

    [workload.adapters]
    count = 100
    ranks = [8, 16, 32, 64, 128]

    [workload.popularity]
    kind = "rank"
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from manylora.core.errors import ConfigError
from manylora.core.options import require
from manylora.lab.workloads.arrivals import (
    ArrivalProcess,
    Extent,
    GammaArrivals,
    PoissonArrivals,
    ReplayArrivals,
    WeibullArrivals,
)
from manylora.lab.workloads.callers import AzureFunctions2019, AzureFunctions2021, GammaCallers, ServeGenClients
from manylora.lab.workloads.lengths import (
    Distribution,
    ExponentialTokens,
    FixedTokens,
    GammaTokens,
    Lengths,
    LognormalTokens,
    ParametricLengths,
    ReplayLengths,
    TraceLengths,
    UniformTokens,
)
from manylora.lab.workloads.locality import Drift, OrderReplay, Sessions, StackDistances
from manylora.lab.workloads.modulated import OnOffArrivals, StepArrivals
from manylora.lab.workloads.popularity import (
    ExplicitShares,
    GeometricShares,
    MeasuredShares,
    Popularity,
    PowerShares,
    RankShares,
    ShareLaw,
    TurnTaking,
    UniformShares,
    ZipfShares,
)
from manylora.lab.workloads.tables import TableReader, nearest, read_table
from manylora.lab.workloads.workload import ATTENTION, AdapterSpec, FloatArray, IntArray, RequestSpec, Streams, Workload

__all__ = ["KINDS", "AdapterSet", "WorkloadSpec", "make_workload", "read_workload_spec"]

KINDS: dict[type, Sequence[type]] = {
    ArrivalProcess: (
        AzureFunctions2019,
        AzureFunctions2021,
        GammaArrivals,
        GammaCallers,
        OnOffArrivals,
        PoissonArrivals,
        ReplayArrivals,
        ServeGenClients,
        StepArrivals,
        WeibullArrivals,
    ),
    Distribution: (ExponentialTokens, FixedTokens, GammaTokens, LognormalTokens, UniformTokens),
    Lengths: (ParametricLengths, ReplayLengths, TraceLengths),
    Popularity: (
        ExplicitShares,
        GeometricShares,
        MeasuredShares,
        OrderReplay,
        PowerShares,
        RankShares,
        Sessions,
        StackDistances,
        TurnTaking,
        UniformShares,
        ZipfShares,
    ),
    ShareLaw: (GeometricShares, PowerShares, UniformShares, ZipfShares),
}
"""Implementations that a ``kind`` can name, by Protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSet:
    """The registered adapters; ranks take turns.

    Args:
        count: Number of adapters; with 0 all requests are for the base.
        ranks: Their ranks.
        targets: Last names of the modules they change.
        base_share: Share of requests for the base instead of an adapter.
    """

    count: int = 100
    ranks: tuple[int, ...] = (8, 16, 32, 64, 128)
    targets: tuple[str, ...] = ATTENTION
    base_share: float = 0.0

    def __post_init__(self) -> None:
        require(self.count >= 0, "count", self.count, "0 or more adapters")
        if not self.ranks or min(self.ranks) < 1:
            raise ConfigError(f"Got ranks = {self.ranks!r}, expected at least one, each at least 1")
        if not self.targets:
            raise ConfigError("Got no targets, expected at least one module")
        require(0 <= self.base_share <= 1, "base_share", self.base_share, "a share in [0, 1]")

    def specs(self) -> tuple[AdapterSpec, ...]:
        """Return the adapters."""
        width = len(str(max(0, self.count - 1)))
        return tuple(
            AdapterSpec(
                name=f"adapter-{index:0{width}d}", rank=self.ranks[index % len(self.ranks)], targets=self.targets
            )
            for index in range(self.count)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """The parts of a workload.

    Args:
        name: Name in titles and of files.
        num_requests: At most; without it and ``duration_s`` a replayed trace is used once.
        duration_s: Seconds at most.
        popularity: Uniform when ``None``; not allowed with arrivals that name their callers.
        drift: ``None`` for constant popularity.
    """

    arrivals: ArrivalProcess
    lengths: Lengths
    name: str = "workload"
    num_requests: int | None = None
    duration_s: float | None = None
    adapters: AdapterSet = field(default_factory=AdapterSet)
    popularity: Popularity | None = None
    drift: Drift | None = None

    def __post_init__(self) -> None:
        Extent(num_requests=self.num_requests, duration_s=self.duration_s)


def make_workload(spec: WorkloadSpec, seed: int) -> Workload:
    """Make a workload from its description and a seed.

    Arrivals, lengths, popularity, drift and the base's share draw from a stream each: changing one of them in the
    description leaves the draws of all others as they were.

    Raises:
        ConfigError: A trace cannot be read, or the parts do not fit together.
    """
    streams = Streams(seed)
    extent = Extent(num_requests=spec.num_requests, duration_s=spec.duration_s)
    arrived = spec.arrivals.arrive(extent, streams.of("arrivals"))
    num = len(arrived.times)
    lengths = spec.lengths.draw(num, streams.of("lengths"))
    adapters = spec.adapters.specs()
    chosen = _choose(spec, arrived.times, arrived.callers, [one.rank for one in adapters], streams)
    names = [*(one.name for one in adapters), None]  # -1 is the base
    requests = tuple(
        RequestSpec(
            arrival_s=arrival_s,
            num_prompt_tokens=prompt,
            num_output_tokens=output,
            adapter=names[adapter],
            prefix=lengths.prefix[index] if lengths.prefix is not None else (),
            prefix_block_tokens=lengths.prefix_block_tokens,
        )
        for index, (arrival_s, prompt, output, adapter) in enumerate(
            zip(arrived.times.tolist(), lengths.prompt.tolist(), lengths.output.tolist(), chosen.tolist(), strict=True)
        )
    )
    return Workload(name=spec.name, requests=requests, adapters=adapters)


def _choose(
    spec: WorkloadSpec, times: FloatArray, callers: IntArray | None, ranks: list[int], streams: Streams
) -> IntArray:
    """Return the adapter of each request, -1 for the base."""
    chosen = np.full(len(times), -1, dtype=np.int64)
    if callers is not None and spec.popularity is not None:
        raise ConfigError(
            f"Got popularity {spec.popularity.kind!r} with arrivals {spec.arrivals.kind!r}, which name their callers: "
            "expected one of them"
        )
    if not ranks:
        return chosen
    # The whole mask is drawn even where it is all true, so that a share of 0 changes nothing else.
    asks = streams.of("base").random(len(times)) >= spec.adapters.base_share
    if callers is not None:
        picked = callers[asks] % len(ranks)  # dealt out in turn, as dLoRA does
    else:
        popularity = spec.popularity or UniformShares()
        picked = popularity.assign(times[asks], ranks, streams.of("popularity"))
    if spec.drift is not None:
        picked = spec.drift.apply(times[asks], picked, ranks, streams.of("drift"))
    chosen[asks] = picked
    return chosen


def read_workload_spec(file: Path, *, traces: Path | None = None) -> WorkloadSpec:
    """Read a workload's description from a TOML file with a table ``[workload]`` and nothing else.

    Args:
        file: The file; relative paths of traces are looked for beside it.
        traces: A folder of traces, looked into as well.

    Raises:
        ConfigError: It cannot be read, is no TOML, or a key or value in it is wrong.
    """
    table = read_table(file)
    for key in table:
        if key != "workload":
            raise ConfigError(f"{file}: got {key!r}, which nothing reads: {nearest(key, ['workload'])}")
    folders = [file.parent, *([traces] if traces is not None else [])]
    try:
        return TableReader(KINDS, folders).read(WorkloadSpec, table.get("workload", {}), "workload")
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
