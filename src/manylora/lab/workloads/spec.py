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

from manylora.core.adapters.lora.settings import MAX_RANK
from manylora.core.errors import ConfigError
from manylora.core.options import CheckedOptions, check_options, nearest, option
from manylora.lab.tables import TableReader, read_table
from manylora.lab.workloads.arrivals import ARRIVALS, ArrivalProcess, Extent
from manylora.lab.workloads.callers import CALLERS
from manylora.lab.workloads.conversations import Conversations
from manylora.lab.workloads.lengths import DISTRIBUTIONS, LENGTHS, Distribution, Lengths
from manylora.lab.workloads.locality import LOCALITIES, Drift
from manylora.lab.workloads.popularity import POPULARITIES, SHARE_LAWS, Popularity, ShareLaw, UniformShares
from manylora.lab.workloads.workload import ATTENTION, AdapterSpec, FloatArray, IntArray, RequestSpec, Streams, Workload

__all__ = ["KINDS", "AdapterSet", "WorkloadSpec", "make_workload", "read_workload_spec"]

KINDS: dict[type, Sequence[type]] = {
    ArrivalProcess: (*ARRIVALS, *CALLERS),
    Distribution: DISTRIBUTIONS,
    Lengths: LENGTHS,
    Popularity: (*POPULARITIES, *LOCALITIES),
    ShareLaw: SHARE_LAWS,
}
"""Implementations that a ``kind`` can name, by Protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSet:
    """The registered adapters; ranks take turns."""

    count: int = option(100, at_least=0, unit="adapters", help="Number; with 0 all requests are for the base.")
    ranks: tuple[int, ...] = (8, 16, 32, 64, 128)
    targets: tuple[str, ...] = option(ATTENTION, help="Last names of the modules that they change.")
    is_activated: bool = option(False, help="Whether they are activated behind the shared blocks of a prompt (aLoRA).")
    base_share: float = option(0.0, at_least=0, at_most=1, help="Share of requests for the base, not an adapter.")

    def __post_init__(self) -> None:
        check_options(self)
        if not self.ranks or min(self.ranks) < 1 or max(self.ranks) > MAX_RANK:
            raise ConfigError(f"Got ranks = {self.ranks!r}, expected at least one, each from 1 to {MAX_RANK}")
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise ConfigError(f"Got targets = {self.targets!r}, expected at least one module, and each once")

    def specs(self) -> tuple[AdapterSpec, ...]:
        """Return the adapters."""
        width = len(str(max(0, self.count - 1)))
        return tuple(
            AdapterSpec(
                name=f"adapter-{index:0{width}d}",
                rank=self.ranks[index % len(self.ranks)],
                targets=self.targets,
                is_activated=self.is_activated,
            )
            for index in range(self.count)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec(CheckedOptions):
    """The parts of a workload; without ``num_requests`` and ``duration_s`` a replayed trace is used once."""

    arrivals: ArrivalProcess
    lengths: Lengths
    name: str = option("workload", help="Name in titles and of files.")
    num_requests: int | None = option(None, at_least=1, help="Requests at most.")
    duration_s: float | None = option(None, above=0, unit="s", help="Time of arrivals at most.")
    adapters: AdapterSet = field(default_factory=AdapterSet)
    popularity: Popularity | None = None  # uniform when ``None``; not allowed with arrivals that name their callers
    drift: Drift | None = None  # ``None`` for constant popularity
    conversations: Conversations | None = None  # arrivals open conversations; ``None``: each is one request


def make_workload(spec: WorkloadSpec, seed: int) -> Workload:
    """Make a workload from its description and a seed.

    Arrivals, lengths, popularity, drift and the base's share draw from a stream each: changing one of them in the
    description leaves the draws of all others as they were. ``ConfigError`` if a trace cannot be read, or the parts do
    not fit together.
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
            tenant=lengths.tenants[index] if lengths.tenants is not None else "",
            prefix=lengths.prefix[index] if lengths.prefix is not None else (),
            prefix_block_tokens=lengths.prefix_block_tokens,
        )
        for index, (arrival_s, prompt, output, adapter) in enumerate(
            zip(arrived.times.tolist(), lengths.prompt.tolist(), lengths.output.tolist(), chosen.tolist(), strict=True)
        )
    )
    if spec.conversations is not None:
        turns = streams.of("conversations")
        requests = spec.conversations.unfold(requests, spec.lengths, turns, spec.duration_s)
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

    Relative paths of traces are looked for beside it, and in the folder ``traces``. ``ConfigError`` if the file cannot
    be read, is no TOML, or has a wrong key or value.
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
