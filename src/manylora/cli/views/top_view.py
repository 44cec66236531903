"""One frame of `manylora top` for rich: a report, and rates since an earlier one. Functions without side effects.

A wide frame has every figure. A narrow one fits 80 columns and 24 lines: fewer figures, and no empty lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import floor

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from manylora.cli.views.status_source import Rates
from manylora.core.engine.status import ColdStartStatus, EngineStats
from manylora.core.scheduling import QueueStatus
from manylora.serving.metrics.status_report import AdapterRow, Latency, Percentiles, ReplicaRow, StatusReport

__all__ = ["NARROW_LINES_ABOVE", "frame"]

NARROW_LINES_ABOVE = 14
"""Lines of a narrow frame beside the adapters: headline, problem, memory, activity, latency, headers, caption."""

LEGEND = "times are P99, prices us saved per second and page"
NARROW_NAME_WIDTH = 24
BAR_WIDTH = 60
OWNERS = (("KV", "█", "cyan"), ("prefix", "▓", "blue"), ("adapters", "▒", "magenta"), ("free", "·", "dim"))
STATE_STYLES = {"serving": "bold green", "active": "green", "loading": "yellow", "evicting": "red"}


def frame(
    report: StatusReport | None,
    rates: Rates | None,
    *,
    url: str,
    num_rows: int,
    problem: str | None = None,
    is_narrow: bool = False,
) -> RenderableType:
    """Return a frame of the last report and recent rates, with at most ``num_rows`` adapters.

    If the report is old, ``problem`` is the reason. A narrow frame fits into 80 columns and few lines.
    """
    parts: list[RenderableType] = []
    if problem is not None:
        parts.append(Text.assemble((problem, "bold red"), (" (trying again; q to leave)", "dim")))
    if report is None:
        return Group(*parts)
    parts.append(_headline(report, None if is_narrow else url))
    if report.engine is None:
        return Group(*parts, Text("No engine serves now.", "yellow"))
    below = _narrow_parts if is_narrow else _wide_parts
    return Group(*parts, *below(report, report.engine, rates, report.adapters[: max(0, num_rows)]))


def _wide_parts(
    report: StatusReport, stats: EngineStats, rates: Rates | None, adapters: Sequence[AdapterRow]
) -> Iterator[RenderableType]:
    bar, legend = _memory(stats)
    size = "" if report.page_bytes is None else f" of {_size(report.page_bytes)}"
    legend.append(f"{stats.num_pages:,} pages{size}", "dim")
    yield Group(Text.assemble("\n", ("memory  ", "bold"), bar), Text.assemble("        ", legend))
    yield _activity(report, stats, rates)
    yield _latencies(report)
    if len(report.replicas) > 1:
        yield _replicas(report.replicas)
    if len(queues := stats.queues) > 1 or any(one.below is not None or one.quota_tokens is not None for one in queues):
        yield _queues(queues)
    if adapters:
        counts = ("rank", "pages", "price", "running", "waiting", "requests", "hits")
        table = _table("adapter", "tier", "state", *counts, "first token", "between")
        for row in adapters:
            table.add_row(
                Text(row.name + (" (pinned)" if row.pinned else "")),
                row.tier,
                Text(row.state, STATE_STYLES.get(row.state, "")),
                str(row.rank),
                f"{row.num_pages:,}",
                "" if row.price is None else f"{row.price * 1e6:,.3g}",
                *_requests(row),
            )
        left_out = f"{len(adapters):,} of {stats.num_registered:,}; " if len(adapters) < stats.num_registered else ""
        table.caption = left_out + LEGEND
        yield table


def _narrow_parts(
    report: StatusReport, stats: EngineStats, rates: Rates | None, adapters: Sequence[AdapterRow]
) -> Iterator[RenderableType]:
    for line in (*_memory(stats), *_narrow_activity(stats, rates)):
        line.no_wrap, line.overflow = True, "ellipsis"
        yield line
    yield _latencies(report, is_narrow=True)
    if adapters:
        titles = ("tier", "run", "wait", "requests", "hits", "first token", "between")
        table = _table("adapter", *titles, is_narrow=True)
        for row in adapters:
            table.add_row(Text(row.name), Text(row.tier, STATE_STYLES.get(row.state, "")), *_requests(row))
        table.caption = f"{len(adapters):,} of {stats.num_registered:,}; times are P99; q to leave"
        yield table


def _headline(report: StatusReport, url: str | None) -> Text:
    restarts = f"{report.num_restarts} restarts", "bold red" if report.num_restarts else "dim"
    return Text.assemble(
        ("manylora ", "bold"),
        (report.version, "dim"),
        f"  {report.model}{'' if url is None else f' at {url}'}  ",
        (report.state, STATE_STYLES.get(report.state, "bold yellow")),
        (f"  up {_span(report.time - report.started_at)}  ", "dim"),
        restarts,
    )


def _memory(stats: EngineStats) -> tuple[Text, Text]:
    """Return a bar of the pages by owner, and its legend."""
    pages = (stats.num_kv_pages, stats.num_prefix_pages, stats.num_adapter_pages, stats.num_free_pages)
    bar, legend = Text(), Text()
    for (name, mark, style), cells, count in zip(OWNERS, _cells(pages, BAR_WIDTH), pages, strict=True):
        bar.append(mark * cells, style)
        legend.append(f"{mark} ", style)
        legend.append(f"{name} {count:,} ({count / stats.num_pages:.0%})  ")
    return bar, legend


def _cells(parts: Sequence[int], width: int) -> list[int]:
    """Divide ``width`` cells in proportion to ``parts``; the largest remainders round up."""
    exact = [part * width / sum(parts) for part in parts]
    cells = [floor(share) for share in exact]
    by_remainder = sorted(range(len(parts)), key=lambda index: cells[index] - exact[index])
    for index in by_remainder[: width - sum(cells)]:
        cells[index] += 1
    return cells


def _activity(report: StatusReport, stats: EngineStats, rates: Rates | None) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 3, 0, 0))
    tokens, steps, loads, evictions, preemptions = (
        ("-",) * 5
        if rates is None
        else (f"{rate:,.1f}/s" for rate in (rates.tokens, rates.steps, rates.loads, rates.evictions, rates.preemptions))
    )
    asked = stats.num_adapter_requests
    rows: dict[str, dict[str, str]] = {
        "requests": {
            "running": f"{stats.num_running:,}",
            "waiting": f"{stats.num_waiting:,}",
            "over HTTP": f"{report.num_in_flight:,}",
            "pre-emptions": f"{stats.num_preemptions:,} ({preemptions})",
            "squashes": f"{stats.num_squashes:,}",
        },
        "work": {
            "tokens": tokens,
            "steps": steps,
            "loads": f"{stats.num_loads:,} ({loads})",
            "evictions": f"{stats.num_evictions:,} ({evictions})",
        },
        "adapters": {
            "on the device": f"{stats.num_resident:,}",
            "in host memory": f"{stats.num_host:,}",
            "registered": f"{stats.num_registered:,}",
            "found on the device": "-" if not asked else f"{stats.num_adapter_hits / asked:.1%} of {asked:,}",
        },
    }
    if any(one.num_starts for one in stats.cold_starts):
        rows["cold starts"] = {one.mode: _cold_start(one) for one in stats.cold_starts}
    for title, facts in rows.items():
        cells = (Text.assemble((f"{name} ", "dim"), value) for name, value in facts.items())
        table.add_row(Text(title, "bold"), *cells)
    return table


def _narrow_activity(stats: EngineStats, rates: Rates | None) -> Iterator[Text]:
    asked = stats.num_adapter_requests
    for facts in (
        {
            "running": f"{stats.num_running:,}",
            "waiting": f"{stats.num_waiting:,}",
            "tokens": "-" if rates is None else f"{rates.tokens:,.0f}/s",
            "steps": "-" if rates is None else f"{rates.steps:,.1f}/s",
            "loads": "-" if rates is None else f"{rates.loads:,.1f}/s",
        },
        {
            "preempted": f"{stats.num_preemptions:,}",
            "device": f"{stats.num_resident:,}",
            "host": f"{stats.num_host:,}",
            "registered": f"{stats.num_registered:,}",
            "hits": _share(stats.num_adapter_hits, asked),
        },
    ):
        yield Text.assemble(*(part for name, value in facts.items() for part in ((f"{name} ", "dim"), f"{value}  ")))


def _cold_start(one: ColdStartStatus) -> str:
    """Return the number of cold starts, and the means of the expected and the actual time to first token."""
    if not one.num_measured:
        return f"{one.num_starts:,}"
    expected, actual = (_seconds(total / one.num_measured) for total in (one.expected_s, one.actual_s))
    return f"{one.num_starts:,} ({actual}, expected {expected})"


def _latencies(report: StatusReport, *, is_narrow: bool = False) -> Table:
    table = _table(f"last {report.window_s:.0f} s", "P50", "P90", "P99", "count", is_narrow=is_narrow)
    latency = report.latency
    for title, one in (
        ("waiting", latency.queue_s),
        ("first token", latency.ttft_s),
        ("between tokens", latency.inter_token_s),
        ("whole request", latency.e2e_s),
    ):
        figures = (
            ("-", "-", "-", "0") if one is None else (*map(_seconds, (one.p50, one.p90, one.p99)), f"{one.count:,}")
        )
        table.add_row(title, *figures)
    return table


def _replicas(rows: Sequence[ReplicaRow]) -> Table:
    counts = ("restarts", "in flight", "running", "waiting", "free pages", "loads", "on the device")
    has_nodes = any(row.node is not None for row in rows)
    table = _table("replica", "state", *counts, "pinned", *(["node"] if has_nodes else []))
    for row in rows:
        table.add_row(
            str(row.index),
            Text(row.state, STATE_STYLES.get(row.state, "bold yellow")),
            str(row.num_restarts),
            f"{row.num_in_flight:,}",
            *map(_known, (row.num_running, row.num_waiting, row.num_free_pages, row.num_loads, row.num_resident)),
            str(len(row.pinned)),
            *([row.node or "-"] if has_nodes else []),
        )
    return table


def _queues(queues: Sequence[QueueStatus]) -> Table:
    table = _table("queue", "waiting", "running", "size below", "quota", "taken")
    for number, queue in enumerate(queues, 1):
        below = "-" if queue.below is None else f"{queue.below:.4g}"
        counts = map(_known, (queue.quota_tokens, queue.used_tokens))
        table.add_row(str(number), f"{queue.num_waiting:,}", _known(queue.num_running), below, *counts)
    return table


def _requests(row: AdapterRow) -> tuple[str, ...]:
    """Return the cells about an adapter's requests: running, waiting, all of them, hits, P99 of two latencies."""

    def p99(durations: Percentiles | None) -> str:
        return "" if durations is None else _seconds(durations.p99)

    latency: Latency = row.latency
    counts = str(row.num_running or ""), str(row.num_waiting or ""), f"{row.num_requests:,}"
    return (*counts, _share(row.num_hits, row.num_requests), p99(latency.ttft_s), p99(latency.inter_token_s))


