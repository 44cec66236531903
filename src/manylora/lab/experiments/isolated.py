"""Run a case of isolated functions on the simulator, and reduce the run to figures and curves.

A setup with a table ``functions`` is such a case. Figures of one model end with its size (``ttft_mean_7b``).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from manylora.core.errors import ConfigError
from manylora.functions.decisions.billing import PLATFORM, Usage
from manylora.lab.experiments.cases import Case, Curve, Result, cdf, read_workload
from manylora.lab.experiments.spec import Table
from manylora.lab.functions.device import Call
from manylora.lab.functions.setup import FunctionsSetup
from manylora.lab.functions.simulation import FunctionsRun, FunctionsSimulation
from manylora.lab.tables import TableReader
from manylora.lab.workloads import make_workload

__all__ = ["is_isolated", "read_functions", "run_isolated"]

HOUR_S = 3600.0
STAGES = ("libraries", "backbone", "adapter", "kernels")


def is_isolated(case: Case) -> bool:
    """Whether a case is of isolated functions."""
    return "functions" in case.setup


def read_functions(table: Table) -> FunctionsSetup:
    """Return the system of a setup's table; ``ConfigError`` if a key is unknown or a value wrong."""
    if other := sorted(set(table) - {"functions"}):
        raise ConfigError(f"Got {other[0]!r} beside functions, expected all of a system of functions in that table")
    return TableReader({}).read(FunctionsSetup, table["functions"], "setup.functions")


def run_isolated(case: Case) -> Result:
    """Run a case of isolated functions.

    ``ConfigError`` if something in its description is wrong, or a model does not fit.
    """
    setup = read_functions(case.setup)
    workload = make_workload(read_workload(case.workload, case.traces), case.seed)
    run = FunctionsSimulation(workload, setup).run()
    if not run.calls:
        return Result({"requests": 0.0})
    calls = [one for one in run.calls if one.spec.arrival_s >= case.warm_up_s]
    figures = {**_of_run(run), **_felt(calls, ""), **_paid(run, setup, "", [one.name for one in run.functions])}
    curves: dict[str, Curve] = {"ttft_cdf": cdf(_ttft(one) for one in calls)}
    for name in setup.models:
        suffix = "_" + name.rpartition("-")[2]
        own = [one for one in calls if one.function.model.name == name]
        names = [one.name for one in run.functions if one.model.name == name]
        figures |= {**_felt(own, suffix), **_paid(run, setup, suffix, names)}
        curves[f"ttft_cdf{suffix}"] = cdf(_ttft(one) for one in own)
    return Result(figures, curves)


def _ttft(call: Call) -> float:
    assert call.answered_from is not None
    return call.answered_from - call.spec.arrival_s


def _e2e(call: Call) -> float:
    assert call.finished_at is not None
    return call.finished_at - call.spec.arrival_s


def _felt(calls: Seq[Call], suffix: str) -> dict[str, float]:
    """Latencies, and the parts of them that are cold starts; all means are over requests."""
    if not calls:
        return {}
    ttft, e2e = np.array([_ttft(one) for one in calls]), np.array([_e2e(one) for one in calls])
    rest = np.array([one.spec.num_output_tokens - 1 for one in calls])
    objective = np.array([one.function.model.slo_s for one in calls])
    cold = np.array([sum(one.waited_s.values()) for one in calls])
    queued = np.array([(one.started_at or 0.0) - one.spec.arrival_s for one in calls]) - cold
    figures = {
        "ttft_mean": ttft.mean(),
        "ttft_p50": np.quantile(ttft, 0.5),
        "ttft_p99": np.quantile(ttft, 0.99),
        "tpot_mean": ((e2e - ttft)[rest > 0] / rest[rest > 0]).mean() if (rest > 0).any() else 0.0,
        "e2e_mean": e2e.mean(),
        "e2e_p99": np.quantile(e2e, 0.99),
        "slo_attainment": (ttft <= objective).mean(),
        "cold_share": (cold > 0.0).mean(),
        "cold_mean": cold.mean(),
        "queue_mean": queued.mean(),
        "serving_mean": (e2e - cold - queued).mean(),
        "cold_part": cold.sum() / e2e.sum(),
        "batch_mean": np.mean([one.batch_size for one in calls]),
    }
    for stage in STAGES:
        figures[f"cold_{stage}"] = np.mean([one.waited_s.get(stage, 0.0) for one in calls])
    return {name + suffix: float(value) for name, value in figures.items()}


def _paid(run: FunctionsRun, setup: FunctionsSetup, suffix: str, functions: Seq[str]) -> dict[str, float]:
    """Costs per hour: by the ledger, and as if every second of every invocation had one price."""
    prices = setup.prices
    hours = run.duration_s / HOUR_S
    total = Usage()
    for name in functions:
        total = total.plus(run.accounts.get(name, Usage()))
    names = set(functions)
    calls = [one for one in run.calls if one.function.name in names]
    if setup.always_on:
        share = len(functions) / len(run.functions)
        invocations = share * run.num_devices * run.duration_s * prices.idle_device_gb_s * prices.device_gb
    else:
        second = prices.active_device_gb_s * prices.device_gb * setup.billed_share
        invocations = sum(_e2e(one) for one in calls) * second
    cost = prices.cost(total)
    if not calls or not cost:
        return {}
    e2e_s = sum(_e2e(one) for one in calls) / len(calls)
    figures = {
        "cost": cost / hours,
        **{f"cost_{part}": prices.cost(one) / hours for part, one in total.parts().items()},
        "invocation_cost": invocations / hours,
        "effectiveness": 1.0 / (e2e_s * (cost / hours)),  # the figure of merit of ServerlessLoRA, footnote 5
        "invocation_effectiveness": 1.0 / (e2e_s * (invocations / hours)),
        "busy_devices": total.active_device_ns * 1e-9 / run.duration_s,
        "paid_devices": (total.active_device_ns + total.idle_device_ns) * 1e-9 / run.duration_s,
    }
    return {name + suffix: float(value) for name, value in figures.items()}


def _of_run(run: FunctionsRun) -> dict[str, float]:
    tokens = sum(one.spec.num_output_tokens for one in run.calls)
    device_ns = sum(one.active_device_ns + one.idle_device_ns for one in run.accounts.values())
    machine_ns = run.num_devices * round(run.duration_s * 1e9)
    platform = run.accounts.get(PLATFORM, Usage())
    starts = {stage: [one.get(stage, 0.0) for one in run.starts] for stage in STAGES}
    return {
        "requests": len(run.calls),
        "duration_s": run.duration_s,
        "output_tokens_per_s": tokens / run.duration_s,
        "requests_per_s": len(run.calls) / run.duration_s,
        "ledger_error": abs(device_ns - machine_ns) / machine_ns,
        "platform_devices": (platform.active_device_ns + platform.idle_device_ns) * 1e-9 / run.duration_s,
        **{name: float(count) for name, count in run.counts.items()},
        **{f"start_{stage}": sum(times) / len(times) if times else 0.0 for stage, times in starts.items()},
    }
