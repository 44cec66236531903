"""`manylora experiment`: list published evaluations, run them again, and compare the results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from manylora.cli.views.terminal import note, out, progress_bar
from manylora.core.errors import ConfigError
from manylora.lab.experiments.cases import cases_of
from manylora.lab.experiments.findings import Findings, overall
from manylora.lab.experiments.pictures import draw
from manylora.lab.experiments.read import find_experiments, read_experiment
from manylora.lab.experiments.report import (
    WORDS,
    as_json,
    as_markdown,
    format_figure,
    format_interval,
    format_published,
)
from manylora.lab.experiments.running import Runner
from manylora.lab.experiments.spec import Experiment

__all__ = ["experiment_app"]

experiment_app = typer.Typer(
    help="Run published evaluations again, and compare with the published results.", no_args_is_help=True
)

QUICK_S = 60.0
OUTPUT = Path("experiments-results")

Traces = Annotated[Path | None, typer.Option(help="Folder of the traces of workloads.", exists=True, file_okay=False)]
Output = Annotated[Path, typer.Option(help="Folder for results, plots and the report.", file_okay=False)]
Seeds = Annotated[int | None, typer.Option(help="Runs of each case, with different seeds.", min=1)]
Processes = Annotated[int, typer.Option(help="Parallel runs.", min=1)]


@experiment_app.command("list")
def list_experiments() -> None:
    """List the experiments."""
    table = Table("name", "title", "published in", box=None, pad_edge=False)
    for name in find_experiments():
        experiment = read_experiment(name)
        table.add_row(name, experiment.title, experiment.source)
    out.print(table)


@experiment_app.command()
def run(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Experiments, suites, [bold]all[/bold], or your own files.")
    ],
    traces: Traces = None,
    output: Output = OUTPUT,
    seeds: Seeds = None,
    processes: Processes = 1,
    quick: Annotated[
        bool, typer.Option("--quick", help="One minute of arrivals and one seed, to test that it runs.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run every case again.")] = False,
) -> None:
    """Run experiments; finished cases with the same description are not run again."""
    chosen = _choose(names)
    runner = Runner(output / "runs", num_processes=processes, fresh=fresh)
    found = _run(chosen, runner, traces=traces, seeds=1 if quick else seeds, duration_s=QUICK_S if quick else None)
    for findings in found:
        _keep(findings, output)
        _show(findings)


@experiment_app.command()
def report(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME...]", help="Experiments, suites or your own files; by default all."),
    ] = None,
    traces: Traces = None,
    output: Output = OUTPUT,
    seeds: Seeds = None,
    processes: Processes = 1,
) -> None:
    """Run missing cases, and write report.md with its plots."""
    runner = Runner(output / "runs", num_processes=processes)
    found = _run(_choose(names or ["all"]), runner, traces=traces, seeds=seeds, duration_s=None)
    pages = [(findings, _keep(findings, output)) for findings in found]
    command = f"manylora experiment report {' '.join(names or [])}".strip() + (" --traces DIR" if traces else "")
    command += "" if seeds is None else f" --seeds {seeds}"
    (output / "report.md").write_text(as_markdown(pages, command))
    out.print(output / "report.md", soft_wrap=True)


def _choose(names: list[str]) -> list[Experiment]:
    """Return the experiments of names, suites and files; ``ConfigError`` for an unknown name."""
    known = find_experiments()
    chosen: dict[str, None] = {}
    for name in names:
        of_suite = [one for one in known if name in ("all", one.partition("/")[0])]
        chosen |= dict.fromkeys(of_suite or [name])
    return [read_experiment(name) for name in chosen]


def _run(
    chosen: list[Experiment], runner: Runner, *, traces: Path | None, seeds: int | None, duration_s: float | None
) -> list[Findings]:
    cases = [cases_of(one, seeds=seeds or one.num_seeds, traces=traces, duration_s=duration_s) for one in chosen]
    wanted = [case for of_one in cases for case in of_one.values()]
    with progress_bar("cases", len(wanted)) as update:
        results = runner.run(wanted, lambda done, of: update(completed=done, total=of))
    found = []
    for experiment, of_one in zip(chosen, cases, strict=True):
        by_place: dict[tuple[str, str], list[tuple[int, str]]] = {}
        for (setup, point, seed), case in of_one.items():
            by_place.setdefault((setup, point), []).append((seed, case.key))
        in_order = {place: [results[key] for _, key in sorted(runs)] for place, runs in by_place.items()}
        found.append(Findings(experiment, in_order))
    return found


def _keep(findings: Findings, output: Path) -> list[str]:
    """Write the result and plots of an experiment; return the names of the plots."""
    stem = findings.experiment.name.replace("/", "-")
    output.mkdir(parents=True, exist_ok=True)
    (output / f"{stem}.json").write_text(json.dumps(as_json(findings), separators=(",", ":")) + "\n")
    pictures = []
    try:
        for place, plot in enumerate(findings.experiment.plots):
            name = f"{stem}-{place + 1}" if place else stem
            (output / f"{name}.png").write_bytes(draw(findings, plot))
            pictures.append(name)
    except ConfigError as error:  # of the first: there is no matplotlib
        note(str(error))
    return pictures


def _show(findings: Findings) -> None:
    """Print the published results beside ours."""
    comparisons = findings.compare()
    experiment = findings.experiment
    told = f"  {experiment.title}: {WORDS[overall(comparisons)]}"
    out.print(Text.assemble("\n", (experiment.name, "bold"), told))
    if comparisons:
        table = Table("", "published", "ours", "", box=None, pad_edge=False)
        for one in comparisons:
            published = format_published(one.claim)
            table.add_row(one.claim.text, published, format_interval(one.ours, one.claim), one.verdict.value)
        out.print(table)
    table = Table("setup", "point", *experiment.shown, box=None, pad_edge=False)
    for setup in experiment.setups:
        for point in experiment.points:
            cells = (format_figure(findings.figure(setup, point.label, name)) for name in experiment.shown)
            table.add_row(setup, point.label, *cells)
    out.print(table)
