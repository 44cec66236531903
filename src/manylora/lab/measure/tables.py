"""Summaries as tables, for a terminal and for Markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich import box
from rich.table import Table as RichTable

from manylora.lab.measure.records import RequestRecord
from manylora.lab.measure.summary import Slo, Summary

__all__ = ["FigureTable", "compare", "failures", "figures", "groups", "latencies", "milliseconds"]

MOST_REASONS = 5  # reasons of failures that are listed

MOST_UNBROKEN = 40
"""Characters of a row's label up to which it stays on one line, so that the titles of other columns break instead."""

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureTable:
    """A table of text: the first column labels the row, the others are numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""

    def markdown(self) -> str:
        """Return Markdown, with the title in bold."""
        lines = [f"**{self.title}**", ""] if self.title else []
        lines += [
            f"| {' | '.join(self.columns)} |",
            f"|---|{'---:|' * (len(self.columns) - 1)}",
            *(f"| {' | '.join(row)} |" for row in self.rows),
        ]
        return "\n".join(lines)

    def rich(self) -> RichTable:
        """Return a table of rich, for a terminal."""
        table = RichTable(
            title=self.title or None,
            title_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=True,
            show_header=any(self.columns),
        )
        is_short = all(len(row[0]) <= MOST_UNBROKEN for row in self.rows)
        table.add_column(self.columns[0], style="cyan", overflow="fold", no_wrap=is_short)
        for column in self.columns[1:]:
            table.add_column(column, justify="right")
        for row in self.rows:
            table.add_row(*row)
        return table


def milliseconds(seconds: float) -> str:
    """Return seconds as milliseconds, with three significant digits below 100."""
    value = seconds * 1e3
    if value and abs(value) < 100:
        return f"{value:.3g}"
    return f"{value:,.0f}"


def latencies(summary: Summary) -> FigureTable:
    """Return every latency of a summary, in milliseconds."""
    rows = {
        "time to first token": summary.ttft,
        "waiting for admission": summary.queueing,
        "between tokens": summary.tbt,
        "per token after the first": summary.tpot,
        "in all": summary.e2e,
        "in all, per token": summary.normalised,
    }
    columns = ("ms", "mean", "P50", "P90", "P99", "highest")
    cells = (
        (name, *map(milliseconds, (one.mean, one.p50, one.p90, one.p99, one.highest)))
        for name, one in rows.items()
        if one is not None
    )
    return FigureTable(columns=columns, rows=tuple(cells))


def figures(summary: Summary, *, slo: Slo | None = None) -> FigureTable:
    """Return the figures of a summary other than latencies, without those that do not apply.

    ``slo`` names the limits that the summary was made with.
    """
    limits = "" if slo is None else f" ({slo})"
    rows: list[tuple[str, str]] = [
        ("requests", f"{summary.num_requests:,}"),
        ("requests per second", f"{summary.requests_per_s:.3g}"),
        ("answer tokens per second", f"{summary.output_tokens_per_s:,.0f}"),
        ("tokens per second, prompts too", f"{summary.total_tokens_per_s:,.0f}"),
        (f"within the SLO{limits}", f"{summary.slo_attainment:.1%}"),
        ("requests per second within the SLO", f"{summary.goodput_per_s:.3g}"),
    ]
    if summary.num_errors:
        rows.insert(1, ("refused, failed or cancelled", f"{summary.num_errors:,}"))
    if summary.hit_rate is not None:
        rows += [
            ("adapter found on the device", f"{summary.hit_rate:.1%}"),
            ("share of TTFT spent on loading alone", f"{summary.adapter_wait_share:.2%}"),
        ]
    if summary.adapter_spread is not None and summary.adapter_spread.p50 > 0:
        worst = summary.adapter_spread.highest / summary.adapter_spread.p50
        rows.append(("mean TTFT of the worst adapter over the median one's", f"{worst:.2f}"))
    for name, share in (
        ("prompt tokens from the prefix cache", summary.cached_share),
        ("requests pre-empted", summary.preempted_share),
        ("requests squashed", summary.squashed_share),
    ):
        if share:
            rows.append((name, f"{share:.1%}"))
    return FigureTable(columns=("", ""), rows=tuple(rows))


def failures(records: Iterable[RequestRecord]) -> FigureTable:
    """Return the reasons of requests without a full answer, the most frequent first.

    Reasons that differ only in numbers count as one, shown with the numbers of the first.
    """
    examples: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for record in records:
        if record.error is not None:
            kind = _NUMBER.sub("0", record.error)
            examples.setdefault(kind, record.error)
            counts[kind] += 1
    rows = tuple((examples[kind], f"{count:,}") for kind, count in counts.most_common(MOST_REASONS))
    return FigureTable(columns=("no full answer, because", "requests"), rows=rows)


def groups(summary: Summary) -> FigureTable:
    """Return a summary's groups, times in milliseconds."""
    rows = tuple(
        (
            label,
            f"{group.num_requests:,}",
            *(milliseconds(group.ttft.p50) if group.ttft else "", milliseconds(group.ttft.p99) if group.ttft else ""),
            milliseconds(group.tbt.p99) if group.tbt else "",
            milliseconds(group.e2e.p50) if group.e2e else "",
            f"{group.queueing_share:.1%}",
            f"{group.slo_attainment:.1%}",
        )
        for label, group in summary.groups.items()
    )
    columns = ("", "requests", "TTFT P50", "TTFT P99", "TBT P99", "in all P50", "of it waiting", "within the SLO")
    return FigureTable(columns=columns, rows=rows)


def compare(summaries: Mapping[str, Summary], title: str = "") -> FigureTable:
    """Return a row for each run, times in milliseconds."""
    rows = tuple(
        (
            label,
            f"{one.requests_per_s:.3g}",
            f"{one.output_tokens_per_s:,.0f}",
            *(milliseconds(one.ttft.p50) if one.ttft else "", milliseconds(one.ttft.p99) if one.ttft else ""),
            *(milliseconds(one.tbt.p50) if one.tbt else "", milliseconds(one.tbt.p99) if one.tbt else ""),
            f"{one.slo_attainment:.1%}",
            "" if one.hit_rate is None else f"{one.hit_rate:.1%}",
            f"{one.adapter_wait_share:.2%}",
        )
        for label, one in summaries.items()
    )
    columns = (
        *("", "requests/s", "tokens/s", "TTFT P50", "TTFT P99", "TBT P50", "TBT P99"),
        *("within the SLO", "hits", "TTFT on loading"),
    )
    return FigureTable(title=title, columns=columns, rows=rows)
