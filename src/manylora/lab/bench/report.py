"""The report of a load: latencies, errors, and whether the generator kept up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from manylora.lab.bench.load import LoadRun
from manylora.lab.measure import PercentileSummary, RequestRecord, Slo, Summary, counted_of, percentiles, summarise
from manylora.lab.measure.tables import FigureTable, figures, groups, latencies, milliseconds

__all__ = ["Generator", "LoadReport", "make_report"]

ADAPTERS, BASE = "adapters", "base"

ALL_AT_ONCE = 1e6  # requests per second beyond any real rate: all are sent at once
TOO_LATE = 0.1  # share of what it disturbs above which the generator's own delay is worth a warning
LEAST_LAG_S = 0.002  # delay that an event loop always has: no warning below it


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """Whether the generator kept up."""

    lag: PercentileSummary | None  # delays of the requests at their sending, in seconds
    loop_lag: PercentileSummary | None  # delays of its event loop, in seconds: chunks were noticed that much too late
    warnings: tuple[str, ...]  # consequences for the figures, in words


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """One run."""

    records: tuple[RequestRecord, ...]  # every request that ended
    summary: Summary  # their figures; requests for adapters and for the base are groups where there are both
    errors: dict[str, tuple[int, str]]  # number and an example, by kind
    generator: Generator  # figures of the generator itself
    offered_per_s: float  # requests per second that were due
    tokens_per_chunk: float  # mean; above 1 the gaps between chunks are longer than those between tokens
    is_counted_by_chunks: bool  # whether some answer had no usage, so that its chunks were taken for tokens
    num_retries: int  # times requests were refused and sent again
    num_unsent: int  # requests that were not sent because the run was stopped
    num_unfinished: int  # requests that were in flight then, and are in no figure

    def tables(self) -> list[FigureTable]:
        """Return the report as tables."""
        tables = [figures(self.summary), latencies(self.summary)]
        if len(self.summary.groups) > 1:
            table = groups(self.summary)
            seen = [index for index, column in enumerate(table.columns) if column != "of it waiting"]  # unknown
            rows = tuple(tuple(row[index] for index in seen) for row in table.rows)
            tables.append(replace(table, columns=tuple(table.columns[index] for index in seen), rows=rows))
        if self.errors:
            told = tuple((kind, f"{count:,}", example) for kind, (count, example) in self.errors.items())
            tables.append(FigureTable(columns=("error", "requests", "for example"), rows=told))
        tables.append(self._generator_table())
        return tables

    def as_data(self) -> dict[str, object]:
        """Return everything but the single requests as plain data."""
        return {
            "offered_requests_per_s": self.offered_per_s,
            "summary": asdict(self.summary),
            "errors": {kind: {"count": count, "example": example} for kind, (count, example) in self.errors.items()},
            "generator": asdict(self.generator),
            "tokens_per_chunk": self.tokens_per_chunk,
            "is_counted_by_chunks": self.is_counted_by_chunks,
            "num_retries": self.num_retries,
            "num_unsent": self.num_unsent,
            "num_unfinished": self.num_unfinished,
        }

    def _generator_table(self) -> FigureTable:
        offered = f"{self.offered_per_s:.3g}" if self.offered_per_s < ALL_AT_ONCE else "all at once"
        rows = [("requests per second offered", offered)]
        if self.tokens_per_chunk:
            rows.append(("tokens a chunk", f"{self.tokens_per_chunk:.2f}"))
        for name, one in (("sent late by", self.generator.lag), ("event loop late by", self.generator.loop_lag)):
            if one is not None:
                rows.append((f"{name}, ms P50 / P99", f"{milliseconds(one.p50)} / {milliseconds(one.p99)}"))
        for name, count in (
            ("sent again after a refusal", self.num_retries),
            ("not sent: stopped before", self.num_unsent),
            ("in flight when stopped, not counted", self.num_unfinished),
        ):
            if count:
                rows.append((name, f"{count:,}"))
        return FigureTable(columns=("", ""), rows=tuple(rows))


def make_report(run: LoadRun, *, slo: Slo, offered_per_s: float, warm_up_s: float = 0.0) -> LoadReport:
    """Return the figures of a load test of ``offered_per_s``; requests of the first ``warm_up_s`` are left out."""
    records = tuple(sorted((answer.record for answer in run.answers), key=lambda record: record.arrived_at))
    has_both = len({bool(record.adapter) for record in records}) > 1
    group = (lambda record: ADAPTERS if record.adapter else BASE) if has_both else None
    summary = summarise(records, slo=slo, warm_up_s=warm_up_s, group=group)
    good = [answer for answer in run.answers if answer.record.error is None]
    num_chunks = sum(answer.num_chunks for answer in good)
    num_tokens = sum(answer.record.num_output_tokens for answer in good)
    lag, loop_lag = percentiles(run.lag_s), percentiles(run.loop_lag_s)
    is_counted_by_chunks = any(not answer.has_usage for answer in good)
    return LoadReport(
        records=records,
        summary=summary,
        errors=_errors(counted_of(records, warm_up_s)),
        generator=Generator(lag=lag, loop_lag=loop_lag, warnings=tuple(_warnings(summary, lag, loop_lag))),
        offered_per_s=offered_per_s,
        tokens_per_chunk=num_tokens / num_chunks if num_chunks else 0.0,
        is_counted_by_chunks=is_counted_by_chunks,
        num_retries=sum(answer.num_retries for answer in run.answers),
        num_unsent=run.num_unsent,
        num_unfinished=run.num_unfinished,
    )


def _errors(records: Sequence[RequestRecord]) -> dict[str, tuple[int, str]]:
    """Return how many errors of each kind there were, the most frequent first, and the first of each."""
    examples: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for record in records:
        if record.error is not None:
            kind, _, detail = record.error.partition(": ")
            counts[kind] += 1
            examples.setdefault(kind, " ".join(detail.split())[:120])
    return {kind: (count, examples[kind]) for kind, count in counts.most_common()}


def _warnings(summary: Summary, lag: PercentileSummary | None, loop_lag: PercentileSummary | None) -> list[str]:
    found = []
    if lag is not None and lag.p99 > LEAST_LAG_S and summary.ttft is not None and lag.p99 > TOO_LATE * summary.ttft.p50:
        found.append(
            f"the generator sent 1 % of the requests more than {milliseconds(lag.p99)} ms late: the load was less even "
            "than it should have been"
        )
    limit = None if summary.tbt is None else max(LEAST_LAG_S, TOO_LATE * summary.tbt.p50)
    if loop_lag is not None and limit is not None and loop_lag.p99 > limit:
        found.append(
            f"the generator's event loop was up to {milliseconds(loop_lag.p99)} ms late (P99): latencies are that "
            "uncertain; give it a core of its own, or less load"
        )
    return found
