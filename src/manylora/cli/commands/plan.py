"""`manylora plan`: the hardware that a service needs, from a search for its capacity with the simulator."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from manylora.cli.options.fields import Chosen, flags_of, with_flags
from manylora.cli.options.scenarios import PLACES, Sets, Traces, WorkloadOptions, change, folders_of, scenario_table
from manylora.cli.options.values import check_output
from manylora.cli.views.terminal import note, notes, out
from manylora.core.config import AdapterConfig, SchedulerConfig
from manylora.core.errors import ConfigError, ModelTooLarge
from manylora.core.machine import count_cores
from manylora.core.memory import EVICTION_POLICIES
from manylora.core.options import option
from manylora.core.plugins import options_for
from manylora.core.scheduling import POLICIES
from manylora.lab.catalog.hardware import HARDWARE
from manylora.lab.planning.load_test import Objective
from manylora.lab.planning.plan import Plan, expected_load_tests, make_plan
from manylora.lab.planning.report import as_json, choose_plan, comparison_table, plan_tables, shortage
from manylora.lab.planning.settings import (
    SHORT,
    PlanSettings,
    Variant,
    adapters_in,
    read_axis,
    read_plan_settings,
    variants,
)
from manylora.lab.pool import start_processes
from manylora.lab.sim.scenario import read_scenario
from manylora.lab.sim.setup import Setup
from manylora.lab.workloads.traces.requests import read_requests

__all__ = ["PlanProgress", "ServiceOptions", "plan_command"]

SILENCE_S = 10.0  # time between two lines about the progress where there is no terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """Options of a plan that stand for settings which are computed from them."""

    trace: str | None = option(
        None,
        panel="Workload",
        metavar="PATH",
        help="Replay the times and lengths of this trace; --rate defaults to its rate.",
    )
    adapters: str | None = option(
        None, panel="Workload", metavar="N or DIR", help="Number of adapters, or a folder of PEFT adapters."
    )
    price: tuple[str, ...] = option(
        (),
        panel="Objective and cost",
        metavar="PRICE",
        help="Price of a device per hour, as a number, or by kind as in a40=0.8. Repeatable.",
    )

    def replay(self) -> dict[str, Any]:
        """Return the settings of a scenario that replay the times and lengths of the trace."""
        if self.trace is None:
            return {}
        replay = {"kind": "replay", "file": str(Path(self.trace).resolve())}
        return {"workload.arrivals": replay, "workload.lengths": replay}

    def rate(self) -> dict[str, float]:
        """Return the rate of the trace, if there is one; ``ConfigError`` if it has no times."""
        if self.trace is None:
            return {}
        times = read_requests(Path(self.trace)).arrival_s
        if times is None or len(times) < 2 or times[-1] <= 0:
            raise ConfigError(f"Got --trace {self.trace!r}, which has no times: set lengths in the scenario instead")
        return {"rate": float((len(times) - 1) / times[-1])}

    def adapter_settings(self) -> dict[str, Any]:
        """Return the settings of a scenario for a number of adapters, or for the adapters in a folder."""
        if self.adapters is None:
            return {}
        if self.adapters.isdecimal():
            return {"workload.adapters.count": int(self.adapters)}
        folder = Path(self.adapters).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"Got --adapters {self.adapters!r}, expected a number or a folder")
        return {"workload.adapters": adapters_in(folder)}

    def prices(self) -> dict[str, Any]:
        """Return ``price``, ``prices`` by hardware, both or neither; ``ConfigError`` for a price that is no number."""
        prices: dict[str, float] = {}
        found: dict[str, Any] = {}
        for text in self.price:
            name, equals, number = text.rpartition("=")
            try:
                value = float(number)
            except ValueError:
                raise ConfigError(f"Got --price {text!r}, expected a number, or something like a40=0.8") from None
            if name in prices or (not equals and "price" in found):
                raise ConfigError(f"Got --price {text!r} beside another price of the same devices")
            if equals:
                prices[name] = value
            else:
                found["price"] = value
        return found | ({"prices": prices} if prices else {})


_PANELS = ("Workload", "Service", "Objective and cost", "Search")

_FLAGS = (
    *flags_of(
        *(Setup, SchedulerConfig, AdapterConfig),
        only=(
            *("model", "hardware", "profile", "tensor_parallel_size"),
            *("policy", "policy_options", "eviction", "eviction_options"),
        ),
        spelled={"hardware": "--gpu"},
        panel="Service",
        may_be_unset=True,
    ),
    *flags_of(WorkloadOptions, only=("slo_ttft", "slo_tbt"), panel="Objective and cost", may_be_unset=True),
    *flags_of(PlanSettings, may_be_unset=True),
    *flags_of(ServiceOptions),
)


@with_flags(_FLAGS, panels=_PANELS)
def plan_command(
    chosen: Chosen,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="A scenario in TOML, as for simulate; by default a synthetic service."),
    ] = None,
    traces: Traces = None,
    sets: Sets = None,
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
) -> None:
    """Report the hardware that a service needs to meet its SLO: capacity, replicas, memory, cost, and the bottleneck.

    The highest rate within the SLO is searched with the simulator, which runs the scheduler, the cache and the memory
    of the server.

    [bold]manylora plan --gpu l40s --slo-ttft 1 --rate 20 --price 1.1[/bold]

    [bold]manylora plan --compare gpu=a40,l40s,h100 --compare policy=fifo,chameleon --slo-ttft 1[/bold]
    """
    table = scenario_table(file)
    service = chosen.make(ServiceOptions)
    given = service.rate() | chosen.given(PlanSettings) | service.prices()
    given |= {"compare": tuple(map(read_axis, compare))} if compare else {}
    settings = replace(read_plan_settings(table.pop("plan", {})), **given)
    if chosen.given(WorkloadOptions) and file is None:
        table.pop("slo", None)  # the SLO given replaces the synthetic one
    table = change(table, service.replay() | chosen.settings(PLACES) | service.adapter_settings(), sets)
    folders = folders_of(file, traces)
    wanted = variants(table, settings.compare)
    plans = _make(_check(wanted, settings, folders, json_file), settings, folders)
    if len(wanted) == 1:
        for shown in plan_tables(plans[0][1]):
            out.print(shown.rich())
    else:
        out.print(comparison_table([(variant.settings, one) for variant, one in plans]).rich())
        if (chosen_place := choose_plan([one for _, one in plans])) is not None:
            variant, one = plans[chosen_place]
            out.print(f"{'fewest devices' if one.cost is None else 'least cost'}: {_words(variant)}")
    for variant, one in plans:
        if (short := shortage(one)) is not None:
            note(f"{_words(variant)}: {short}" if len(wanted) > 1 else short)
    if json_file is not None:
        content = [{"settings": one.settings, "scenario": one.table, "plan": as_json(made)} for one, made in plans]
        json_file.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
        note(f"wrote {json_file}")


def _check(
    wanted: list[Variant], settings: PlanSettings, folders: tuple[Path, ...], json_file: Path | None
) -> list[Variant]:
    """Raise errors of all plans before the first simulation; return the variants whose model fits their devices."""
    scenarios = [read_scenario(variant.table, folders=folders) for variant in wanted]
    fitting, too_large = [], None
    for variant, scenario in zip(wanted, scenarios, strict=True):
        try:
            config = scenario.make_config()
        except ModelTooLarge as error:
            if len(wanted) > 1:
                note(f"left out {_words(variant)}: {error}")
            too_large = error
            continue
        fitting.append(variant)
        options_for("policy", config.scheduler.policy, POLICIES, config.scheduler.policy_options)
        options_for("eviction", config.adapters.eviction, EVICTION_POLICIES, config.adapters.eviction_options)
        Objective(slo=scenario.slo, percentile=settings.percentile)
        settings.demand(scenario.setup.hardware)
    if not fitting and too_large is not None:
        raise too_large
    kinds = dict.fromkeys([*(scenario.setup.hardware for scenario in scenarios), *HARDWARE])
    for name in settings.prices:
        if name not in kinds:
            raise ConfigError(f"Got a price for {name!r}, expected one of {', '.join(kinds)}")
    check_output("--json", json_file)
    return fitting


def _words(variant: Variant) -> str:
    return ", ".join(f"{name} {value}" for name, value in variant.settings.items())


def _make(wanted: list[Variant], settings: PlanSettings, folders: tuple[Path, ...]) -> list[tuple[Variant, Plan]]:
    """Make all plans, and show the progress."""
    plans = []
    tests_each = expected_load_tests(settings.tolerance) + (settings.rate is not None)
    num_processes = min(settings.seeds, count_cores())
    pool = start_processes(num_processes) if num_processes > 1 else None
    with notes.status("planning") as status, pool or nullcontext():
        progress = PlanProgress(
            len(wanted) * tests_each * settings.seeds,
            status.update if notes.is_terminal else note,
            is_live=notes.is_terminal,
            now=perf_counter,
            at_once=1 if pool is None else settings.seeds,
        )
        for number, variant in enumerate(wanted, 1):
            prefix = f"{number}/{len(wanted)} {_words(variant)}, " if len(wanted) > 1 else ""

            def on_run(text: str, prefix: str = prefix) -> None:
                progress.begin_run(f"{prefix}{text}")

            scenario = read_scenario(variant.table, folders=folders)
            objective = Objective(slo=scenario.slo, percentile=settings.percentile)
            demand = settings.demand(scenario.setup.hardware)
            plans.append((variant, make_plan(scenario, objective, demand, on_run=on_run, pool=pool)))
    return plans


@dataclass(eq=False)
class PlanProgress:
    """Describes the runs of plans, some at once: a status line on a terminal, a line now and then elsewhere.

    The number of runs is an estimate: a search that begins far from the capacity takes more of them. Late runs are near
    the capacity and therefore longer than the first, so the time left is estimated from the mean of the runs so far.
    """

    num_runs: int  # estimated runs of all plans together
    write: Callable[[str], None]  # shows a line, in place of the one before it on a terminal
    _: KW_ONLY
    is_live: bool  # whether lines replace each other
    now: Callable[[], float]  # returns a time in seconds that never steps back
    at_once: int = 1  # runs that begin together
    _num_begun: int = 0

    def __post_init__(self) -> None:
        self._began_at = self._written_at = self.now()
        self.write(f"about {self.num_runs} runs of the simulator; the first ones tell how long they take")

    def begin_run(self, text: str) -> None:
        """Begin a run, with its description."""
        now = self.now()
        num_done = self._num_begun - self._num_begun % self.at_once
        self._num_begun += 1
        if not self.is_live and now - self._written_at < SILENCE_S:
            return
        self._written_at = now
        left = ""
        if num_done:
            num_left = max(1, self.num_runs - num_done)
            left_s = num_left * (now - self._began_at) / num_done
            span = f"{max(1, round(left_s))} s" if left_s < 90 else f"{round(left_s / 60)} min"
            left = f", about {span} left"
        self.write(f"run {self._num_begun} of about {max(self.num_runs, self._num_begun)}{left}: {text}")
