"""One frame of `manylora top` for rich: a report, and rates since an earlier one. Functions without side effects."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from manylora.cli.views.top_cells import STATE_STYLES, as_seconds, as_size, as_span, known, memory_lines, p99s
from manylora.cli.views.top_narrow import narrow_parts
from manylora.cli.views.top_rates import Rates
from manylora.core.engine.status import ColdStartStatus, EngineStats
from manylora.core.scheduling import QueueStatus
from manylora.serving.metrics.status_report import AdapterRow, ReplicaRow, StatusReport

__all__ = ["frame"]

LEGEND = "times are P99, prices us saved per second and page"


def frame(
    report: StatusReport | None,
    rates: Rates | None,
    *,
    url: str,
    num_rows: int,
    problem: str | None = None,
    is_narrow: bool = False,
) -> RenderableType:
    """Return a frame.

    Args:
        report: The last report; ``None`` before the first.
        rates: Recent rates.
        url: Address of the server.
        num_rows: Most adapters to show.
        problem: The reason why the report is old, if it is.
        is_narrow: Whether all must fit into 80 columns and few lines.
    """
    parts: list[RenderableType] = []
    if problem is not None:
        parts.append(Text.assemble((problem, "bold red"), (" (trying again; q to leave)", "dim")))
    if report is None:
        return Group(*parts)
    parts.append(_headline(report, None if is_narrow else url))
    if report.engine is None:
        parts.append(Text("No engine serves now.", "yellow"))
        return Group(*parts)
    if is_narrow:
        return Group(*parts, *narrow_parts(report, report.engine, rates, num_rows))
    parts += [_memory(report.engine, report.page_bytes), _activity(report, report.engine, rates), _latencies(report)]
    if len(report.replicas) > 1:
        parts.append(_replicas(report.replicas))
    if _has_limits(report.engine.queues):
        parts.append(_queues(report.engine.queues))
    if report.adapters and num_rows > 0:
        parts.append(_adapters(report.adapters[:num_rows], report.engine))
    return Group(*parts)


def _headline(report: StatusReport, url: str | None) -> Text:
    restarts = f"{report.num_restarts} restarts", "bold red" if report.num_restarts else "dim"
    return Text.assemble(
        ("manylora ", "bold"),
        (report.version, "dim"),
        f"  {report.model}{'' if url is None else f' at {url}'}  ",
        (report.state, STATE_STYLES.get(report.state, "bold yellow")),
        (f"  up {as_span(report.time - report.started_at)}  ", "dim"),
        restarts,
    )


def _memory(stats: EngineStats, page_bytes: int | None) -> RenderableType:
    bar, legend = memory_lines(stats)
    size = "" if page_bytes is None else f" of {as_size(page_bytes)}"
    legend.append(f"{stats.num_pages:,} pages{size}", "dim")
    return Group(Text.assemble("\n", ("memory  ", "bold"), bar), Text.assemble("        ", legend))


def _activity(report: StatusReport, stats: EngineStats, rates: Rates | None) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 3, 0, 0))
    asked = stats.num_adapter_requests

    def per_second(pick: Callable[[Rates], float]) -> str:
        return "-" if rates is None else f"{pick(rates):,.1f}/s"

    def row(title: str, *facts: tuple[str, str]) -> None:
        cells = [Text.assemble((f"{name} ", "dim"), value) for name, value in facts]
        table.add_row(Text(title, "bold"), *cells)

    row(
        "requests",
        ("running", f"{stats.num_running:,}"),
        ("waiting", f"{stats.num_waiting:,}"),
        ("over HTTP", f"{report.num_in_flight:,}"),
        ("pre-emptions", f"{stats.num_preemptions:,} ({per_second(lambda rates: rates.preemptions)})"),
        ("squashes", f"{stats.num_squashes:,}"),
    )
    row(
        "work",
        ("tokens", per_second(lambda rates: rates.tokens)),
        ("steps", per_second(lambda rates: rates.steps)),
        ("loads", f"{stats.num_loads:,} ({per_second(lambda rates: rates.loads)})"),
        ("evictions", f"{stats.num_evictions:,} ({per_second(lambda rates: rates.evictions)})"),
    )
    row(
        "adapters",
        ("on the device", f"{stats.num_resident:,}"),
        ("in host memory", f"{stats.num_host:,}"),
        ("registered", f"{stats.num_registered:,}"),
        ("found on the device", "-" if not asked else f"{stats.num_adapter_hits / asked:.1%} of {asked:,}"),
    )
    if any(one.num_starts for one in stats.cold_starts):
        row("cold starts", *((one.mode, _cold_start(one)) for one in stats.cold_starts))
    return table


def _cold_start(one: ColdStartStatus) -> str:
    """Return the number of cold starts, and the means of the expected and the actual time to first token."""
    if not one.num_measured:
        return f"{one.num_starts:,}"
    expected, actual = (as_seconds(total / one.num_measured) for total in (one.expected_s, one.actual_s))
    return f"{one.num_starts:,} ({actual}, expected {expected})"


def _latencies(report: StatusReport) -> Table:
    table = _table(f"last {report.window_s:.0f} s", "P50", "P90", "P99", "count")
    for title, durations in (
        ("waiting", report.latency.queue_s),
        ("first token", report.latency.ttft_s),
        ("between tokens", report.latency.inter_token_s),
        ("whole request", report.latency.e2e_s),
    ):
        if durations is None:
            table.add_row(title, "-", "-", "-", "0")
        else:
            figures = (durations.p50, durations.p90, durations.p99)
            table.add_row(title, *map(as_seconds, figures), f"{durations.count:,}")
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
            known(row.num_running),
            known(row.num_waiting),
            known(row.num_free_pages),
            known(row.num_loads),
            known(row.num_resident),
            str(len(row.pinned)),
            *([row.node or "-"] if has_nodes else []),
        )
    return table


def _has_limits(queues: Sequence[QueueStatus]) -> bool:
    """Whether there are several queues, or limits on one."""
    return len(queues) > 1 or any(queue.below is not None or queue.quota_tokens is not None for queue in queues)


def _queues(queues: Sequence[QueueStatus]) -> Table:
    table = _table("queue", "waiting", "running", "size below", "quota", "taken")
    for number, queue in enumerate(queues, 1):
        table.add_row(
            str(number),
            f"{queue.num_waiting:,}",
            known(queue.num_running),
            "-" if queue.below is None else f"{queue.below:.4g}",
            known(queue.quota_tokens),
            known(queue.used_tokens),
        )
    return table


def _adapters(rows: Sequence[AdapterRow], stats: EngineStats) -> Table:
    counts = ("rank", "pages", "price", "running", "waiting", "requests", "hits")
    table = _table("adapter", "tier", "state", *counts, "first token", "between")
    for row in rows:
        hits = "-" if not row.num_requests else f"{row.num_hits / row.num_requests:.0%}"
        table.add_row(
            Text(row.name + (" (pinned)" if row.pinned else "")),
            row.tier,
            Text(row.state, STATE_STYLES.get(row.state, "")),
            str(row.rank),
            f"{row.num_pages:,}",
            "" if row.price is None else f"{row.price * 1e6:,.3g}",
            str(row.num_running or ""),
            str(row.num_waiting or ""),
            f"{row.num_requests:,}",
            hits,
            *p99s(row.latency),
        )
    if len(rows) < stats.num_registered:
        table.caption = f"{len(rows):,} of {stats.num_registered:,}; {LEGEND}"
    else:
        table.caption = LEGEND
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption_justify="left")
    table.add_column(first, style="cyan", overflow="ellipsis", no_wrap=True)
    for title in others:
        table.add_column(title, justify="left" if title in ("tier", "state") else "right", no_wrap=True)
    return table