# -- cells -------------------------------------------------------------------------------------------------------------


def _table(first: str, *others: str, is_narrow: bool = False) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption_justify="left")
    if is_narrow:
        table.box, table.padding, table.header_style = None, (0, 2, 0, 0), "dim"
    width = NARROW_NAME_WIDTH if is_narrow else None
    table.add_column(first, style="cyan", overflow="ellipsis", no_wrap=True, max_width=width)
    for title in others:
        table.add_column(title, justify="left" if title in ("tier", "state") else "right", no_wrap=True)
    return table


def _known(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _share(part: int, whole: int) -> str:
    return "-" if not whole else f"{part / whole:.0%}"


def _seconds(value_s: float) -> str:
    """Return a duration in its unit."""
    if value_s < 1e-3:
        return f"{value_s * 1e6:.0f} µs"
    if value_s < 1.0:
        value_ms = value_s * 1e3
        return f"{value_ms:.{2 if value_ms < 10 else 1 if value_ms < 100 else 0}f} ms"
    return f"{value_s:.2f} s" if value_s < 100 else _span(value_s)


def _span(seconds: float) -> str:
    """Return a duration in its two largest units."""
    left = max(0, int(seconds))
    days, hours, minutes = left // 86400, left // 3600 % 24, left // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {left % 60} s" if minutes else f"{left} s"


def _size(num_bytes: int) -> str:
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} B"
