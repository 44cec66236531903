"""A frame of `manylora top` for 80 columns and 24 lines: the same figures, fewer of them, and no empty lines."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from manylora.cli.views.top_cells import STATE_STYLES, as_seconds, memory_lines, p99s
from manylora.cli.views.top_rates import Rates
from manylora.core.engine.status import EngineStats
from manylora.serving.metrics.status_report import StatusReport

__all__ = ["NARROW_LINES_ABOVE", "narrow_parts"]

NARROW_LINES_ABOVE = 14
"""Lines of a narrow frame beside the adapters: headline, problem, memory, activity, latency, headers, caption."""

NAME_WIDTH = 24


def narrow_parts(
    report: StatusReport, stats: EngineStats, rates: Rates | None, num_rows: int
) -> Iterator[RenderableType]:
    """Yield the parts below the headline."""
    bar, legend = memory_lines(stats)
    for line in (bar, legend, *_activity(stats, rates)):
        line.no_wrap, line.overflow = True, "ellipsis"
        yield line
    yield _latencies(report)
    if report.adapters and num_rows > 0:
        yield _adapters(report, stats, num_rows)


def _activity(stats: EngineStats, rates: Rates | None) -> Iterator[Text]:
    asked = stats.num_adapter_requests
    hits = "-" if not asked else f"{stats.num_adapter_hits / asked:.0%}"
    tokens, steps, loads = (
        ("-", "-", "-")
        if rates is None
        else (f"{rates.tokens:,.0f}/s", f"{rates.steps:,.1f}/s", f"{rates.loads:,.1f}/s")
    )
    yield _facts(running=stats.num_running, waiting=stats.num_waiting, tokens=tokens, steps=steps, loads=loads)
    device, host, known = stats.num_resident, stats.num_host, stats.num_registered
    yield _facts(preempted=stats.num_preemptions, device=device, host=host, registered=known, hits=hits)


def _facts(**facts: int | str) -> Text:
    line = Text()
    for name, value in facts.items():
        line.append(f"{name} ", "dim")
        line.append(f"{value:,}  " if isinstance(value, int) else f"{value}  ")
    return line


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", caption_justify="left")
    table.add_column(first, style="cyan", overflow="ellipsis", no_wrap=True, max_width=NAME_WIDTH)
    for title in others:
        table.add_column(title, justify="left" if title in ("tier", "state") else "right", no_wrap=True)
    return table


def _latencies(report: StatusReport) -> Table:
    table = _table(f"last {report.window_s:.0f} s", "P50", "P90", "P99", "count")
    latency = report.latency
    for title, one in (
        ("waiting", latency.queue_s),
        ("first token", latency.ttft_s),
        ("between tokens", latency.inter_token_s),
        ("whole request", latency.e2e_s),
    ):
        figures = (
            ("-", "-", "-", "0") if one is None else (*map(as_seconds, (one.p50, one.p90, one.p99)), f"{one.count:,}")
        )
        table.add_row(title, *figures)
    return table


def _adapters(report: StatusReport, stats: EngineStats, num_rows: int) -> Table:
    table = _table("adapter", "tier", "run", "wait", "requests", "hits", "first token", "between")
    for row in report.adapters[:num_rows]:
        table.add_row(
            Text(row.name),
            Text(row.tier, STATE_STYLES.get(row.state, "")),
            str(row.num_running or ""),
            str(row.num_waiting or ""),
            f"{row.num_requests:,}",
            "-" if not row.num_requests else f"{row.num_hits / row.num_requests:.0%}",
            *p99s(row.latency),
        )
    shown = min(num_rows, len(report.adapters))
    table.caption = f"{shown:,} of {stats.num_registered:,}; times are P99; q to leave"
    return table
