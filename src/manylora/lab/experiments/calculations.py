"""Calculations without a simulated run: requests on an idle engine, and one step priced with a family of kernels."""

from __future__ import annotations

from collections.abc import Callable

from manylora.lab.costs.idle import times_on_idle_engine
from manylora.lab.costs.model import SyntheticSequence, synthetic_plan
from manylora.lab.experiments.cases import Case, prepare
from manylora.lab.experiments.result import Result, cdf

__all__ = ["CALCULATIONS", "idle_engine", "kernels"]


def idle_engine(case: Case) -> Result:
    """Return the times of every request of a workload on an idle engine, by part."""
    workload, versions, config = prepare(case)
    times = times_on_idle_engine(workload.requests, versions, config.cost)
    count = len(times)
    ttft = sum(one.ttft_s for one in times) / count
    figures = {
        "ttft_mean": ttft,
        "e2e_mean": sum(one.e2e_s for one in times) / count,
        "load_s": sum(one.load_s for one in times) / count,
        "base_s": sum(one.base_s for one in times) / count,
        "adapter_s": sum(one.adapter_s for one in times) / count,
        "compute_s": sum(one.base_s + one.adapter_s for one in times) / count,
    }
    figures["load_share"] = figures["load_s"] / ttft
    figures["adapter_share"] = (figures["load_s"] + figures["adapter_s"]) / ttft
    for name, values in (("ttft", [one.ttft_s for one in times]), ("e2e", [one.e2e_s for one in times])):
        values.sort()
        figures[f"{name}_p50"] = values[count // 2]
        figures[f"{name}_p99"] = values[int(0.99 * (count - 1))]
    return Result(figures, {"ttft_cdf": cdf(one.ttft_s for one in times), "e2e_cdf": cdf(one.e2e_s for one in times)})


def kernels(case: Case) -> Result:
    """Price one decoding step: every request of the workload has its prompt behind it and generates one token.

    With CPU workers, the adapter of the last request is on its way to the device, and they compute it.
    """
    workload, versions, config = prepare(case)
    base = [SyntheticSequence(one.num_prompt_tokens, 1) for one in workload.requests]
    step = []
    for part, request in zip(base, workload.requests, strict=True):
        version = versions.get(request.adapter or "")
        step.append(part._replace(adapter=version.key, rank=version.rank) if version is not None else part)
    plan = synthetic_plan(step)
    base_s = config.cost.step_time_s(synthetic_plan(base))
    if config.assist is not None:
        step_s = config.assist.step_time_s(plan, plan.sequences[-1:])
    else:
        step_s = config.cost.step_time_s(plan)
    return Result(
        {
            "step_s": step_s,
            "base_s": base_s,
            "adapters_s": step_s - base_s,
            "adapters_share": (step_s - base_s) / base_s,
            "num_adapters": len({one.adapter for one in workload.requests} - {None}),
        }
    )


CALCULATIONS: dict[str, Callable[[Case], Result]] = {"alone": idle_engine, "kernels": kernels}
