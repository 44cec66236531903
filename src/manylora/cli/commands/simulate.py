"""`manylora simulate` and `manylora compare`: serve a scenario in virtual time, by one policy or by several."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from manylora.cli.options.fields import Chosen, flags_of, with_flags
from manylora.cli.options.scenarios import (
    PLACES,
    ScenarioFile,
    Sets,
    Traces,
    WorkloadOptions,
    change,
    folders_of,
    scenario_table,
)
from manylora.cli.options.values import check_output, panel
from manylora.cli.views.simulate_report import SimulationReport, print_report, setup_of, write_report
from manylora.cli.views.terminal import note, out, progress_bar
from manylora.core.config import AdapterConfig, SchedulerConfig
from manylora.core.errors import ConfigError
from manylora.core.plugins import options_for
from manylora.core.scheduling import POLICIES
from manylora.lab.measure.tables import compare
from manylora.lab.sim.run.simulation import simulate
from manylora.lab.sim.scenario import Scenario, read_scenario, with_setting
from manylora.lab.sim.setup import Setup

__all__ = ["compare_command", "simulate_command"]

_PANELS = ("Workload", "Setup", "Scheduling", "Adapters", "Objective")
_FLAGS = (
    *flags_of(WorkloadOptions),
    *flags_of(
        *(Setup, SchedulerConfig, AdapterConfig, Scenario),
        only=(
            *("model", "hardware", "tensor_parallel_size", "profile", "num_replicas", "router", "router_options"),
            *("policy", "policy_options", "predictor", "predictor_options", "eviction", "eviction_options"),
            *("seed", "warm_up_s"),
        ),
        may_be_unset=True,
    ),
)


@with_flags(_FLAGS, panels=_PANELS)
def simulate_command(
    chosen: Chosen,
    file: ScenarioFile = None,
    traces: Traces = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write results.json, table.md and plots to this folder.")
    ] = None,
    sets: Sets = None,
) -> None:
    """Serve a workload in virtual time, without a model or a GPU, and report latency and throughput.

    The scheduler, the cache and the memory are those of the server; the durations of steps and copies are modelled.
    Results are the same on every machine.
    """
    table = _table(file, chosen, sets)
    scenario = read_scenario(table, folders=folders_of(file, traces))
    check_output("--output", output, is_folder=True)
    report = _simulate(scenario, table, "requests")
    print_report(report, out)
    if output is not None:
        for path in write_report(report, output):
            note(f"wrote {path}")


@with_flags([flag for flag in _FLAGS if flag.field.name != "policy"], panels=_PANELS)
def compare_command(
    chosen: Chosen,
    file: ScenarioFile = None,
    traces: Traces = None,
    sets: Sets = None,
    policies: Annotated[
        list[str] | None,
        panel(
            "Scheduling",
            "A scheduling policy. Repeatable; by default all. Or your own, as module:Name or file.py:Name.",
            "--policy",
            metavar="|".join(sorted(POLICIES)),
        ),
    ] = None,
) -> None:
    """Serve one workload by several scheduling policies, in virtual time, and show them side by side.

    [bold]manylora compare --policy fifo --policy mine.py:Mine --rate 3[/bold]
    """
    table, folders = _table(file, chosen, sets), folders_of(file, traces)
    scenarios: dict[str, Scenario] = {}
    for name in dict.fromkeys(policies or sorted(POLICIES)):
        scenarios[name] = one = read_scenario(with_setting(table, "setup.scheduler.policy", name), folders=folders)
        scheduler = one.setup.scheduler
        options_for("policy", scheduler.policy, POLICIES, scheduler.policy_options)  # a mistake ends it before a run
    reports = {name: _simulate(one, table, name) for name, one in scenarios.items()}
    first = next(iter(reports.values()))
    files = [name.rpartition("/")[2] for name in reports]
    labels = files if len(set(files)) == len(files) else list(reports)
    summaries = {label: report.summary for label, report in zip(labels, reports.values(), strict=True)}
    out.print(f"{setup_of(first)}; SLO: {first.scenario.slo}; times in ms", soft_wrap=True)
    out.print(compare(summaries).rich())


def _table(file: Path | None, chosen: Chosen, sets: list[str] | None) -> dict[str, Any]:
    table = scenario_table(file)
    table.pop("plan", None)  # for `manylora plan`, which reads the same file
    return change(table, chosen.settings(PLACES), sets)


def _simulate(scenario: Scenario, table: dict[str, Any], label: str) -> SimulationReport:
    """Run a scenario, and show the progress; ``ConfigError`` if the workload has no request that would be counted."""
    workload, config = scenario.make_workload(), scenario.make_config()
    if not workload.requests:
        raise ConfigError("The workload has no requests")
    lasts_s = workload.requests[-1].arrival_s - workload.requests[0].arrival_s
    if lasts_s < scenario.warm_up_s:
        raise ConfigError(
            f"Got warm_up_s = {scenario.warm_up_s:g}, and the {len(workload.requests)} requests arrive within "
            f"{lasts_s:.3g} s: none would be counted"
        )
    began = perf_counter()
    with progress_bar(label, len(workload.requests)) as update:
        run = simulate(workload, config, on_progress=lambda num, now: update(completed=num))
    return SimulationReport(
        scenario=scenario,
        table=table,
        workload=workload,
        config=config,
        run=run,
        summary=run.summary(
            slo=scenario.slo,
            warm_up_s=scenario.warm_up_s,
            group=lambda one: f"rank {one.rank:>3}" if one.rank else "base",
        ),
        wall_s=perf_counter() - began,
    )
