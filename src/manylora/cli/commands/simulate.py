"""`manylora simulate`: serve a scenario, from a file and options, in virtual time."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from manylora.cli.options.fields import Chosen, flags_of, with_flags
from manylora.cli.options.scenarios import PLACES, SETS, TRACES, change, folders_of, scenario_table
from manylora.cli.options.values import panel
from manylora.cli.views.simulate_report import SimulationReport, print_report, write_report
from manylora.cli.views.terminal import note, out, progress_bar
from manylora.core.config import AdapterConfig, SchedulerConfig
from manylora.core.errors import ConfigError
from manylora.lab.sim.run.simulation import simulate
from manylora.lab.sim.scenario import Scenario, read_scenario
from manylora.lab.sim.setup import Setup

__all__ = ["simulate_command"]

_FLAGS = flags_of(
    *(Setup, SchedulerConfig, AdapterConfig, Scenario),
    only=(
        *("model", "hardware", "tensor_parallel", "profile", "num_replicas", "router", "router_options"),
        *("policy", "policy_options", "predictor", "predictor_options", "eviction", "eviction_options"),
        *("seed", "warm_up_s"),
    ),
    may_be_unset=True,
)


@with_flags(_FLAGS, panels=("Workload", "Setup", "Scheduling", "Adapters", "Objective"))
def simulate_command(
    chosen: Chosen,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="A scenario in TOML; by default a synthetic service.", show_default=False),
    ] = None,
    traces: Annotated[Path | None, TRACES] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write results.json, table.md and plots to this folder."),
    ] = None,
    sets: Annotated[list[str] | None, SETS] = None,
    rate: Annotated[float | None, panel("Workload", "Requests per second.")] = None,
    requests: Annotated[int | None, panel("Workload", "Most requests.")] = None,
    duration: Annotated[float | None, panel("Workload", "Longest time of arrivals in seconds.")] = None,
    adapters: Annotated[int | None, panel("Workload", "Number of adapters.")] = None,
    slo_ttft: Annotated[float | None, panel("Objective", "Longest time to first token, in seconds.")] = None,
    slo_tbt: Annotated[float | None, panel("Objective", "Longest time between two tokens, in seconds.")] = None,
) -> None:
    """Serve a workload in virtual time, without a model or a GPU, and report latency and throughput.

    The scheduler, the cache and the memory are those of the server; the durations of steps and copies are modelled.
    Results are the same on every machine.
    """
    table = scenario_table(file)
    table.pop("plan", None)  # for `manylora plan`, which reads the same file
    given: dict[str, Any] = {
        "workload.arrivals.rate": rate,
        "workload.num_requests": requests,
        "workload.duration_s": duration,
        "workload.adapters.count": adapters,
        "slo.ttft_s": slo_ttft,
        "slo.tbt_s": slo_tbt,
    }
    table = change(table, given | chosen.settings(PLACES), sets)
    scenario = read_scenario(table, folders=folders_of(file, traces))
    workload, config = scenario.make_workload(), scenario.make_config()
    if not workload.requests:
        raise ConfigError("The workload has no requests")
    lasts_s = workload.requests[-1].arrival_s - workload.requests[0].arrival_s
    if lasts_s < scenario.warm_up_s:
        raise ConfigError(
            f"Got warm_up_s = {scenario.warm_up_s:g}, and the {len(workload.requests)} requests arrive within "
            f"{lasts_s:.3g} s: none would be counted"
        )
    if output is not None:
        _make_folder(output)  # before the run, which may take minutes
    began = perf_counter()
    with progress_bar("requests", len(workload.requests)) as update:
        run = simulate(workload, config, on_progress=lambda num, now: update(completed=num))
    report = SimulationReport(
        scenario=scenario,
        table=table,
        workload=workload,
        config=config,
        run=run,
        summary=run.summary(slo=scenario.slo, warm_up_s=scenario.warm_up_s, group=_rank),
        wall_s=perf_counter() - began,
    )
    print_report(report, out)
    if output is not None:
        for path in write_report(report, output):
            note(f"wrote {path}")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"Got --output {str(folder)!r}, which cannot be made: {error.strerror}") from None


def _rank(record: Any) -> str:
    return f"rank {record.rank:>3}" if record.rank else "base"
