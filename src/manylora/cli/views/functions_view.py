"""Tables of `manylora functions`: functions with their last cold start, and a bill."""

from __future__ import annotations

from rich import box
from rich.table import Table

from manylora.functions.controller.bill import COLUMNS, Bill
from manylora.functions.wire import Overview

__all__ = ["bill_table", "functions_table", "starts_table"]

MIB = 2**20


def functions_table(overview: Overview, *, now: float, with_all: bool) -> Table:
    """Return the functions that have ever been awake, or all."""
    rows = [one for one in overview.functions if with_all or one.state.state != "asleep" or one.state.last_start]
    up = sum(node.is_up for node in overview.nodes)
    title = f"{len(rows)} of {overview.num_functions} functions, {up} of {len(overview.nodes)} nodes up"
    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    for head in ("function", "tenant", "backbone", "node", "state"):
        table.add_column(head, overflow="fold")
    for head in ("awake s", "MiB", "req/s", "starts", "deaths"):
        table.add_column(head, justify="right")
    table.add_column("not locked down", overflow="fold")
    for one in rows:
        state = one.state
        table.add_row(
            one.name,
            one.tenant,
            one.backbone,
            one.node or "",
            state.state + (" (held)" if state.is_held else "") + (f": {state.error}" if state.error else ""),
            "" if state.awake_since is None else f"{max(0.0, now - state.awake_since):.0f}",
            f"{state.pss_bytes / MIB:.0f}" if state.pss_bytes else "",
            f"{state.requests_per_s:.2f}",
            str(state.num_starts),
            str(state.num_deaths),
            ", ".join(note.name for note in state.missing),
        )
    return table


def starts_table(overview: Overview) -> Table:
    """Return the last cold start of each function that has had one, by its stages."""
    starts = [(one.name, one.state.last_start) for one in overview.functions if one.state.last_start is not None]
    stages = list(dict.fromkeys(stage for _, start in starts for stage in start.stages_s))
    table = Table(box=box.SIMPLE, title="last cold starts, in milliseconds", title_justify="left")
    table.add_column("function", overflow="fold")
    table.add_column("from")
    for head in (*stages, "total", "to first token"):
        table.add_column(head, justify="right")
    for name, start in starts:
        took = [start.stages_s.get(stage, 0.0) for stage in stages]
        first = "" if start.first_token_s is None else f"{1000 * start.first_token_s:.0f}"
        table.add_row(name, start.begun_from, *(f"{1000 * one:.0f}" for one in (*took, start.total_s)), first)
    return table


def bill_table(bill: Bill, by: str) -> Table:
    """Return the lines of a bill and their sum beside the machines' time."""
    device_s = bill.machines.device_ns / 1e9
    lost = f", {lost_ns / 1e9:.1f} s of it without an agent" if (lost_ns := bill.machines.lost_ns) else ""
    table = Table(box=box.SIMPLE, caption=f"{device_s:.3f} s of devices{lost}", caption_justify="left")
    table.add_column(by, overflow="fold")
    for head in COLUMNS:
        table.add_column(head.replace("_", " "), justify="right")
    for line in bill.lines:
        *amounts, num_requests, num_tokens, cost = line.values()
        table.add_row(line.name, *(f"{one:.3f}" for one in amounts), str(num_requests), str(num_tokens), f"{cost:.6f}")
    return table
