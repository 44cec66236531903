"""The report of `manylora simulate`: tables on the terminal, and files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from manylora.core.config import GIB
from manylora.core.types import Tier
from manylora.lab.measure import Summary, counted_of
from manylora.lab.measure.plots import can_plot, plot_latencies, plot_memory, plot_queues
from manylora.lab.measure.tables import FigureTable, failures, figures, groups, latencies
from manylora.lab.sim.run.simulation import Run, SimulationConfig
from manylora.lab.sim.scenario import Scenario
from manylora.lab.workloads import Workload

__all__ = ["SimulationReport", "print_report", "setup_of", "write_report", "write_results"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """One simulation."""

    scenario: Scenario
    table: dict[str, Any]  # the scenario as a TOML table, with options
    workload: Workload  # requests and adapters
    config: SimulationConfig
    run: Run
    summary: Summary
    wall_s: float  # duration of the simulation in seconds


def print_report(report: SimulationReport, console: Console) -> None:
    """Print the report."""
    console.print(_headline(report), soft_wrap=True)
    for table in _tables(report):
        console.print(table.rich())


def write_report(report: SimulationReport, folder: Path) -> Iterator[Path]:
    """Write the report to a folder; yield the path of each file.

    ``results.json`` has the scenario, the summary and the counters of replicas. Plots need matplotlib.
    """
    content = {
        "scenario": report.table,
        "num_pages": report.config.num_pages,
        "page_bytes": report.config.base.page.num_bytes,
        "virtual_s": report.run.duration_s,
        "summary": asdict(report.summary),
        "replicas": [asdict(stats) for stats in report.run.stats],
    }
    records = ({name: value for name, value in asdict(one).items() if name != "gaps_s"} for one in report.run.records)
    parts = [f"# {report.scenario.workload.name}", _headline(report), *(one.markdown() for one in _tables(report))]
    yield from write_results(folder, content, records, parts)
    if can_plot():
        yield plot_latencies({report.scenario.workload.name: report.run.records}, folder / "latency.png")
        for replica, timeline in enumerate(report.run.timelines):
            ending = f"-{replica}.png" if len(report.run.timelines) > 1 else ".png"
            yield plot_memory(timeline, folder / f"memory{ending}")
            yield plot_queues(timeline, folder / f"queues{ending}")


def write_results(
    folder: Path, content: Mapping[str, object], records: Iterable[Mapping[str, object]], parts: Iterable[str]
) -> Iterator[Path]:
    """Write the results of a run, a line for each request, and its tables to a folder; yield the path of each file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("results.json", json.dumps(content, indent=1)),
        ("requests.jsonl", "\n".join(map(json.dumps, records))),
        ("table.md", "\n\n".join(parts)),
    ):
        (folder / name).write_text(text + "\n", encoding="utf-8")
        yield folder / name


def setup_of(report: SimulationReport) -> str:
    """Return the model, the devices and the workload in words."""
    setup = report.scenario.setup
    devices = f"{setup.tensor_parallel_size} of {setup.hardware}" if setup.tensor_parallel_size > 1 else setup.hardware
    where = f"by profile {setup.profile}" if setup.profile else f"on {devices}"
    replicas = f", {setup.num_replicas} replicas behind {setup.router}" if setup.num_replicas > 1 else ""
    num_requests, num_adapters = len(report.workload.requests), len(report.workload.adapters)
    return (
        f"{report.config.base.name} {where}{replicas}: {num_requests:,} requests at {report.workload.rate:.3g}/s "
        f"over {num_adapters:,} adapters"
    )


def _headline(report: SimulationReport) -> str:
    setup = report.scenario.setup
    pool_gib = report.config.num_pages * report.config.base.page.num_bytes / GIB
    return (
        f"{setup_of(report)}, policy {setup.scheduler.policy}, eviction {setup.adapters.eviction}, "
        f"{pool_gib:.1f} GiB of pages. {report.run.duration_s:,.0f} s of virtual time took {report.wall_s:.1f} s."
    )


def _tables(report: SimulationReport) -> list[FigureTable]:
    tables = [figures(report.summary, slo=report.scenario.slo)]
    if report.summary.num_errors:
        tables.append(failures(counted_of(report.run.records, report.scenario.warm_up_s)))
    tables.append(latencies(report.summary))
    if len(report.summary.groups) > 1:
        tables.append(groups(report.summary))
    return [*tables, _replicas(report)]


def _replicas(report: SimulationReport) -> FigureTable:
    """Return the engine's figures of each replica."""
    rows, duration_s = [], report.run.duration_s or math.inf  # all refused at once
    for replica, (stats, timeline) in enumerate(zip(report.run.stats, report.run.timelines, strict=True)):
        device = timeline.loads[Tier.DEVICE]
        steps_s = sum(timeline.steps.took_s)
        rows.append(
            (
                str(replica),
                f"{stats.num_steps:,}",
                f"{steps_s / duration_s:.1%}",
                f"{sum(timeline.steps.num_sequences) / max(1, stats.num_steps):.1f}",
                f"{stats.num_loads:,}",
                f"{stats.num_disk_loads:,}",
                f"{stats.num_evictions:,}",
                f"{sum(device.busy_s) / duration_s:.1%}",
                f"{sum(device.num_bytes) / 1e9:,.1f}",
            )
        )
    columns = (
        *("replica", "steps", "device busy", "sequences a step"),
        *("copies", "reads from disk", "evictions", "link busy", "GB copied"),
    )
    return FigureTable(title="", columns=columns, rows=tuple(rows))
