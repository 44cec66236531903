"""`manylora calibrate`: a cost profile for simulations, fitted to step times of a live engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from manylora.cli.options.fields import Chosen, flags_of, with_flags
from manylora.cli.options.values import check_output, command_line, panel, resolve_model
from manylora.cli.views.terminal import note, out, progress_bar
from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.core.costs.step_log import LogLine, StepRecord, read_step_log, write_step_log
from manylora.core.errors import ConfigError
from manylora.lab.costs.calibrate import fit_profile, step_shares
from manylora.lab.costs.profile import TERMS, CostProfile

__all__ = ["calibrate"]

_RUN = "With --run"

MOST_ERROR = 0.15  # median error of a good fit, at most
MOST_SPREAD = 2.0  # ratio of the ninth to the first decile of equal steps' durations on an idle machine, at most
FEW_STEPS = 50  # steps held out below which an error says little

_FLAGS = (
    *flags_of(SchedulerConfig, only=("max_num_seqs", "max_num_batched_tokens"), panel=_RUN),
    *flags_of(MemoryConfig, only=("memory_bytes", "num_pages", "block_size")),
    *flags_of(ModelConfig, only=("dtype", "device", "max_model_len", "lora_kernel")),
)


@with_flags(_FLAGS)
def calibrate(
    logs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="LOG...", help="Step logs of one engine, written by serve --step-log."),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Output file of the profile, as JSON.")
    ] = Path("profile.json"),
    model: Annotated[
        str | None,
        typer.Option(
            "--run",
            metavar="MODEL",
            help="Instead of reading logs, build this model's engine and run random bursts of requests, few and many, "
            "short and long, over synthetic adapters.",
        ),
    ] = None,
    seconds: Annotated[float, panel(_RUN, "Length of the sweep in seconds.", min=1.0)] = 120.0,
    num_adapters: Annotated[int, panel(_RUN, "Number of adapters.", "--adapters")] = 24,
    ranks: Annotated[str, panel(_RUN, "Ranks of the adapters, assigned in turn.", metavar="R,R...")] = "8,16,32,64",
    step_log: Annotated[
        Path | None, panel(_RUN, "Write the step log of the sweep to this file.", metavar="FILE")
    ] = None,
    seed: Annotated[int, panel(_RUN, "Seed of the bursts.")] = 0,
    *,
    chosen: Chosen,
) -> None:
    """Fit a cost profile to the durations of steps and loads, and report its error on held-out steps.

    Use it in [bold]manylora simulate --profile FILE[/bold] and [bold]manylora serve MODEL --simulate FILE[/bold]. The
    machine should be otherwise idle.

    [bold]manylora calibrate --run demo --seconds 60 -o demo.json[/bold]
    """
    if bool(logs) == (model is not None):
        raise ConfigError("Got both logs and --run, or neither: expected step logs, or --run MODEL to make one")
    check_output("--output", output)
    check_output("--step-log", step_log)
    lines: list[LogLine]
    if model is not None:
        from manylora.execution.build import build_parts  # imports torch
        from manylora.lab.bench.sweep import sweep_live

        engine = EngineConfig(
            model=chosen.make(ModelConfig, model=resolve_model(model, None, {})[0]),
            memory=chosen.make(MemoryConfig),
            scheduler=chosen.make(SchedulerConfig),
        )
        sweep = partial(
            sweep_live, build_parts, engine, num_adapters=num_adapters, ranks=_parse_ranks(ranks), seed=seed
        )
        lines = _run(sweep, seconds)
        if step_log is not None:
            write_step_log(step_log, lines)
    else:
        lines = list(itertools.chain.from_iterable(map(read_step_log, logs or ())))
    profile = fit_profile(lines, command=command_line())
    profile.write(output)
    _report(profile, lines)
    note(f"{profile.num_steps} steps on {profile.machine or 'an unnamed machine'}; the profile is in {output}")


def _parse_ranks(text: str) -> tuple[int, ...]:
    try:
        ranks = tuple(int(part) for part in text.split(","))
    except ValueError:
        ranks = ()
    if not ranks or min(ranks) < 1:
        raise ConfigError(f"Got ranks = {text!r}, expected positive numbers with commas, as 8,16,32")
    return ranks


def _run(sweep: Callable[..., int], seconds: float) -> list[LogLine]:
    """Run a sweep of so many seconds behind a progress bar, and return its log."""
    lines: list[LogLine] = []
    with progress_bar("building the engine", seconds) as update:

        def advance(elapsed_s: float) -> None:
            update(completed=min(elapsed_s, seconds), description=f"{len(lines)} steps and loads")

        sweep(seconds=seconds, write=lines.append, on_progress=advance)
    return lines


def _report(profile: CostProfile, lines: list[LogLine]) -> None:
    _print_terms(profile, lines)
    _print_errors(profile)
    _print_components(profile)
    for line in _advice(profile):
        note(line)


def _print_terms(profile: CostProfile, lines: list[LogLine]) -> None:
    shares = step_shares(profile, [line.features for line in lines if isinstance(line, StepRecord)])
    table = Table("term", "cost", "share of all steps", title="Terms of a step")
    units = {**TERMS, "turn": "turn of the loop"}
    costs = {**profile.terms, "turn": profile.turn_s}
    for name in sorted(units, key=lambda one: -shares[one]):
        if costs[name] > 0:
            article = "an" if units[name][0] in "aeiou" else "a"
            table.add_row(f"{article} {units[name]}", _time(costs[name]), f"{shares[name]:.1%}")
    rows = profile.rows
    for index, (knot, row_s) in enumerate(zip(rows.knots, rows.row_s, strict=True)):
        end = f"up to {rows.knots[index + 1]}" if index + 1 < len(rows.knots) else "on"
        table.add_row(f"a row, from {knot + 1} {end}", _time(row_s), f"{shares['rows']:.1%}" if index == 0 else "")
    for tier, load in profile.loads.items():
        source = "disk" if tier == "host" else "the host"
        measured = f"{load.num_measured} loads" if load.num_measured else "assumed: the log has no such load"
        table.add_row(f"a load from {source}", f"{_time(load.fixed_s)} + {_time(load.byte_s * 1e6)} per MB", measured)
    out.print(table)


def _print_errors(profile: CostProfile) -> None:
    table = Table("steps", "held out", "mean", "R²", "R² at even speed", "median error", "P90", title="Held-out steps")
    for error in profile.errors:
        table.add_row(
            error.regime,
            str(error.num_steps),
            _time(error.mean_s),
            f"{error.r2:.3f}",
            "-" if error.steady_r2 is None else f"{error.steady_r2:.3f}",
            f"{error.median_error:.1%}",
            f"{error.p90_error:.1%}",
        )
    out.print(table)


def _advice(profile: CostProfile) -> Iterator[str]:
    """Yield what to do about a fit that predicts a typical step badly."""
    for error in profile.errors:
        if error.median_error <= MOST_ERROR:
            continue
        noise = profile.noise.get("decode" if error.regime == "decode" else "prompt")
        tenth = 0 if noise is None else (len(noise.quantiles) - 1) // 10
        spread = 1.0 if noise is None else noise.quantiles[-1 - tenth] / max(noise.quantiles[tenth], 1e-9)
        told = f"{error.regime} steps are predicted within {error.median_error:.0%} only"
        if spread > MOST_SPREAD:
            yield (
                f"{told}: equal steps took times that differ {spread:.1f}-fold, so other processes held the machine; "
                "calibrate on an idle one"
            )
        elif error.num_steps < FEW_STEPS:
            yield f"{told}: {error.num_steps} were held out, too few to tell; give more --seconds, or longer logs"
        else:
            yield (
                f"{told}, on a machine that is steady: the terms do not describe this model here; "
                "do not rely on latencies simulated with this profile"
            )


def _print_components(profile: CostProfile) -> None:
    if profile.speed_drift is None:
        return
    table = Table("length", "slower or faster by", title="Components of speed drift")
    for component in profile.speed_drift.components:
        table.add_row(_time(component.length_s), f"{component.size:.0%}")
    out.print(table)


def _time(seconds: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
