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
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np

from manylora.core.adapters.lora.settings import MAX_RANK
from manylora.core.errors import ConfigError
from manylora.core.options import CheckedOptions, check_options, nearest, option
from manylora.lab.tables import TableReader, read_table
from manylora.lab.workloads.arrivals import ARRIVALS, ArrivalProcess, Extent
from manylora.lab.workloads.callers import CALLERS
from manylora.lab.workloads.lengths import DISTRIBUTIONS, LENGTHS, Distribution, Lengths
from manylora.lab.workloads.locality import LOCALITIES, Drift
from manylora.lab.workloads.popularity import POPULARITIES, SHARE_LAWS, Popularity, ShareLaw, UniformShares
from manylora.lab.workloads.workload import ATTENTION, AdapterSpec, FloatArray, IntArray, RequestSpec, Streams, Workload

__all__ = ["KINDS", "AdapterSet", "Conversations", "WorkloadSpec", "make_workload", "read_workload_spec"]

KINDS: dict[type, Sequence[type]] = {
    ArrivalProcess: (*ARRIVALS, *CALLERS),
    Distribution: DISTRIBUTIONS,
    Lengths: LENGTHS,
    Popularity: (*POPULARITIES, *LOCALITIES),
    ShareLaw: SHARE_LAWS,
}
"""Implementations that a ``kind`` can name, by Protocol."""
MOST_BLOCKS = 1 << 16  # names of blocks that a conversation has to itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations(CheckedOptions):
    """Turns of a conversation, and the pauses between them: every arrival opens one. Lengths are those of a turn.

    ::

        turn 1   question | answer
        turn 2   question . answer . question | answer          the prompt begins with that of turn 1
                 ------------------ pause ---> time

    All turns of a conversation are for one adapter, so that the KV of its earlier turns and the adapter are worth
    keeping for the same pause. Simulated answers have tokens of their own, so that of an earlier turn its prompt is
    found again in the prefix cache and its answer is not.
    """

    turns: Distribution  # of a conversation, rounded up
    pause_s: Distribution  # from the arrival of a turn to that of the next, in seconds
    max_tokens: int = option(
        2048, at_least=2, at_most=MOST_BLOCKS, unit="tokens", help="Prompt and answer of the last turn at most."
    )
    block_tokens: int = option(16, at_least=8, unit="tokens", help="Tokens of a block that prompts share.")

    def unfold(
        self, opened: Seq[RequestSpec], lengths: Lengths, rng: np.random.Generator, duration_s: float | None
    ) -> tuple[RequestSpec, ...]:
        """Return all turns in order of arrival, those after ``duration_s`` left out; ``opened`` are the first turns.

        A conversation ends before the turn that would exceed ``max_tokens``.
        """
        num_turns = np.ceil(self.turns.draw(len(opened), rng)).astype(np.int64).clip(1)
        num_later = int(num_turns.sum()) - len(opened)
        drawn, pauses = lengths.draw(num_later, rng), self.pause_s.draw(num_later, rng)
        later = zip(drawn.prompt.tolist(), drawn.output.tolist(), pauses.tolist(), strict=True)
        found: list[RequestSpec] = []
        for number, (first, num) in enumerate(zip(opened, num_turns.tolist(), strict=True)):
            opening = first.num_prompt_tokens, first.num_output_tokens, 0.0
            said, at = 0, first.arrival_s
            for question, answer, pause_s in (opening, *islice(later, num - 1)):
                at, said = at + pause_s, said + question
                if said + answer > self.max_tokens or (duration_s is not None and at >= duration_s):
                    break
                found.append(self._turn(first, number, at, said, answer))
                said += answer
        return tuple(sorted(found, key=lambda one: one.arrival_s))

    def _turn(self, first: RequestSpec, number: int, at: float, num_prompt: int, num_output: int) -> RequestSpec:
        begin = number * MOST_BLOCKS
        return replace(
            first,
            arrival_s=at,
            num_prompt_tokens=num_prompt,
            num_output_tokens=num_output,
            prefix=tuple(range(begin, begin - (-num_prompt // self.block_tokens))),
            prefix_block_tokens=self.block_tokens,
        )


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
