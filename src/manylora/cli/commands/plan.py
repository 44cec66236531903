"""`manylora plan`: the hardware that a service needs, from a search for its capacity with the simulator."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from manylora.cli.options.fields import Chosen, flags_of, with_flags
from manylora.cli.options.scenarios import PLACES, SETS, TRACES, change, folders_of, scenario_table
from manylora.cli.options.values import panel
from manylora.cli.views.plan_progress import PlanProgress
from manylora.cli.views.terminal import note, notes, out
from manylora.core.config import AdapterConfig, SchedulerConfig
from manylora.core.errors import ConfigError
from manylora.core.memory import EVICTION_POLICIES
from manylora.core.plugins import options_for
from manylora.core.scheduling import POLICIES
from manylora.lab.catalog.hardware import HARDWARE
from manylora.lab.planning import Objective, Plan, expected_load_tests, make_plan
from manylora.lab.planning.report import as_json, comparison_table, plan_tables
from manylora.lab.planning.settings import (
    SHORT,
    PlanSettings,
    Variant,
    adapters_in,
    read_axis,
    read_plan_settings,
    variants,
)
from manylora.lab.sim.scenario import read_scenario, with_setting
from manylora.lab.sim.setup import Setup
from manylora.lab.workloads.traces import read_requests

__all__ = ["plan_command"]

_WORKLOAD, _SERVICE, _OBJECTIVE, _SEARCH = "Workload", "Service", "Objective and cost", "Search"

_FLAGS = flags_of(
    *(Setup, SchedulerConfig, AdapterConfig),
    only=(
        *("model", "hardware", "profile", "tensor_parallel"),
        *("policy", "policy_options", "eviction", "eviction_options"),
    ),
    spelled={"hardware": "--gpu"},
    panel=_SERVICE,
    may_be_unset=True,
)


@with_flags(_FLAGS, panels=(_WORKLOAD, _SERVICE, _OBJECTIVE, _SEARCH))
def plan_command(
    chosen: Chosen,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="A scenario in TOML, as for simulate; by default a synthetic service."),
    ] = None,
    traces: Annotated[Path | None, TRACES] = None,
    sets: Annotated[list[str] | None, SETS] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,VALUE",
            help="Plan for each value, such as gpu=a40,l40s; several axes are combined. "
            f"{', '.join(sorted(SHORT))}, or any setting.",
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the plan with every load test to this file.")
    ] = None,
    rate: Annotated[
        float | None, panel(_WORKLOAD, "Traffic in requests per second, to find the number of replicas.")
    ] = None,
    trace: Annotated[
        Path | None,
        panel(_WORKLOAD, "Replay the times and lengths of this trace; --rate defaults to its rate."),
    ] = None,
    adapters: Annotated[
        str | None, panel(_WORKLOAD, "Number of adapters, or a folder of PEFT adapters.", metavar="N or DIR")
    ] = None,
    slo_ttft: Annotated[float | None, panel(_OBJECTIVE, "Longest time to first token, in seconds.")] = None,
    slo_tbt: Annotated[float | None, panel(_OBJECTIVE, "Longest time between two tokens, in seconds.")] = None,
    percentile: Annotated[
        float | None, panel(_OBJECTIVE, "Percentage of requests that must meet the SLO; 99 by default.")
    ] = None,
    price: Annotated[
        list[str] | None,
        panel(
            _OBJECTIVE,
            "Price of a device per hour, as a number, or by kind as in a40=0.8. Repeatable.",
            metavar="PRICE",
        ),
    ] = None,
    requests: Annotated[int | None, panel(_SEARCH, "Fewest requests of a run; 2000 by default.")] = None,
    seeds: Annotated[int | None, panel(_SEARCH, "Runs of each load test; 2 by default.")] = None,
    tolerance: Annotated[float | None, panel(_SEARCH, "Relative error of the capacity found; 0.02 by default.")] = None,
) -> None:
    """Report the hardware that a service needs to meet its SLO: capacity, replicas, memory, cost, and the bottleneck.

    The highest rate within the SLO is searched with the simulator, which runs the scheduler, the cache and the memory
    of the server.

    [bold]manylora plan --gpu l40s --slo-ttft 1 --rate 20 --price 1.1[/bold]

    [bold]manylora plan --compare gpu=a40,l40s,h100 --compare policy=fifo,chameleon --slo-ttft 1[/bold]
    """
    table = scenario_table(file)
    settings = read_plan_settings(table.pop("plan", {}))
    if trace is not None:
        replay = {"kind": "replay", "file": str(trace.resolve())}
        table = with_setting(with_setting(table, "workload.arrivals", replay), "workload.lengths", replay)
        rate = rate if rate is not None else _rate_of(trace)
    asked: dict[str, Any] = {
        "rate": rate,
        "percentile": percentile,
        "requests": requests,
        "seeds": seeds,
        "tolerance": tolerance,
        "compare": tuple(read_axis(text) for text in compare) if compare else None,
    }
    asked |= _read_prices(price or [])
    settings = replace(settings, **{name: value for name, value in asked.items() if value is not None})
    if (slo_ttft is not None or slo_tbt is not None) and file is None:
        table.pop("slo", None)  # the SLO given replaces the synthetic one
    given = {"slo.ttft_s": slo_ttft, "slo.tbt_s": slo_tbt} | chosen.settings(PLACES) | _adapters(adapters)
    table = change(table, given, sets)
    folders = folders_of(file, traces)

    def plan(variant: Variant, on_run: Callable[[str], None]) -> Plan:
        scenario = read_scenario(variant.table, folders=folders)
        objective = Objective(slo=scenario.slo, percentile=settings.percentile)
        return make_plan(scenario, objective, settings.demand(scenario.setup.hardware), on_run=on_run)

    wanted = variants(table, settings.compare)
    _check(wanted, settings, folders, json_file)
    tests_each = expected_load_tests(settings.tolerance) + (settings.rate is not None)
    plans = _make(wanted, plan, num_runs=len(wanted) * tests_each * settings.seeds)
    if len(plans) == 1:
        for shown in plan_tables(plans[0][1]):
            out.print(shown.rich())
    else:
        out.print(comparison_table([(variant.settings, one) for variant, one in plans]).rich())
    if json_file is not None:
        content = [{"settings": one.settings, "scenario": one.table, "plan": as_json(made)} for one, made in plans]
        json_file.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
        note(f"wrote {json_file}")


def _check(wanted: list[Variant], settings: PlanSettings, folders: tuple[Path, ...], json_file: Path | None) -> None:
    """Raise errors of all plans before the first simulation."""
    scenarios = [read_scenario(variant.table, folders=folders) for variant in wanted]
    for scenario in scenarios:
        config = scenario.make_config()
        options_for("policy", config.scheduler.policy, POLICIES, config.scheduler.policy_options)
        options_for("eviction", config.adapters.eviction, EVICTION_POLICIES, config.adapters.eviction_options)
        Objective(slo=scenario.slo, percentile=settings.percentile)
    kinds = dict.fromkeys([*(scenario.setup.hardware for scenario in scenarios), *HARDWARE])
    for name in settings.prices:
        if name not in kinds:
            raise ConfigError(f"Got a price for {name!r}, expected one of {', '.join(kinds)}")
    if json_file is not None and not json_file.parent.is_dir():
        raise ConfigError(f"Got --json {str(json_file)!r}, and there is no folder {json_file.parent}")


def _make(
    wanted: list[Variant], plan: Callable[[Variant, Callable[[str], None]], Plan], *, num_runs: int
) -> list[tuple[Variant, Plan]]:
    """Make all plans, and show the progress."""
    plans = []
    with notes.status("planning") as status:
        write = status.update if notes.is_terminal else note
        progress = PlanProgress(num_runs, write, is_live=notes.is_terminal, now=perf_counter)
        for number, variant in enumerate(wanted, 1):
            which = "".join(f"{name} {value}, " for name, value in variant.settings.items())
            prefix = f"{number}/{len(wanted)} {which}" if len(wanted) > 1 else ""

            def on_run(text: str, prefix: str = prefix) -> None:
                progress.begin_run(f"{prefix}{text}")

            plans.append((variant, plan(variant, on_run)))
    return plans


def _adapters(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    if text.isdigit():
        return {"workload.adapters.count": int(text)}
    folder = Path(text).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"Got --adapters {text!r}, expected a number or a folder")
    return {"workload.adapters": adapters_in(folder)}


def _rate_of(trace: Path) -> float:
    times = read_requests(trace).arrival_s
    if times is None or len(times) < 2 or times[-1] <= 0:
        raise ConfigError(f"Got --trace {str(trace)!r}, which has no times: set lengths in the scenario instead")
    return float((len(times) - 1) / times[-1])


def _read_prices(texts: list[str]) -> dict[str, Any]:
    """Return ``price``, ``prices`` by hardware, both or neither."""
    prices: dict[str, float] = {}
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            raise ConfigError(f"Got --price {text!r}, expected a number, or something like a40=0.8") from None
        if equals:
            prices[name] = value
        else:
            found["price"] = value
    return found | ({"prices": prices} if prices else {})
