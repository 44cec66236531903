"""`manylora simulate`: a scenario from a file, from options or from both, served in virtual time."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from manylora.catalog.hardware import HARDWARE
from manylora.catalog.models import MODELS
from manylora.cli.options.panels import SCENARIO_SETS, SCENARIO_TRACES, names, names_or_own, panel
from manylora.cli.views.simulate_report import Report, print_report, write_report
from manylora.cli.views.terminal import note, notes, out
from manylora.errors import ConfigError
from manylora.memory import EVICTION_POLICIES
from manylora.routing import ROUTERS
from manylora.scheduling import POLICIES, PREDICTORS
from manylora.sim.run.simulation import Run, SimulationConfig, simulate
from manylora.sim.scenario import read_scenario, read_setting, read_table, with_setting
from manylora.workloads import Workload

__all__ = ["MADE_UP", "simulate_command"]

MADE_UP: dict[str, Any] = {
    "warm_up_s": 30,
    "workload": {
        "name": "made up",
        "num_requests": 1000,
        "arrivals": {"kind": "poisson", "rate": 2.0},
        "lengths": {
            "kind": "parametric",
            "prompt": {"kind": "gamma", "shape": 1.338, "scale": 863.0},
            "output": {"kind": "gamma", "shape": 1.646, "scale": 128.0},
            "bounds": {"max_prompt": 3072, "max_output": 1000},
        },
        "popularity": {"kind": "zipf"},
    },
    "setup": {"model": "llama-3-8b", "adapters": {"host_bytes": 64_000_000_000}},
    "slo": {"ttft_s": 5.0},
}
"""What is simulated without a file: lengths as in the Azure conversation trace, a hundred adapters, one A40."""


def simulate_command(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="A scenario in TOML; without one, a made-up service.", show_default=False),
    ] = None,
    traces: Annotated[Path | None, SCENARIO_TRACES] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write results.json, table.md and plots there; made if it is not there."),
    ] = None,
    sets: Annotated[list[str] | None, SCENARIO_SETS] = None,
    rate: Annotated[float | None, panel("Workload", "Requests per second.")] = None,
    requests: Annotated[int | None, panel("Workload", "How many requests at most.")] = None,
    duration: Annotated[float | None, panel("Workload", "For how many seconds at most.")] = None,
    adapters: Annotated[int | None, panel("Workload", "How many adapters.")] = None,
    seed: Annotated[int | None, panel("Workload", "Another seed, another workload of the same kind.")] = None,
    model: Annotated[
        str | None, panel("Setup", f"{names(MODELS)}, or the path of a config.json.", metavar="NAME")
    ] = None,
    hardware: Annotated[
        str | None, panel("Setup", f"{names(HARDWARE)}, or the path of a TOML data sheet.", metavar="NAME")
    ] = None,
    tensor_parallel: Annotated[int | None, panel("Setup", "Devices that share each layer.")] = None,
    profile: Annotated[
        str | None,
        panel("Setup", "A measured profile, instead of model and hardware.", metavar="FILE"),
    ] = None,
    replicas: Annotated[int | None, panel("Setup", "How many replicas share the requests.")] = None,
    router: Annotated[
        str | None, panel("Setup", f"Which replica gets a request: {names_or_own(ROUTERS)}.", metavar="NAME")
    ] = None,
    policy: Annotated[
        str | None, panel("Scheduling", f"Which waiting request goes first: {names_or_own(POLICIES)}.", metavar="NAME")
    ] = None,
    predictor: Annotated[
        str | None, panel("Scheduling", f"What guesses answer lengths: {names_or_own(PREDICTORS)}.", metavar="NAME")
    ] = None,
    eviction: Annotated[
        str | None,
        panel(
            "Scheduling", f"Which idle adapter or prefix makes room: {names_or_own(EVICTION_POLICIES)}.", metavar="NAME"
        ),
    ] = None,
    slo_ttft: Annotated[float | None, panel("Objective", "Longest time to first token, in seconds.")] = None,
    slo_tbt: Annotated[float | None, panel("Objective", "Longest time between two tokens, in seconds.")] = None,
    warm_up: Annotated[
        float | None, panel("Objective", "Requests of these first seconds are served and not counted.")
    ] = None,
) -> None:
    """Serve a workload in virtual time, without a model or a GPU, and say how it went.

    The scheduler, the cache and the memory are those of the server; what a step and a copy take is modelled. The same
    command gives the same figures on any machine.
    """
    table = read_table(file) if file is not None else dict(MADE_UP)
    table.pop("plan", None)  # for `manylora plan`, which takes the same file
    given: dict[str, Any] = {
        "workload.arrivals.rate": rate,
        "workload.num_requests": requests,
        "workload.duration_s": duration,
        "workload.adapters.count": adapters,
        "seed": seed,
        "setup.model": model,
        "setup.hardware": hardware,
        "setup.profile": profile,
        "setup.tensor_parallel": tensor_parallel,
        "setup.num_replicas": replicas,
        "setup.router": router,
        "setup.scheduler.policy": policy,
        "setup.scheduler.predictor": predictor,
        "setup.adapters.eviction": eviction,
        "slo.ttft_s": slo_ttft,
        "slo.tbt_s": slo_tbt,
        "warm_up_s": warm_up,
    }
    changes = {key: value for key, value in given.items() if value is not None}
    changes |= dict(read_setting(text) for text in sets or ())
    for key, value in changes.items():
        table = with_setting(table, key, value)
    folders = ([file.parent] if file is not None else []) + ([traces] if traces is not None else [])
    scenario = read_scenario(table, folders=tuple(folders))
    workload, config = scenario.make_workload(), scenario.make_config()
    if not workload.requests:
        raise ConfigError("The workload has no requests")
    lasts_s = workload.requests[-1].arrival_s - workload.requests[0].arrival_s
    if lasts_s < scenario.warm_up_s:
        raise ConfigError(
            f"Got warm_up_s = {scenario.warm_up_s:g}, and the {len(workload.requests)} requests come within "
            f"{lasts_s:.3g} s: none would be counted"
        )
    if output is not None:
        _make_folder(output)  # before the run, which may take minutes
    began = perf_counter()
    run = _simulate(workload, config)
    report = Report(
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


def _simulate(workload: Workload, config: SimulationConfig) -> Run:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=notes, transient=True) as progress:
        task = progress.add_task("requests", total=len(workload.requests))
        return simulate(workload, config, on_progress=lambda num, now: progress.update(task, completed=num))


def _rank(record: Any) -> str:
    return f"rank {record.rank:>3}" if record.rank else "base"
